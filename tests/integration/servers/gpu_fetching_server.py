"""`gated_fetching_server` on an emulated GPU (`gpu_server`), whose processes are spawned and not forked."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))

from tests import fake_gpu

fake_gpu.install()

from gated_fetching_server import hold_reads  # noqa: E402
from hooked_server import change_spawned, serve  # noqa: E402

if __name__ == "__main__":
    sys.argv[1:1] = fake_gpu.FLAGS
    serve(hold_reads)
elif __name__ == "__mp_main__":
    change_spawned(hold_reads)
