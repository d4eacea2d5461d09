"""SGLang importable on a CPU, for its flags."""

from __future__ import annotations

import os

from sglang_ext.patches.cpu import runtime

runtime.prepare_process(os.environ)
