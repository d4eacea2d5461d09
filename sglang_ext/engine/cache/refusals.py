"""Commands of routers that an instance cannot carry out are answered at once: no request waits for them."""

from __future__ import annotations

import logging

from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.peers.fetch_results import FetchEnd, FetchResult
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, PrefetchResult
from sglang_ext.protocol.agent import Advise, Export, Fetch, PeerDead
from sglang_ext.wire import Message

logger = logging.getLogger(__name__)


class Refusals(Planner):
    """Behind the planners that fetch, and in front of those that take hints.

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
            case Export():
                # Without an answer: the peer that would read goes on by itself.
                logger.warning("refused a router's command %s", type(message).__name__)
            case PeerDead():
                pass  # nothing is held for peers
            case _:
                return False
        return True
