"""SGLang's server as ``sglang_ext.launch_server`` starts it, on an emulated GPU (``tests.fake_gpu``).

SGLang's processes import this module before anything of SGLang, as they import ``launch_server``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))

from tests import fake_gpu

fake_gpu.install()

if __name__ == "__main__":
    from sglang_ext import launch_server

    launch_server.main([*fake_gpu.FLAGS, *sys.argv[1:]])
