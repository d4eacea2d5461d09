"""The control plane: one ROUTER socket to answer peers, one DEALER per peer to ask it. CURVE when a key is
set.

Frames: [number, message]. A number is chosen by whoever asks; 0 marks what the owner sends by itself.
libzmq drops a peer that announces a message over the limit before any of it is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from zmq import constants as zmq
from zmq.asyncio import Context
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.error import ZMQError

from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    RefusedError,
    TransferDeadlineError,
    TransferError,
)
from sglang_ext.disagg.messages import REPLIES, REQUESTS, Refused, Reply
from sglang_ext.errors import ConfigError, SglangExtError
from sglang_ext.wire import Codec, WireError

log = logging.getLogger(__name__)

NUMBER_BYTES: Final = 8
UNASKED: Final = 0
ZAP_DOMAIN: Final = "kv"


@dataclass(frozen=True, repr=False)
class CurveKeys:
    """The cluster's key pair, as `zmq.curve_keypair()` makes it (40 characters of Z85 each).

    Every member has the same pair: who holds it is a member, nobody else gets past the handshake.
    """

    public: bytes
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.public) != 40 or len(self.secret) != 40:
            raise ConfigError("a CURVE key has 40 characters", hint="Make a pair with zmq.curve_keypair()")

    def __repr__(self) -> str:
        return "<CurveKeys>"


def is_loopback(host: str) -> bool:
    """Whether an address cannot be reached from other hosts."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _secure(socket: Any, keys: CurveKeys | None, *, server: bool) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, REQUESTS.limit)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 1000)
    if keys is None:
        return
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    if server:
        socket.curve_server = True
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
    else:
        socket.curve_serverkey = keys.public


class _OnlyMembers:
    """Credentials provider: the cluster's public key (Z85) and no other."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


Handler = Callable[[bytes, Any], Awaitable[Any]]


class ControlServer:
    """Answers peers. One handler call per request, each in a task of its own: a slow one holds up no
    other.
    """

    def __init__(
        self,
        context: Context,
        bind: str,
        keys: CurveKeys | None,
        handler: Handler,
        requests: Codec[Any] = REQUESTS,
        replies: Codec[Any] = REPLIES,
    ) -> None:
        """Bind to `bind`, a host; the port is the system's choice, or `host:port`.

        requests, replies: the protocol; `Refused` must be one of its replies.

        Raises:
            ConfigError: `bind` is not loopback and there is no key.
        """
        host, _, port = bind.partition(":")
        if keys is None and not is_loopback(host):
            raise ConfigError(
                f"will not listen on {host} without a key", hint="Configure the cluster's CURVE key pair"
            )
        self._handler = handler
        self._requests, self._replies = requests, replies
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused = 0
        self._authenticator: Any = None
        if keys is not None:
            self._authenticator = AsyncioAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(
                ZAP_DOMAIN, credentials_provider=_OnlyMembers(keys.public)
            )
        self._socket = context.socket(zmq.ROUTER)
        _secure(self._socket, keys, server=True)
        self._socket.bind(f"tcp://{host}:{port or '*'}")
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().removeprefix("tcp://")
        self._main = asyncio.create_task(self._serve(), name="kv-control")

    def __repr__(self) -> str:
        return f"<ControlServer {self.address} handling={len(self._tasks)} refused={self.refused}>"

    async def notify(self, identity: bytes, message: Any) -> None:
        """Send a peer something that it did not ask for."""
        await self._send(identity, UNASKED.to_bytes(NUMBER_BYTES, "little"), message)

    async def close(self) -> None:
        """Stop answering; running handlers are cancelled."""
        self._main.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._main, *self._tasks, return_exceptions=True)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.close(linger=0)

    async def _serve(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                self.refused += 1
                continue
            task = asyncio.create_task(self._answer(*frames))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, identity: bytes, number: bytes, data: bytes) -> None:
        reply: Any
        try:
            reply = await self._handler(identity, self._requests.decode(data))
        except WireError as error:
            self.refused += 1
            reply = Refused("protocol", str(error))
        except RefusedError as error:
            reply = Refused(error.reason, str(error))
        except SglangExtError as error:
            reply = Refused("failed", str(error))
        except Exception:
            # A handler that dies silently would leave the peer waiting: tell it, and us.
            log.exception("control request failed")
            reply = Refused("internal", "the peer failed to handle the request; see its log")
        await self._send(identity, number, reply)

    async def _send(self, identity: bytes, number: bytes, message: Any) -> None:
        with contextlib.suppress(ZMQError):
            await self._socket.send_multipart([identity, number, self._replies.encode(message)])


class ControlClient:
    """Asks one peer. `on_unasked` gets what the peer sends by itself."""

    def __init__(
        self,
        context: Context,
        address: str,
        keys: CurveKeys | None,
        on_unasked: Callable[[Reply], None],
        requests: Codec[Any] = REQUESTS,
        replies: Codec[Any] = REPLIES,
    ) -> None:
        self.address = address
        self._on_unasked = on_unasked
        self._requests, self._replies = requests, replies
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._failed: TransferError | None = None
        self.heard = 0.0
        """When the peer last said anything, in the event loop's time."""
        self._socket = context.socket(zmq.DEALER)
        _secure(self._socket, keys, server=False)
        self._socket.connect(f"tcp://{address}")
        self._main = asyncio.create_task(self._receive(), name="kv-control-client")

    def __repr__(self) -> str:
        return f"<ControlClient {self.address} waiting={len(self._waiting)}>"

    async def ask(self, message: Any, seconds: float | None) -> Any:
        """Send a request, return its reply. seconds: None waits until the peer is gone (`fail`).

        Raises:
            RefusedError: the peer said no. PeerProtocolError: its reply is not one.
            TransferDeadlineError: no reply within `seconds`.
        """
        if self._failed is not None:
            raise self._failed
        number = next(self._numbers)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send_multipart(
                    [number.to_bytes(NUMBER_BYTES, "little"), self._requests.encode(message)]
                )
                answer = await reply
        except TimeoutError:
            raise TransferDeadlineError(
                f"{self.address} did not answer {type(message).__name__} within {seconds or 0:g} s"
            ) from None
        finally:
            del self._waiting[number]
        if isinstance(answer, Refused):
            raise RefusedError(answer.reason, answer.text)
        return answer

    async def tell(self, message: Any) -> None:
        """Send a request whose reply nobody waits for, also to a peer that is asked nothing more (`fail`)."""
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "little")
        with contextlib.suppress(ZMQError):
            await self._socket.send_multipart([number, self._requests.encode(message)], zmq.NOBLOCK)

    async def close(self, linger_ms: int = 0) -> None:
        """Stop; whoever waits gets a PeerGoneError. linger_ms: for what was told to reach the peer."""
        self._main.cancel()
        await asyncio.gather(self._main, return_exceptions=True)
        self.fail(PeerGoneError(f"the connection to {self.address} was closed"))
        self._socket.close(linger=linger_ms)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self.heard = asyncio.get_running_loop().time()
            try:
                if len(frames) != 2 or len(frames[0]) != NUMBER_BYTES:
                    raise WireError("a reply with the wrong number of frames")
                message = self._replies.decode(frames[1])
            except WireError as error:
                self.fail(PeerProtocolError(f"{self.address}: {error}"))
                return
            number = int.from_bytes(frames[0], "little")
            if number == UNASKED:
                self._on_unasked(message)
                continue
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)

    def fail(self, error: TransferError) -> None:
        """Ask nothing more; whoever waits gets `error`."""
        self._failed = self._failed or error
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)
