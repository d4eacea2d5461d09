"""The emulated GPU for the product's own modules, where SGLang does not run."""

from __future__ import annotations

from sglang_ext.engine.movers import gpu_memory
from tests.fake_gpu import ipc


def install() -> None:
    """Change them."""
    ipc.change(gpu_memory)
