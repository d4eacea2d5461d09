"""Ranks of an emulated server talk over gloo, whatever backend they ask for."""

from __future__ import annotations

from typing import Any

import torch.distributed


def install() -> None:
    """Have ``init_process_group`` and ``new_group`` use gloo."""
    distributed: Any = torch.distributed
    init, new = distributed.init_process_group, distributed.new_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init("gloo", *args, **kwargs)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        if timeout is not None:
            kwargs["timeout"] = timeout
        return new(ranks, backend="gloo", **kwargs)

    distributed.init_process_group, distributed.new_group = init_process_group, new_group
