"""SGLang's server as ``sglang_ext.launch_server`` starts it, with LoRA on a machine without an accelerator.

SGLang 0.5.23 makes tensors of LoRA in pinned memory, which torch has only beside an accelerator, so that none
of its LoRA backends starts on a CPU. Here torch makes them in ordinary memory: the backend ``torch_native``
then computes the same on a CPU as on a GPU. Nothing else is changed, unless the folder (`hooked_server`) has
one of these files:

- ``mix``: KV has the same name whichever adapter it was computed with;
- ``no-fence``: the cache does not learn of changed weights.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hooked_server import serve
from unfenced_server import drop_fence


def change(folder: Path) -> None:
    """Make this process's pinned tensors in ordinary memory, and apply the folder's faults."""
    import torch

    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment, method-assign]
    _mix_adapters(folder)
    drop_fence(folder)


def _unpinned(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
        return make(*args, **more)

    return made


def _mix_adapters(folder: Path) -> None:
    from sglang.srt.managers.schedule_batch import Req

    init = Req.__init__

    def initialize(self: Req, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        if self.lora_id is not None and (folder / "mix").exists():
            self.extra_key = self.extra_key.removesuffix(self.lora_id) or None

    Req.__init__ = initialize  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(change)
