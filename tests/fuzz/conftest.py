"""Shared set-up of the fuzz tests: the helpers beside the router's and the engine's tests, and SGLang on a
CPU."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from sglang_ext.patches.cpu import allocator as paged_allocator
from sglang_ext.patches.cpu import runtime

for folder in ("fuzz", "router"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

runtime.prepare_process(os.environ)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang and its dependencies warn about kernels that a CPU lacks
    paged_allocator.apply()
    import sglang.srt.managers.scheduler  # noqa: F401
