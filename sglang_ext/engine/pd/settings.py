"""The settings of prefill and decode apart, for classes that SGLang constructs without any.

Apart from `patches/adapter/kv_manager.py`, which uses them: a server knows its settings before it forks its
processes, and what imports prometheus_client by then keeps it from forking (`patches/cpu/fork.py`).
"""

from __future__ import annotations

import os

from sglang_ext.config import KvConfig

_given: KvConfig | None = None


def configure(config: KvConfig) -> None:
    """Keep the settings of this process. Called by the patch."""
    global _given
    _given = config


def settings() -> KvConfig:
    """The settings of this process; what its environment says where none were kept."""
    return _given or KvConfig.from_user({}, os.environ)
