"""A rank whose requests are moved to and from other instances, as both ends of a move see it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.radix_global import RadixTree

if TYPE_CHECKING:
    from sglang_ext.patches.adapter.request_rows import RequestRows

logger = logging.getLogger(__name__)


class MovesFrom(Protocol):
    """The part of the rank's cache that migration uses."""

    scheduler: Any
    page_size: int
    tree: RadixTree
    ranks: Ranks
    write_down: WriteDown | None
    peers: PeerKv | None
    rows: RequestRows


class Transfers(Protocol):
    """The part of the rank's transfer backend that migration uses."""

    agent: Agent
    meeting: str


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
