"""The agent's socket: one ZeroMQ ROUTER for all routers, CURVE with the cluster's key, and an outbox each.

A slow router delays no other: its messages are kept up to `OUTBOX_BYTES`, and then it is dropped. It will
notice that numbers are missing and send `Hello` again.

One thread; nothing blocks.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from zmq import constants as zmq
from zmq.auth import Authenticator
from zmq.error import Again, ZMQError
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller

from sglang_ext.addresses import bind_one, bracketed, is_loopback
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.disagg.transfer.control import OnlyMembers
from sglang_ext.errors import ConfigError
from sglang_ext.protocol.agent import TO_AGENT, ToAgent
from sglang_ext.radix_global.sync.stream import Reader
from sglang_ext.wire import WireError

logger = logging.getLogger(__name__)

OUTBOX_BYTES: Final = 32 << 20
FULL_BYTES: Final = 4 << 20
"""An outbox with more bytes than this takes no further part of a snapshot."""
QUEUED_MESSAGES: Final = 64
"""Messages that ZeroMQ keeps per router, beside the outbox."""
LINGER_MS: Final = 200
ZAP_DOMAIN: Final = "kv"
REBIND_S: Final = 2.0
REBIND_PAUSE_S: Final = 0.01
"""Between two tries to have the port again."""


@dataclass(slots=True)
class _Outbox:
    messages: deque[bytes] = field(default_factory=deque)
    nbytes: int = 0


class AgentSocket:
    """See the module's docstring.

    Args:
        bind: address to listen on.
        ports: the first free one is taken; 0 is any.

    Raises:
        ConfigError: ``bind`` is not loopback and there is no key, or no port can be had.
    """

    def __init__(self, bind: str, ports: Sequence[int], key: ClusterKey | None) -> None:
        if key is None and not is_loopback(bind):
            raise ConfigError(
                f"the agent will not listen on {bind} without a key",
                field="--kv-cluster-key-file",
                hint="Give the file with the key of the cluster",
            )
        self.refused = 0
        """Frames that were not valid messages, since the start."""
        self._outboxes: dict[Reader, _Outbox] = {}
        self._key = key
        self._pairs: tuple[tuple[bytes, bytes], ...] = ()
        self._context = Context()
        self._authenticator: Any = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, TO_AGENT.limit)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.IPV6, int(":" in bind))
        self.public_key = ""
        """Z85; empty without a key."""
        if key is not None:
            self._secure(key)
        try:
            bind_one(ports, lambda port: self._socket.bind(f"tcp://{bracketed(bind)}:{port or '*'}"))
        except ZMQError as error:
            self.close()
            raise ConfigError(
                f"the agent cannot listen on {bind}, port {ports[-1]}: {error.strerror}",
                field="--kv-ports agent",
            ) from None
        self._endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        self.port = int(self._endpoint.rpartition(":")[2])

    def follow_key(self) -> bool:
        """Listen anew if the cluster's first key has changed, or a key was removed: all connections end, and
        routers that have a key connect again. May block for `REBIND_S`.

        Returns:
            whether it listens anew.

        Raises:
            ZMQError: the port cannot be had any more.
        """
        if self._key is None:
            return False
        known, self._pairs = self._pairs, self._key.curve_pairs()
        if self._pairs[0] == known[0] and set(known) <= set(self._pairs):
            return False
        self._use(self._pairs[0])
        self._outboxes.clear()
        try:
            self._socket.unbind(self._endpoint)
            self._listen_again()
        except ZMQError:
            self._pairs = known  # it is tried again
            raise
        logger.info("the cluster's key has changed: every router connects to %s anew", self._endpoint)
        return True

    def _listen_again(self) -> None:
        end = time.monotonic() + REBIND_S
        while True:
            try:
                self._socket.bind(self._endpoint)
                return
            except ZMQError as error:
                # libzmq gives the port back in a thread of its own.
                if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                    raise
                time.sleep(REBIND_PAUSE_S)

    def _use(self, pair: tuple[bytes, bytes]) -> None:
        self.public_key = pair[0].decode()
        self._socket.curve_publickey, self._socket.curve_secretkey = pair

    def _secure(self, key: ClusterKey) -> None:
        self._pairs = key.curve_pairs()
        self._authenticator = Authenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, credentials_provider=OnlyMembers(key))
        self._use(self._pairs[0])
        self._socket.curve_server = True
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())

    def close(self) -> None:
        """Close every connection, after sending the messages that can be sent at once."""
        self._socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def wait(self, seconds: float, *others: int) -> set[int]:
        """Return when a router's message has come, or when one of ``others`` (descriptors) can be read; and
        after ``seconds``. Returns which of ``others`` can be.
        """
        poller = Poller()
        for each in (self._socket, *others):
            poller.register(each, zmq.POLLIN)
        if self._authenticator is not None:
            poller.register(self._authenticator.zap_socket, zmq.POLLIN)
        ready = dict(poller.poll(max(0.0, seconds) * 1000))
        if self._authenticator is not None and self._authenticator.zap_socket in ready:
            asyncio.run(
                self._authenticator.handle_zap_message(self._authenticator.zap_socket.recv_multipart())
            )
        return {each for each in others if each in ready}

    # -- messages -------------------------------------------------------------------------------

    def receive(self) -> Iterator[tuple[Reader, ToAgent]]:
        """Yield the messages of routers that have come. Does not wait."""
        while True:
            try:
                reader, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError("a message with the wrong number of frames")
                message = TO_AGENT.decode(frames[0])
            except WireError:
                self.refused += 1
                continue
            self._outboxes.setdefault(reader, _Outbox())
            yield reader, message

    def send(self, reader: Reader, data: bytes) -> bool:
        """Send, now or later. False: the router is gone, or its outbox is over `OUTBOX_BYTES`."""
        outbox = self._outboxes.get(reader)
        if outbox is None:
            return False
        if not outbox.messages:
            sent = self._try(reader, data)
            if sent is not None:
                return sent
        outbox.messages.append(data)
        outbox.nbytes += len(data)
        if outbox.nbytes > OUTBOX_BYTES:
            logger.warning("a router does not receive its messages; nothing more is sent until it asks again")
            self.drop(reader)
            return False
        return True

    def flush(self) -> list[Reader]:
        """Send the messages in outboxes, as far as their routers take them. Returns routers that turned out
        to be gone.
        """
        gone: list[Reader] = []
        for reader, outbox in list(self._outboxes.items()):
            while outbox.messages:
                sent = self._try(reader, outbox.messages[0])
                if sent is None:
                    break
                if not sent:
                    gone.append(reader)
                    break
                outbox.nbytes -= len(outbox.messages.popleft())
        for reader in gone:
            self.drop(reader)
        return gone

    def _try(self, reader: Reader, data: bytes) -> bool | None:
        """Whether it was sent; false when the router is gone, ``None`` when it has to be tried again."""
        try:
            self._socket.send_multipart([reader, data], zmq.NOBLOCK)
        except Again:
            return None
        except ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def forget_unsent(self, reader: Reader) -> None:
        """Drop the messages that wait for a router: they are of no use to it any more."""
        if reader in self._outboxes:
            self._outboxes[reader] = _Outbox()

    def drop(self, reader: Reader) -> None:
        """Send a router nothing until its next message comes."""
        self._outboxes.pop(reader, None)

    def is_full(self, reader: Reader) -> bool:
        """Whether much waits for a router."""
        outbox = self._outboxes.get(reader)
        return outbox is not None and outbox.nbytes > FULL_BYTES

    @property
    def waiting(self) -> bool:
        """Whether anything waits for a router to take it."""
        return any(outbox.messages for outbox in self._outboxes.values())

    def __repr__(self) -> str:
        return f"AgentSocket(port={self.port}, routers={len(self._outboxes)}, refused={self.refused})"
