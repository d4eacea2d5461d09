"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose forward pass raises at one token.

As a device-side assertion would: the scheduler ends, and with it the server. Its folder (`hooked_server`) is
not used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hooked_server import serve

FATAL_TOKEN = 31_337


def make_fatal(_folder: Path) -> None:
    """Have the forward passes of this process raise where a batch has the token."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    forward = TpModelWorker.forward_batch_generation

    def forward_batch_generation(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if any(FATAL_TOKEN in req.origin_input_ids for req in batch.reqs):
            raise RuntimeError("a device-side assertion that the test placed")
        return forward(self, batch, *args, **kwargs)

    TpModelWorker.forward_batch_generation = forward_batch_generation  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(make_fatal)
