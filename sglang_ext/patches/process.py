"""State of this process: its only module-level variables.

SGLang calls hooks and constructs the classes of a transfer backend without anything of ours among their
arguments, in the server's process and in every scheduler process. The objects that hooks and classes share
are kept here, set by their creator, and nowhere else at a module's level.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_ext.config import KvConfig

if TYPE_CHECKING:
    from sglang_ext.engine.commands import RankCommandQueue
    from sglang_ext.patches.base import Patch


@dataclass
class Process:
    """See the module's docstring."""

    cache: Any = None
    """Ours, which hooks call as long as it is its scheduler's cache (``hooks/scheduler.py``)."""
    commands: RankCommandQueue | None = None
    """Messages added to those that this process's scheduler receives (``hooks/messages.py``)."""
    polled: Any = None
    """The poller that knows those."""
    scheduler: Any = None
    """The scheduler whose pool the transfer backend serves (``adapter/pd/kv_manager.py``)."""
    manager: Any = None
    """The transfer backend's manager, while the server prefills or decodes."""
    config: KvConfig | None = None
    """The server's settings, for the transfer backend, whose bootstrap port is in the server's process."""
    stages: Any = None
    """Counts and reports the stages of ended requests (``hooks/stages.py``)."""
    drafts: tuple[Any, ...] = ()
    """SGLang's runners of the draft models that have KV of their own (``hooks/scheduler.py``)."""
    held_ends: Any = None
    """Keeps finished requests until their answers are durable (``hooks/durability.py``)."""
    checks_vocabulary: bool = False
    """Whether token ids are checked (``hooks/vocabulary.py``)."""
    expected: list[Patch] = field(default_factory=list)
    """Patches that have to be in place (``readiness.py``)."""
    problems: list[str] = field(default_factory=list)

    def settings(self) -> KvConfig:
        """The server's settings; read from the environment where none were kept."""
        return self.config or KvConfig.from_user({}, os.environ)


PROCESS = Process()
