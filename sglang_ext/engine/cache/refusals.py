"""Commands of routers that an instance cannot carry out are answered at once: no request waits for them."""

from __future__ import annotations

import logging

from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.peers.fetch_results import FetchEnd, FetchResult
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, PrefetchResult
from sglang_ext.protocol.agent import Advise, Export, Fetch, Park, Parked, PeerDead, Unpark, Watch
from sglang_ext.wire import Message

logger = logging.getLogger(__name__)

WHY_NOT_MOVED = "requests of models with windows or states are not moved"


class Refusals(Planner):
    """Behind the planners that fetch and move, and in front of those that take hints.

    Args:
        hints: whether a planner takes them.
    """

    def __init__(self, replies: Replies, *, hints: bool) -> None:
        self._replies = replies
        self._hints = hints

    def takes_command(self, message: Message, at: float) -> bool:
        match message:
            case Fetch():
                self._replies.reply_to_fetch(FetchResult(message.id, False, FetchEnd.REFUSED))
            case Advise() if not self._hints:
                self._replies.reply_to_hint(PrefetchResult(message.id, PrefetchEnd.DROPPED, 0, 0))
            case Park():
                self._replies.reply_to_move(Parked(self._replies.epoch, message.id, why=WHY_NOT_MOVED))
            case Export() | Watch():
                # Without an answer: the peer that would read, or the moved request, goes on by itself.
                logger.warning("refused a router's command %s", type(message).__name__)
            case PeerDead() | Unpark():
                pass  # nothing is held for peers, and no request is parked
            case _:
                return False
        return True
