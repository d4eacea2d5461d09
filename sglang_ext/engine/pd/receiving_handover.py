"""One hand-over on decode's side, as a record that moves by the table in `disagg.handover`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_ext.disagg.errors import PeerGoneError
from sglang_ext.disagg.handover import FACTS, Event, ReceiverState, after
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.prompt_logprobs import PromptLogprobs
from sglang_ext.stages import NO_STAGES, StageTimes


@dataclass(slots=True, eq=False)
class ReceivingHandover:
    """One request. read: whether its KV is read, or written by the other side. `stopped` is set when nothing
    uses its slots any more, and will not. wake: called when it has moved by itself.
    """

    address: str
    number: int
    read: bool = True
    state: ReceiverState = ReceiverState.JOINING
    reason: str = ""
    wake: Callable[[], None] = lambda: None
    wanted: Wanted | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once there are slots, which `wanted` names."""
    task: asyncio.Task[None] | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0
    """How long the read took."""
    waited: float = 0.0
    """How long the KV could be read and had no slots."""
    stages: StageTimes = NO_STAGES
    """The request's times at prefill, as received with `Ready`."""
    logprobs: PromptLogprobs | None = None
    """Of the prompt, as prefill has computed them."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return FACTS[self.state].end

    # -- the scheduler's thread -------------------------------------------------------------------------

    def allocated(self, wanted: Wanted) -> bool:
        """The engine has set slots and row aside; False where it is too late for them."""
        with self._lock:
            if self.state is not (ReceiverState.READY if self.read else ReceiverState.WAITING):
                return False
            self.wanted = wanted
            self._move(Event.ALLOCATED)
            return True

    def aborted(self, reason: str) -> bool:
        """The engine gives the request up; False where it has ended already."""
        with self._lock:
            if self.over:
                return False
            self.reason = self.reason or reason
            self._move(Event.ABORT)
            return True

    # -- the event loop ---------------------------------------------------------------------------------

    def moved(self, event: Event) -> None:
        """Move on; a hand-over that was given up meanwhile ends as a cancelled one."""
        with self._lock:
            if self.over or self.state is ReceiverState.STOPPING:
                raise asyncio.CancelledError
            self._move(event)
        self.wake()

    def stops(self, error: BaseException) -> None:
        """It has failed, and its slots may still be in use."""
        with self._lock:
            if not self.over:
                self.reason = self.reason or str(error)
                self._move(Event.PEER_DEAD if isinstance(error, PeerGoneError) else Event.FAULT)

    def failed(self, event: Event, reason: str) -> None:
        """It has failed, and nothing uses its slots any more."""
        with self._lock:
            self.reason = self.reason or reason
            self._move(event)
            if self.state is ReceiverState.STOPPING:
                self._move(Event.STOPPED)

    def _move(self, event: Event) -> None:
        state = after(self.state, event)
        assert isinstance(state, ReceiverState)
        self.state = state
