"""A rank whose requests are moved to and from other instances, as both ends of a move see it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.landing import PoolRows
from sglang_ext.engine.peers.peer_kv import Peers
from sglang_ext.engine.ranks import Ranks

logger = logging.getLogger(__name__)


class MovesFrom(Protocol):
    """The part of the rank's cache that migration uses."""

    scheduler: Any
    page_size: int
    ranks: Ranks

    @property
    def peers(self) -> Peers | None:
        """By which blocks go to other instances; None where that is not possible."""

    def stop(self, req: Any) -> None:
        """Take over the KV of a running request, and free its slots. The request goes on with that KV, at
        this or another instance."""

    def copied(self, req: Any, tokens: bytes) -> bool:
        """Whether an export of a stopped request, with these tokens encoded, need not be waited for."""

    def of_weights_in_use(self, req: Any) -> bool:
        """Whether all KV of a request belongs to the weights that are in use."""

    def tenant_of(self, req: Any) -> tuple[str | None, str | None]:
        """The ``extra_key`` and ``cache_salt`` with which a request came."""


class Transfers(Protocol):
    """The part of the rank's transfer backend that migration uses."""

    agent: Agent
    meeting: str

    def beside_running(self, req: Any) -> tuple[PoolRows, ...]:
        """The rows beside the pages of a request that decodes here."""


class MovingRank:
    """The parts of a rank that moves use, and its replies and counts of them."""

    def __init__(self, cache: MovesFrom, replies: Replies) -> None:
        self.cache = cache
        self.reply, self.enqueue = replies.reply_to_move, replies.enqueue
        self.manager: Transfers | None = None
        """The transfer backend of this rank, on a decode instance."""
        self.epoch = replies.epoch
        self.counts: Counter[str] = Counter()
        """Requests that were to be moved, by outcome here."""

    def transfer_by(self, manager: Transfers | None) -> None:
        """The server decodes from now on, with this transfer backend; or it does not any more."""
        self.manager = manager

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Let no exception into SGLang's loop."""
        try:
            yield
        except Exception:
            logger.exception("moving requests failed here")
            self.counts["error"] += 1
