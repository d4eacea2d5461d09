"""Messages between two doctors, and one connection between them.

    caller    HELLO nonce                 -> CHALLENGE nonce         all that a stranger receives
    caller    PROOF                       -> WELCOME proof           each a seal of both nonces by the key
    from here on every message is sealed: PING, MEET, KNOCK, REACH, PUSH, PULL, READ_MINE, OFFER, OPEN

A frame is its length (4 bytes, big-endian), a seal (64 hexadecimal digits) and a message. A seal counts the
messages of its side in this session, so that none can be repeated or left out. The key does not travel.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
import socket
from typing import Annotated, Any, Final, TypeVar

import msgspec

from sglang_ext.cluster_key import NO_SEAL, ClusterKey
from sglang_ext.disagg.memory import RegionMeta
from sglang_ext.errors import PeerError
from sglang_ext.wire import Blob, Codec, Count, Epoch, Message, Name, WireError

VERSION: Final = 2
MOST_PORTS: Final = 256
"""Ports of one end's ``--kv-ports`` that are tried."""
MOST_NAMED: Final = 16
"""Other ports of one end, and addresses that both ends have to reach."""
MESSAGE_BYTES: Final = 1 << 16
SEAL_DIGITS: Final = 64
REPLY_S: Final = 45.0
"""Seconds for one answer: compiled loops are built anew where they are not cached."""

Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Port = Annotated[int, msgspec.Meta(ge=1, lt=65536)]
Reasons = Annotated[dict[Name, Name], msgspec.Meta(max_length=16)]
Blobs = Annotated[dict[Name, Blob], msgspec.Meta(max_length=16)]


class Hello(Message, frozen=True, tag="h"):
    """version: of this protocol. release: of this package."""

    version: int
    release: Name
    nonce: Nonce


class Challenge(Message, frozen=True, tag="c"):
    """See the top of this file."""

    nonce: Nonce


class Proof(Message, frozen=True, tag="p"):
    """seal: of both nonces, by a caller."""

    seal: Name


class Welcome(Message, frozen=True, tag="w"):
    """seal: of both nonces, by a listener."""

    seal: Name


class Refused(Message, frozen=True, tag="no"):
    """kind: a `Trouble`. text: a sentence."""

    kind: Name
    text: Name


class Ping(Message, frozen=True, tag="pi"):
    """Asks for the time there."""


class Pong(Message, frozen=True, tag="po"):
    """wall: seconds since the epoch, now."""

    wall: float


class End(Message, frozen=True, tag="e"):
    """Description of one end.

    host: its name. announced: the address that its servers would announce. sees: the address from which the
    other end's connection seems to come. asked: its range of ports; empty for any. ports: its open ports,
    which can be knocked now. taken: how many of the range are in use. left_out: how many are not tried.
    services: other ports, and whether they can be knocked; if not, they are in use. ticket, answer: sent to
    an open port, and received from it.
    """

    host: Name
    announced: Name
    sees: Name
    asked: Name
    ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=MOST_PORTS)]
    taken: Count
    left_out: Count
    services: Annotated[dict[Port, bool], msgspec.Meta(max_length=MOST_NAMED)]
    ticket: Nonce
    answer: Nonce


class Meet(Message, frozen=True, tag="m"):
    """The caller's end. Answered with the listener's."""

    end: End


class Knock(Message, frozen=True, tag="k"):
    """Asks the listener to knock at the caller's ports."""


class Knocked(Message, frozen=True, tag="kd"):
    """Why each port did not answer as it should; not those that did."""

    failed: Annotated[dict[Port, Name], msgspec.Meta(max_length=MOST_PORTS + MOST_NAMED)]


class Reach(Message, frozen=True, tag="r"):
    """Asks the listener to connect to these addresses, ``HOST:PORT``."""

    addresses: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_NAMED)]


class Reached(Message, frozen=True, tag="rd"):
    """Why each was not reached; not those that were."""

    failed: Annotated[dict[Name, Name], msgspec.Meta(max_length=MOST_NAMED)]


class Push(Message, frozen=True, tag="pu"):
    """A stream from the caller follows."""


class Pull(Message, frozen=True, tag="pl"):
    """Asks for a stream from the listener."""


class Took(Message, frozen=True, tag="t"):
    """How much of a stream came, and in how many seconds."""

    nbytes: Count
    seconds: Annotated[float, msgspec.Meta(gt=0)]


class Memory(Message, frozen=True, tag="me"):
    """Identity of an owner of memory, for transports; see `PeerInfo`."""

    epoch: Epoch
    host: Name
    pid: Count
    session: Nonce
    regions: Annotated[tuple[RegionMeta, ...], msgspec.Meta(max_length=1)]


class ReadMine(Message, frozen=True, tag="rm"):
    """The caller's offers, to read the listener's memory. Answered with an `Answer`."""

    offers: Blobs


class Answer(Message, frozen=True, tag="a"):
    """An owner's answers to offers, by transport, and why there is none for others."""

    memory: Memory
    answers: Blobs
    reasons: Reasons


class Offer(Message, frozen=True, tag="o"):
    """Asks for the listener's offers."""


class Offered(Message, frozen=True, tag="od"):
    """The listener's offers, to read the caller's memory."""

    offers: Blobs


class Open(Message, frozen=True, tag="op"):
    """The caller's answer to them."""

    answer: Answer


class Chosen(Message, frozen=True, tag="ch"):
    """The transport by which memory was read, empty for none; and why not by others."""

    name: Name
    reasons: Reasons


CODEC: Final[Codec[Message]] = Codec(
    Hello | Challenge | Proof | Welcome | Refused | Ping | Pong | End | Meet | Knock | Knocked | Reach
    | Reached | Push | Pull | Took | ReadMine | Answer | Offer | Offered | Open | Chosen,
    MESSAGE_BYTES,
)  # fmt: skip
M = TypeVar("M", bound=Message)


class Trouble(enum.StrEnum):
    """Kinds of errors that end a session."""

    NAME = "name"
    """The peer's name cannot be resolved here."""
    CLOSED = "closed"
    """The port refuses connections."""
    UNREACHED = "unreached"
    """Nothing comes back from there."""
    NOT_OURS = "not ours"
    """The port accepts connections, but does not belong to a doctor."""
    VERSION = "version"
    KEY = "key"
    NO_KEY = "no key"
    """One end has a key, the other has none."""
    BUSY = "busy"
    ENDED = "ended"
    """The other end is gone, or has stopped answering."""
    ADDRESS = "address"
    """An end finds no address of its own to announce."""


class TroubleError(PeerError):
    """Ends a session."""

    def __init__(self, kind: Trouble, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Wire:
    """One connection; for one task at a time. sock: connected, not blocking; its creator closes it."""

    def __init__(self, sock: socket.socket, key: ClusterKey | None) -> None:
        self.sock = sock
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._session = b""
        self._role = ""
        self._counts = {"caller": 0, "listener": 0}

    async def greet(self, release: str) -> None:
        """Prove to a listener that this end has the key, and verify that the listener has it.

        Raises:
            TroubleError
        """
        mine = secrets.token_bytes(16)
        await self.send(Hello(VERSION, release, mine))
        session = mine + (await self.receive(Challenge)).nonce
        await self.send(Proof(self._proof("caller", session)))
        self._proven("listener", session, (await self.receive(Welcome)).seal)
        self._session, self._role = session, "caller"

    async def welcome(self, release: str) -> None:
        """The listener's side of `greet`. Raises the error that it sent to the caller.

        Raises:
            TroubleError
        """
        hello = await self.receive(Hello)
        try:
            if hello.version != VERSION:
                raise TroubleError(
                    Trouble.VERSION,
                    f"the caller is of release {hello.release}, the listener of {release}, and they speak "
                    f"versions {hello.version} and {VERSION}",
                )
            mine = secrets.token_bytes(16)
            await self.send(Challenge(mine))
            session = hello.nonce + mine
            self._proven("caller", session, (await self.receive(Proof)).seal)
        except TroubleError as error:
            if error.kind in (Trouble.VERSION, Trouble.KEY, Trouble.NO_KEY):
                await self.send(Refused(error.kind, error.message))
            raise
        await self.send(Welcome(self._proof("listener", session)))
        self._session, self._role = session, "listener"

    def _proof(self, role: str, data: bytes) -> str:
        return NO_SEAL if self._key is None else self._key.seal(f"doctor {role}", data)

    def _proven(self, role: str, data: bytes, seal: str) -> None:
        if (self._key is None) != (seal == NO_SEAL):
            without = role if seal == NO_SEAL else "listener" if role == "caller" else "caller"
            raise TroubleError(Trouble.NO_KEY, f"the {without} was given no cluster key, the other end one")
        if self._key is not None and not self._key.is_sealed(f"doctor {role}", data, seal):
            raise TroubleError(Trouble.KEY, "the cluster keys of the two ends differ")

    async def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            TroubleError: the other end is gone, or does not take it.
        """
        body = CODEC.encode(message)
        seal = self._seal(self._role, body) if self._session else ""
        frame = len(body).to_bytes(4, "big") + seal.ljust(SEAL_DIGITS, NO_SEAL).encode() + body
        await self.put(frame)

    def _seal(self, role: str, body: bytes) -> str:
        self._counts[role] += 1
        return self._proof(f"{role} message", self._session + self._counts[role].to_bytes(8, "big") + body)

    async def receive(self, kind: type[M]) -> M:
        """The next message, which has to be of a kind.

        Raises:
            TroubleError: it is another, or a refusal, or none.
        """
        message = await self.next()
        if isinstance(message, Refused):
            known = message.kind in set(Trouble)
            raise TroubleError(Trouble(message.kind) if known else Trouble.ENDED, message.text)
        if not isinstance(message, kind):
            raise TroubleError(Trouble.NOT_OURS, f"said {type(message).__name__}, not {kind.__name__}")
        return message

    async def next(self) -> Message:
        """The next message.

        Raises:
            TroubleError: there is none.
        """
        head = await self.take(4 + SEAL_DIGITS)
        size = int.from_bytes(head[:4], "big")
        if size > MESSAGE_BYTES:
            raise TroubleError(Trouble.NOT_OURS, "the received bytes are no message of a doctor")
        body = await self.take(size)
        if self._session and self._key is not None:
            role = "listener" if self._role == "caller" else "caller"
            self._counts[role] += 1
            data = self._session + self._counts[role].to_bytes(8, "big") + body
            seal = head[4:].decode("ascii", "replace")
            if not self._key.is_sealed(f"doctor {role} message", data, seal):
                raise TroubleError(Trouble.KEY, "a message was changed on its way")
        try:
            return CODEC.decode(body)
        except WireError as error:
            raise TroubleError(Trouble.NOT_OURS, str(error)) from None

    async def ask(self, message: Message, kind: type[M]) -> M:
        """Send a message and return the answer; see `receive`."""
        await self.send(message)
        return await self.receive(kind)

    async def take(self, nbytes: int) -> bytes:
        """So many bytes."""
        data = bytearray(nbytes)
        await self.fill(memoryview(data))
        return bytes(data)

    async def fill(self, view: memoryview) -> None:
        """Bytes into memory.

        Raises:
            TroubleError: the other end is gone, or sends nothing for `REPLY_S`.
        """
        try:
            async with asyncio.timeout(REPLY_S):
                while view:
                    count = await self._loop.sock_recv_into(self.sock, view)
                    if not count:
                        raise TroubleError(Trouble.ENDED, "it closed the connection")
                    view = view[count:]
        except TimeoutError:
            raise TroubleError(Trouble.ENDED, f"it said nothing for {REPLY_S:.0f} s") from None
        except OSError as error:
            raise TroubleError(Trouble.ENDED, error.strerror or str(error)) from None

    async def put(self, data: Any) -> None:
        """Bytes to the other end; raises as `fill`."""
        try:
            async with asyncio.timeout(REPLY_S):
                await self._loop.sock_sendall(self.sock, data)
        except TimeoutError:
            raise TroubleError(Trouble.ENDED, f"it took nothing for {REPLY_S:.0f} s") from None
        except OSError as error:
            raise TroubleError(Trouble.ENDED, error.strerror or str(error)) from None
