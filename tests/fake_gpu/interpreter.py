"""A lock around Triton's interpreter, and kernels that it cannot run.

It is made for one thread: while it runs a kernel, functions of ``triton.language`` are replaced, and the
number of the program is kept, for the whole process. Servers launch from several. A kernel of SGLang that it
cannot run has a form in torch.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_RUNNING = threading.Lock()


def install() -> None:
    """Have kernels run one after the other."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def alone(self: Any, *args: Any, **kwargs: Any) -> None:
        with _RUNNING:
            run(self, *args, **kwargs)

    GridExecutor.__call__ = alone


def vocab_parallel_embedding(
    ids: Any,
    weight: Any,
    start: int,
    end: int,
    padding: int,
    added_start: int,
    added_end: int,
) -> Any:
    """The rows that this rank has of a vocabulary, zeros for other tokens. The interpreter takes no mask that
    a scalar is part of."""
    own = (ids >= start) & (ids < end)
    added = (ids >= added_start) & (ids < added_end)
    rows = torch.where(own, ids - start, ids - (added_start - (end - start) - padding))
    valid = own | added
    return weight[torch.where(valid, rows, 0)].masked_fill(~valid[..., None], 0)
