"""A command of ours as one of SGLang's requests: on its way from rank 0 to the schedulers of all ranks."""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq


class KvCommand(BaseReq, kw_only=True, tag=True):  # type: ignore[misc, call-arg]
    """See `sglang_ext.engine.commands.Command`. SGLang encodes and broadcasts it."""

    payload: bytes
    at: float = 0.0
