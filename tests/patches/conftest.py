"""SGLang importable on a CPU, as the launcher makes it."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from sglang_ext.patches.cpu import runtime

# Modules beside the tests are imported by their own names.
sys.path.insert(0, str(Path(__file__).parent))

runtime.prepare_process(os.environ)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang and its dependencies warn about kernels that a CPU lacks
    import sglang.srt.managers.scheduler  # noqa: F401
