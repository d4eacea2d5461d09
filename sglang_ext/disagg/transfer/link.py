"""One connected rank: requests to it, detection of its death, and messages that it sends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    RangeError,
    RefusedError,
    SessionEndedError,
    TransferDeadlineError,
    TransferError,
)
from sglang_ext.disagg.memory import locate
from sglang_ext.disagg.messages import (
    Bye,
    Complete,
    Completed,
    Identity,
    Ping,
    Pong,
    Refused,
    Reply,
    Revoke,
    Revoked,
)
from sglang_ext.disagg.tensors import PoolMeta
from sglang_ext.disagg.transfer.control import ControlClient
from sglang_ext.disagg.transfer.peer import Peer
from sglang_ext.tasks import Tasks

log = logging.getLogger(__name__)

LINGER_MS = 500
"""For a last word to reach a peer that was taken for dead."""

T = TypeVar("T")


class Outcome(enum.Enum):
    """How a COMPLETE ended. The bytes are good in each case."""

    RELEASED = "released"
    """The owner acknowledged, and its lease ended by it."""
    LEASE_OVER = "lease_over"
    """The owner acknowledged, but the lease had ended before; the blocks were still unchanged."""
    UNACKNOWLEDGED = "unacknowledged"
    """The owner is gone, or does not answer; its lease ends by itself."""


class Silence:
    """How long a peer has not answered, in seconds during which we could have received an answer.

    Where we notice late that the time of a question is over, this process got no core, and the answer may lie
    in our socket: that question proves nothing about the peer, the next one does.
    """

    LATE_SECONDS = 0.25
    """Beyond this, it was not the event loop's other work."""

    def __init__(self, dead_after: float) -> None:
        self._dead_after = dead_after
        self._waited = 0.0

    def answered(self) -> None:
        """The peer lives."""
        self._waited = 0.0

    def doubted(self, seconds: float) -> None:
        """The peer was reported dead: another `seconds` without an answer are enough."""
        self._waited = max(self._waited, self._dead_after - seconds)

    def unanswered(self, waited: float, late: float) -> bool:
        """A question was not answered; whether that makes it too long.

        Args:
            waited: seconds from the last answer, or the last such question, to the end of its time.
            late: seconds from then until we noticed.
        """
        if late <= self.LATE_SECONDS:
            self._waited += waited
        return self._waited > self._dead_after


class Link:
    """One connected rank: its control client, its peer, and the heartbeat between them."""

    def __init__(
        self, who: Identity, session: bytes, client: ControlClient, peer: Peer, heartbeat: float, dead: float
    ) -> None:
        self.who = who
        self.session = session
        self.client = client
        self.peer = peer
        self.pools: dict[str, PoolMeta] = {p.name: p for p in who.pools}
        self.regions = [(i, m.address, m.nbytes) for i, m in enumerate(who.regions)]
        self._dead_after = dead
        self._interval = heartbeat
        self._silence = Silence(dead)
        self._since = asyncio.get_running_loop().time()
        """Messages received after this are a sign of life."""
        self._tasks = Tasks()
        self._tasks.start(self._heartbeat(), name="kv-heartbeat")

    def __repr__(self) -> str:
        return f"<Link {self.who.instance}/{self.who.rank} {self.peer!r}>"

    def locate(self, address: int, nbytes: int) -> tuple[int, int]:
        """(region, offset) in the peer's registered memory."""
        try:
            return locate(self.regions, address, nbytes)
        except RangeError as error:
            raise PeerProtocolError(f"the peer describes a tensor outside of its regions: {error}") from None

    def fail(self, error: TransferError) -> None:
        """The peer is gone: end its transfers and pending requests."""
        self.peer.fail(error)
        self.client.fail(error)

    def doubt(self) -> None:
        """The peer was reported dead: the next question that it does not answer is the last."""
        self._since = asyncio.get_running_loop().time()
        self._silence.doubted(self._interval / 2)

    async def ask(self, message: Any, seconds: float | None) -> Any:
        """As `ControlClient.ask`; a session that the owner has ended is a peer that is gone.

        Raises:
            SessionEndedError: it lives; connect again.
        """
        try:
            return await self.client.ask(message, seconds)
        except RefusedError as error:
            if error.reason == "session":
                ended = SessionEndedError(str(error))
                self.fail(ended)
                raise ended from None
            raise

    async def ask_for(self, kind: type[T], message: Any, seconds: float | None) -> T:
        """As `ask`; an answer of another kind breaks the protocol."""
        answer = await self.ask(message, seconds)
        if not isinstance(answer, kind):
            raise PeerProtocolError(
                f"{type(message).__name__} was answered by {type(answer).__name__}, not by {kind.__name__}"
            )
        return answer

    def unasked(self, message: Reply) -> None:
        """The owner revokes a grant: stop, then say so. Or it closes."""
        if isinstance(message, Refused):
            self.fail(PeerGoneError(f"{self.who.instance}: {message.text}"))
        if isinstance(message, Revoke):
            self.spawn(self._stop(message.grant))

    def start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run something as part of this link; it is cancelled when the link closes."""
        return self._tasks.start(work)

    def spawn(self, work: Coroutine[object, object, object]) -> None:
        """Run a coroutine in the background; its errors are expected and dropped."""
        self.start(self._quietly(work))

    async def complete(self, request: str, lease: int, discarded: bool, seconds: float) -> Outcome:
        """Send COMPLETE and wait for its acknowledgement."""
        try:
            reply = await self.ask(Complete(self.session, request, lease, discarded), seconds)
        except TransferError:
            return Outcome.UNACKNOWLEDGED
        if not isinstance(reply, Completed):
            return Outcome.UNACKNOWLEDGED
        return Outcome.RELEASED if reply.released else Outcome.LEASE_OVER

    async def give_up(self, grant: int) -> None:
        """Notify the receiver that none of our transfers writes under the grant. It waits for that as long as
        we live, also when each of us has taken the other for dead."""
        message = Revoked(self.session, grant)
        if self.peer.gone is None:
            await self.ask(message, self._dead_after)
        else:
            await self.client.send(message)

    async def close(self) -> None:
        """Disconnect; when the peer receives that, none of our transfers writes there any more."""
        await self._tasks.cancel()
        gone = self.peer.gone
        await self.peer.close()
        if gone is None:
            with contextlib.suppress(TransferError):
                await self.client.ask(Bye(self.session), self._dead_after)
        else:
            await self.client.send(Bye(self.session))
        await self.client.close(LINGER_MS)

    async def _stop(self, grant: int) -> None:
        await self.peer.stop_writes(grant)
        await self.give_up(grant)

    async def _quietly(self, work: Coroutine[object, object, object]) -> None:
        try:
            await work
        except TransferError as error:
            log.debug("%s: %s", self.who.instance, error)

    async def _heartbeat(self) -> None:
        """Ask once an interval. Each question has half of it to be answered, so that the verdict takes
        several, and a question during which this process did not run costs only one interval."""
        pause = patience = self._interval / 2
        silence, loop = self._silence, asyncio.get_running_loop()
        while self.peer.gone is None:
            asked = loop.time()
            if self.client.last_received > self._since:
                silence.answered()  # late, or something else: it lives
            try:
                reply = await self.ask(Ping(self.session, self.peer.channel.name), patience)
            except TransferDeadlineError:
                self._since = max(self._since, asked)
                if silence.unanswered(pause + patience, loop.time() - asked - patience):
                    self.fail(PeerGoneError(f"{self.who.instance} has not answered for too long"))
            except TransferError as error:
                self.fail(error)
            else:
                silence.answered()
                if not isinstance(reply, Pong) or reply.epoch != self.who.epoch:
                    self.fail(PeerGoneError(f"{self.who.instance} restarted: another epoch"))
            await asyncio.sleep(pause)
        # Also where it was a transfer that found out: no request waits for the answer of a dead peer.
        self.client.fail(self.peer.gone)
