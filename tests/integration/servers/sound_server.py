"""SGLang's server as ``sglang_ext.launch_server`` starts it, where torchaudio is not installed.

SGLang reads a sound with soundfile, and imports torchaudio beside it, for sounds of another rate than the
model's. The tests have none of those.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from sglang_ext import launch_server

if __name__ == "__main__":
    if find_spec("torchaudio") is None:
        sys.modules["torchaudio"] = module = ModuleType("torchaudio")
        module.__spec__ = ModuleSpec("torchaudio", None)
    launch_server.main(sys.argv[1:])
