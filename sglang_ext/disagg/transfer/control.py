"""The control plane: one ROUTER socket to answer peers, one DEALER per peer to ask it. CURVE when a key is
set.

Frames: [number, message]. The asking side chooses a number; 0 marks messages that the owner sends by itself.
libzmq drops a peer that announces a message over the limit before any of it is stored.

Keys change while connections are up (`MemberKeys`). When the first pair changes, or a pair is removed, a
server listens anew on its port, at a moment when it is answering no peer. That ends every connection: no peer
can continue with a removed key. A client cannot know by which of the accepted pairs a server listens: with
two it opens two sockets, of which one gets through the handshake. When a connection ends, it opens new ones
by the keys of that time, if those changed or are two, and repeats its unanswered requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from zmq import constants as zmq
from zmq.asyncio import Context
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.error import ZMQError

from sglang_ext.addresses import bind_one, bracketed, is_loopback, split_port
from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    RefusedError,
    TransferDeadlineError,
    TransferError,
)
from sglang_ext.disagg.messages import (
    MOST_MS,
    REPLIES,
    REQUESTS,
    VERSION,
    Refused,
    Reply,
    connecting_version,
)
from sglang_ext.errors import ConfigError, SglangExtError
from sglang_ext.tasks import Tasks
from sglang_ext.wire import Codec, WireError

log = logging.getLogger(__name__)

NUMBER_BYTES: Final = 8
UNASKED: Final = 0
ZAP_DOMAIN: Final = "kv"
LOOK_SECONDS: Final = 0.5
"""Pause between two looks at whether the keys have changed."""
QUIET_SECONDS: Final = 5.0
"""How long a server that changes its key waits, at most, for the answers under way."""
REBIND_SECONDS: Final = 5.0
"""For the system to give the port back, which the socket itself has held."""
ENDED_EVENTS: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""libzmq's events when a server has ended the connection, as a server with another pair does in the
handshake, and when a server does not know our key."""

Pair = tuple[bytes, bytes]
"""A CURVE key pair: public and secret key, 40 characters of Z85 each."""


class MemberKeys(Protocol):
    """The cluster's keys, as they are at the time of a call. For any thread."""

    def curve_pairs(self) -> Sequence[Pair]:
        """The pairs of all keys that are accepted; members use the first."""

    def is_member(self, public: bytes) -> bool:
        """Whether a public key (Z85) is one of theirs."""


@dataclass(frozen=True, repr=False)
class CurveKeys:
    """One key pair for good, as `zmq.curve_keypair()` makes it (40 characters of Z85 each).

    Every member has the same pair: a process that holds it is a member, and no other gets past the handshake.
    """

    public: bytes
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.public) != 40 or len(self.secret) != 40:
            raise ConfigError("a CURVE key has 40 characters", hint="Make a pair with zmq.curve_keypair()")

    def __repr__(self) -> str:
        return "<CurveKeys>"

    def curve_pairs(self) -> Sequence[Pair]:
        """See `MemberKeys`."""
        return ((self.public, self.secret),)

    def is_member(self, public: bytes) -> bool:
        """See `MemberKeys`."""
        return public == self.public


def _limit(socket: Any) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, REQUESTS.limit)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 1000)


class OnlyMembers:
    """Credentials provider: the public keys of the cluster's members."""

    def __init__(self, keys: MemberKeys) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return self._keys.is_member(key)


Handler = Callable[[bytes, Any], Awaitable[Any]]


@dataclass(frozen=True)
class Messages:
    """The message types of a connection. `Refused` must be one of the replies.

    other_release: the error text for bytes that are no reply here but a reply of another release; empty for
        other bytes.
    """

    requests: Codec[Any]
    replies: Codec[Any]
    other_release: Callable[[bytes], str] = lambda data: ""


TRANSFERS: Final = Messages(REQUESTS, REPLIES)


class ControlServer:
    """Answers peers. One handler call per request, each in a task of its own: a slow one holds up no
    other.
    """

    def __init__(
        self,
        context: Context,
        bind: str,
        keys: MemberKeys | None,
        handler: Handler,
        messages: Messages = TRANSFERS,
        ports: Sequence[int] = (0,),
    ) -> None:
        """Bind to `bind`, an address; the port is the first free one of `ports` (0: any), or
        `host:port`.

        Raises:
            ConfigError: `bind` is not loopback and there is no key. ZMQError: no port can be had.
        """
        host, port = split_port(bind)
        if keys is None and not is_loopback(host):
            raise ConfigError(
                f"will not listen on {host} without a key", hint="Configure the cluster's CURVE key pair"
            )
        self._handler = handler
        self._messages = messages
        self._tasks = Tasks()
        self.refused = 0
        self.public_key = b""
        """By which it listens, Z85; empty without keys."""
        self._authenticator: Any = None
        self._socket = context.socket(zmq.ROUTER)
        _limit(self._socket)
        # A socket for both would name 127.0.0.1 as [::ffff:127.0.0.1], and peers would receive that address.
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        if keys is not None:
            self._authenticator = AsyncioAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(ZAP_DOMAIN, credentials_provider=OnlyMembers(keys))
            self._socket.curve_server = True
            self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
            self._use(keys.curve_pairs()[0])
        if port:
            ports = (int(port),)
        try:
            bind_one(ports, lambda port: self._socket.bind(f"tcp://{bracketed(host)}:{port or '*'}"))
        except BaseException:
            self._let_go()
            raise
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().removeprefix("tcp://")
        self._main = asyncio.create_task(self._serve(), name="kv-control")
        self._watch = asyncio.create_task(self._watch_keys(keys), name="kv-control-keys")

    def __repr__(self) -> str:
        return f"<ControlServer {self.address} handling={len(self._tasks)} refused={self.refused}>"

    async def notify(self, identity: bytes, message: Any) -> None:
        """Send a peer something that it did not ask for."""
        await self._send(identity, UNASKED.to_bytes(NUMBER_BYTES, "little"), message)

    async def close(self) -> None:
        """Stop answering; running handlers are cancelled."""
        self._main.cancel()
        self._watch.cancel()
        await asyncio.gather(self._main, self._watch, return_exceptions=True)
        await self._tasks.cancel()
        self._let_go()

    def _let_go(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.close(linger=0)

    def _use(self, pair: Pair) -> None:
        self.public_key = pair[0]
        self._socket.curve_publickey, self._socket.curve_secretkey = pair

    async def _watch_keys(self, keys: MemberKeys | None) -> None:
        """Listen anew when the first pair is another, or one of the pairs is no member's any more."""
        if keys is None:
            return
        known = keys.curve_pairs()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            pairs = keys.curve_pairs()
            if pairs[0] != known[0] or not set(known) <= set(pairs):
                if self._tasks:
                    await asyncio.wait(tuple(self._tasks), timeout=QUIET_SECONDS)
                self._use(pairs[0])
                await self._listen_again()
                log.info("%s: the cluster's key has changed; every peer connects anew", self.address)
            known = pairs

    async def _listen_again(self) -> None:
        endpoint = f"tcp://{self.address}"
        self._socket.unbind(endpoint)
        deadline = time.monotonic() + REBIND_SECONDS
        while True:
            try:
                self._socket.bind(endpoint)
                return
            except ZMQError as error:
                # libzmq gives the port back in a thread of its own.
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    log.error("cannot listen on %s any more: %s", self.address, error)
                    raise
            await asyncio.sleep(0.01)

    async def _serve(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                self.refused += 1
                continue
            self._tasks.start(self._answer(*frames))

    async def _answer(self, identity: bytes, number: bytes, data: bytes) -> None:
        reply: Any
        try:
            reply = await self._handler(identity, self._messages.requests.decode(data))
        except WireError as error:
            self.refused += 1
            reply = Refused("protocol", str(error))
            # Another release's CONNECT may have other fields.
            theirs = connecting_version(data)
            if theirs is not None and theirs != VERSION:
                reply = Refused("version", f"protocol {theirs} there, {VERSION} here; run one release")
        except RefusedError as error:
            again_ms = int(min(MOST_MS, error.again_s * 1000))
            reply = Refused(error.reason, str(error), again_ms)
        except SglangExtError as error:
            reply = Refused("failed", str(error))
        except Exception:
            # A handler that dies silently would leave the peer waiting: tell it, and us.
            log.exception("control request failed")
            reply = Refused("internal", "the peer failed to handle the request; see its log")
        await self._send(identity, number, reply)

    async def _send(self, identity: bytes, number: bytes, message: Any) -> None:
        with contextlib.suppress(ZMQError):
            await self._socket.send_multipart([identity, number, self._messages.replies.encode(message)])


class _Line:
    """One socket of a client, and the events received on it."""

    def __init__(self, socket: Any, ends: Any) -> None:
        self.socket = socket
        self.ends = ends
        """Monitor of connections that ended; None without keys."""
        self.tasks: list[asyncio.Task[None]] = []

    async def close(self, linger_ms: int = 0) -> None:
        me = asyncio.current_task()
        tasks = [task for task in self.tasks if task is not me]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.ends is not None:
            self.socket.disable_monitor()
            self.ends.close(linger=0)
        self.socket.close(linger=linger_ms)


class ControlClient:
    """Sends requests to one peer. `on_unasked` gets messages that the peer sends by itself."""

    def __init__(
        self,
        context: Context,
        address: str,
        keys: MemberKeys | None,
        on_unasked: Callable[[Reply], None] = lambda message: None,
        messages: Messages = TRANSFERS,
    ) -> None:
        self.address = address
        self._context = context
        self._keys = keys
        self._on_unasked = on_unasked
        self._messages = messages
        self._waiting: dict[int, tuple[bytes, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count(1)
        self._failed: TransferError | None = None
        self.last_received = 0.0
        """When the peer last sent a message, in the event loop's time."""
        self._pairs: Sequence[Pair] = ()
        self._lines: list[_Line] = []
        """One socket for each pair by which the server may listen, until a message arrives on one of them."""
        self._closing = Tasks()
        self._closed = False
        self._open()

    def __repr__(self) -> str:
        return f"<ControlClient {self.address} waiting={len(self._waiting)}>"

    async def ask(self, message: Any, seconds: float | None) -> Any:
        """Send a request, return its reply. seconds: None waits until the peer is gone (`fail`).

        Raises:
            RefusedError: the peer refused. PeerProtocolError: its reply is not one.
            TransferDeadlineError: no reply within `seconds`.
        """
        if self._failed is not None:
            raise self._failed
        number = next(self._numbers)
        data = self._messages.requests.encode(message)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (data, reply)
        try:
            async with asyncio.timeout(seconds):
                await self._send(self._lines, number, data)
                answer = await reply
        except TimeoutError:
            raise TransferDeadlineError(
                f"{self.address} did not answer {type(message).__name__} within {seconds or 0:g} s"
            ) from None
        finally:
            del self._waiting[number]
        if isinstance(answer, Refused):
            raise RefusedError(answer.reason, answer.text, answer.again_ms / 1000)
        return answer

    async def send(self, message: Any) -> None:
        """Send a request without waiting for the reply, also after `fail`."""
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "little")
        data = self._messages.requests.encode(message)
        for line in self._lines:
            with contextlib.suppress(ZMQError):
                await line.socket.send_multipart([number, data], zmq.NOBLOCK)

    async def close(self, linger_ms: int = 0) -> None:
        """Stop; pending requests raise PeerGoneError. linger_ms: time for the messages of `send` to reach the
        peer."""
        self._closed = True
        self.fail(PeerGoneError(f"the connection to {self.address} was closed"))
        lines, self._lines = self._lines, []
        await asyncio.gather(*(line.close(linger_ms) for line in lines), *self._closing)

    def fail(self, error: TransferError) -> None:
        """Send no further requests; pending ones raise `error`."""
        self._failed = self._failed or error
        for _, reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)

    async def _send(self, lines: Sequence[_Line], number: int, data: bytes) -> None:
        for line in lines:
            await line.socket.send_multipart([number.to_bytes(NUMBER_BYTES, "little"), data])

    def _open(self) -> None:
        """A line for each pair by which the server may listen; of them, one gets through."""
        self._pairs = () if self._keys is None else self._keys.curve_pairs()
        self._lines = [self._line(public) for public, _ in self._pairs] or [self._line(None)]

    def _line(self, server: bytes | None) -> _Line:
        socket, ends, keys = self._context.socket(zmq.DEALER), None, self._keys
        _limit(socket)
        socket.setsockopt(zmq.IPV6, 1)
        if server is not None:
            socket.curve_publickey, socket.curve_secretkey = self._pairs[0]
            socket.curve_serverkey = server
            ends = socket.get_monitor_socket(ENDED_EVENTS)
        socket.connect(f"tcp://{self.address}")
        line = _Line(socket, ends)
        line.tasks.append(asyncio.create_task(self._receive(line), name="kv-control-client"))
        if keys is not None and ends is not None:
            line.tasks.append(asyncio.create_task(self._reopen_ended(line, keys), name="kv-control-ends"))
        return line

    def _drop(self, line: _Line) -> None:
        self._closing.start(line.close(), name="kv-control-drop")

    async def _reopen_ended(self, line: _Line, keys: MemberKeys) -> None:
        """Open new lines when the server listens by another pair than it did, or does not know ours."""
        while True:
            await line.ends.recv_multipart()
            pairs = keys.curve_pairs()
            is_worth_it = pairs != self._pairs or (self._lines == [line] and len(pairs) > 1)
            if is_worth_it and line in self._lines and not self._closed:
                old = self._lines
                self._open()
                for number, (data, reply) in list(self._waiting.items()):
                    if not reply.done():
                        await self._send(self._lines, number, data)
                for each in old:
                    self._drop(each)

    async def _receive(self, line: _Line) -> None:
        while True:
            frames = await line.socket.recv_multipart()
            self.last_received = asyncio.get_running_loop().time()
            if len(self._lines) > 1 and line in self._lines:
                for other in self._lines:
                    if other is not line:
                        self._drop(other)
                self._lines = [line]
            try:
                if len(frames) != 2 or len(frames[0]) != NUMBER_BYTES:
                    raise WireError("a reply with the wrong number of frames")
                message = self._messages.replies.decode(frames[1])
            except WireError as error:
                text = self._messages.other_release(frames[-1])
                refused = RefusedError("version", f"{self.address}: {text}")
                self.fail(refused if text else PeerProtocolError(f"{self.address}: {error}"))
                return
            number = int.from_bytes(frames[0], "little")
            if number == UNASKED:
                self._on_unasked(message)
                continue
            _, waiting = self._waiting.get(number, (b"", None))
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
