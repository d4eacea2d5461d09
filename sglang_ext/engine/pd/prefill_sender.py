"""Prefill's side of a rank's hand-overs: by number, from the request's coming to the end.

The scheduler's thread calls `open`, `computing`, `complete`, `forget` and `weights_changed`, and looks at
`SendingHandover.state`; all else is called on the transfer thread's event loop.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import JOIN_SECONDS, Event, SenderState
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.leases import Ended
from sglang_ext.engine.pd.early_ranks import EarlyRanks
from sglang_ext.engine.pd.landing import PoolRows
from sglang_ext.engine.pd.messages import MAX_NUMBER, Join, Meet, Push, Ready, Weights
from sglang_ext.engine.pd.prompt_logprobs import PromptLogprobs
from sglang_ext.engine.pd.sending_handover import SendingHandover, SendingRank
from sglang_ext.stages import NO_STAGES, StageTimes


class PrefillSender:
    """All hand-overs of one prefill rank."""

    def __init__(self, rank: SendingRank) -> None:
        self.rank = rank
        self.weights: Weights = ""
        """The weights with which this rank computes. Set by `weights_changed`."""
        self._lock = rank.lock
        self._handovers: dict[int, SendingHandover] = {}
        self.early = EarlyRanks(rank.lock, rank.clock, rank.loop)
        self.ends = rank.ends

    def __repr__(self) -> str:
        return f"<PrefillSender handovers={len(self._handovers)} early={len(self.early)}>"

    @property
    def live(self) -> int:
        """Hand-overs that have not ended."""
        with self._lock:
            return sum(not handover.over for handover in self._handovers.values())

    # -- the scheduler's thread -----------------------------------------------------------------

    def open(self, number: int, *, read: bool = False) -> SendingHandover:
        """A request has come.

        Args:
            read: its KV is read also where servers push: a request that leaves a decode server is complete.

        Raises:
            RefusedError: there is such a hand-over already, or the number is none (SGLang takes 0 for no
                bootstrap_room).
        """
        if not 1 <= number <= MAX_NUMBER:
            raise RefusedError("handover", f"bootstrap_room {number} is not within 1 to {MAX_NUMBER}")
        with self._lock:
            known = self._handovers.get(number)
            if known is not None and not known.over:
                raise RefusedError("handover", f"hand-over {number} is in use by another request")
            handover = SendingHandover(number, self.rank, read=read or not self.rank.pushes)
            self._handovers[number] = handover
            reason = self.early.request_came(number)
        if reason:
            handover.give_up(reason, Event.PEER_ABORT)
        return handover

    def computing(self, handover: SendingHandover) -> None:
        """KV of a request is about to be computed, after any cached KV of the same weights was found."""
        handover.computed_with(self.weights)

    def weights_changed(self, weights: Weights) -> None:
        """From now on this rank computes with these; KV of others, or of both, is not handed over."""
        with self._lock:
            self.weights = weights
            stale = [
                handover for handover in self._handovers.values() if handover.weights not in (None, weights)
            ]
        for handover in stale:
            text = "the weights of the prefill server were changed during the hand-over"
            handover.give_up(text, Event.FAULT)

    def complete(
        self,
        handover: SendingHandover,
        pages: Ids,
        metadata: bytes,
        stages: StageTimes = NO_STAGES,
        logprobs: PromptLogprobs | None = None,
        beside: tuple[PoolRows, ...] = (),
    ) -> None:
        """The KV of the whole prompt is in `pages`, which stay as they are until the hand-over has ended.

        Args:
            stages: how long the request took up to here; sent to decode.
            logprobs: of the prompt, for decode's answer.
            beside: blocks of other pools with further state of the prompt, which stay as the pages do.
        """
        self.computing(handover)
        handover.complete(np.asarray(pages, np.int64), Ready((), metadata, stages, logprobs), beside)

    def forget(self, handover: SendingHandover) -> None:
        """The engine is done with the request. A lost hand-over answers late decode ranks for a while
        (`tick`)."""
        handover.give_up("the request is over")
        with self._lock:
            if handover.state is SenderState.RELEASED and self._handovers.get(handover.number) is handover:
                del self._handovers[handover.number]

    # -- the event loop ---------------------------------------------------------------------------

    async def join(self, message: Join) -> Ready:
        """A decode rank takes part; returns when the request is computed.

        Raises:
            RefusedError: there is no such hand-over, or it ended without KV; the text gives the reason. Or,
                with the reason `session`, its connection is over, and it may take part by another one.
        """
        handover = await self._appears(message)
        with self._lock:
            answer = handover.join(message, self.weights)
        return await answer

    async def meet(self, message: Meet) -> None:
        """A decode rank takes part, and will name pages to be filled.

        Raises:
            RefusedError: as `join`.
        """
        handover = await self._appears(message)
        with self._lock:
            handover.meet(message, self.weights)

    async def push(self, message: Push) -> Ready:
        """A decode rank that takes part names pages to be filled; returns when they are.

        Raises:
            RefusedError: it does not take part, or the request has ended; the text gives the reason.
        """
        return await self._known(message.handover).push(message)

    def done(self, number: int, epoch: bytes) -> None:
        """A decode rank needs nothing more.

        Raises:
            RefusedError: it has no part in such a hand-over.
        """
        with self._lock:
            self._known(number).done(epoch)

    def peer_aborts(self, number: int, epoch: bytes, reason: str, rejoins: bool = False) -> None:
        """The request is over on decode, perhaps before it could join; or one of its ranks takes its part
        back, and rejoins by another connection.

        Raises:
            RefusedError: there is no such hand-over, or other decode ranks have it.
        """
        with self._lock:
            handover = self._handovers.get(number)
            reason = f"decode gave the request up: {reason}"
            if handover is None and self.early.leave(number, epoch, reason, rejoins=rejoins):
                return
            if handover is None or (handover.readers and epoch not in handover.readers):
                raise RefusedError("handover", f"hand-over {number} is unknown here")
            if rejoins and handover.leave(epoch):
                return
        handover.give_up(reason, Event.PEER_ABORT)

    def lease_ended(self, ended: Ended) -> None:
        """A lease of a pool has ended, and its pages are open. Ignores leases of returns. On the event loop,
        or in a call that ends a lease."""
        with self._lock:
            handover = self._handovers.get(_number_of(ended.lease.request))
            if handover is not None:
                handover.lease_ended(ended)

    def tick(self) -> None:
        """End hand-overs that are overdue, and those in which a decode rank's session is over."""
        now = self.rank.clock.monotonic()
        with self._lock:
            for handover in [each for each in self._handovers.values() if each.over]:
                if now - handover.since > JOIN_SECONDS:
                    del self._handovers[handover.number]
            self.early.forget_old()
            live = [each for each in self._handovers.values() if not each.over]
        for handover in live:
            handover.end_if_overdue()

    def check(self) -> None:
        """Verify that leases belong to live hand-overs."""
        with self._lock:
            for handover in self._handovers.values():
                leased = any(reader.offers for reader in handover.readers.values())
                assert not (leased and handover.over), "a lease of a hand-over that is over"

    # -- inside -----------------------------------------------------------------------------------

    def _known(self, number: int) -> SendingHandover:
        handover = self._handovers.get(number)
        if handover is None:
            raise RefusedError("handover", f"hand-over {number} is unknown here")
        return handover

    async def _appears(self, message: Join | Meet) -> SendingHandover:
        """The hand-over that a message names, once its request has come: decode may send the message first.
        Its session lives.
        """
        number = message.handover
        self._require_connected(message)
        with self._lock:
            handover = self._handovers.get(number)
            if handover is not None:
                return handover
            future = self.early.enter(number, message.reader)
        await self.early.wait(number, future)
        with self._lock:
            handover = self._handovers.get(number)
        if handover is None:
            raise RefusedError("handover", f"hand-over {number} is over")
        self._require_connected(message)
        return handover

    def _require_connected(self, message: Join | Meet) -> None:
        """Raises:
        RefusedError: `session`, as for whatever else is asked in a session that is over.
        """
        if not self.rank.connected(message.session):
            raise RefusedError("session", "this session is over; connect again")


def _number_of(name: str) -> int:
    """The hand-over that a lease's name stands for; 0, which is none, for a return's."""
    try:
        return int(name, 16)
    except ValueError:
        return 0
