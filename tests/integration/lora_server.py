"""SGLang's server as ``sglang_ext.launch_server`` starts it, with LoRA on a machine without an accelerator.

SGLang 0.5.23 makes tensors of LoRA in pinned memory, which torch has only beside an accelerator, so that none
of its LoRA backends starts on a CPU. Here torch makes them in ordinary memory. Nothing else is changed: the
backend ``torch_native`` computes on a CPU what it computes on a GPU.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hooked_server import serve


def unpin(folder: Path) -> None:
    """Make this process's pinned tensors in ordinary memory."""
    import torch

    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment, method-assign]


def _unpinned(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
        return make(*args, **more)

    return made


if __name__ == "__main__":
    serve(unpin)
