"""`tcp`: everywhere. The owner serves reads of its registered memory from threads that never take the GIL.

Why a counter read later is enough: the owner's kernel has copied the bytes from memory into the socket when
sendmsg returns, before the reader can have received them; the request for the counter is sent after that.
(Zero-copy sends, which leave the bytes in place until they are on the wire, are not used: their copy would
be later, though still before the reader has them.) Written bytes are in the owner's memory before it
acknowledges.

A data connection proves that it belongs to a CONNECT: the owner sends a nonce, the reader answers with its
session and the nonce's HMAC under a secret that the CONNECT answer carried. The KV itself travels in clear,
as it does over RDMA; on networks that are not trusted, encrypt below (WireGuard, IPsec).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.addresses import bind_one
from sglang_ext.compiled import COMPILED, fence
from sglang_ext.disagg.errors import (
    CancelledTransferError,
    PeerGoneError,
    PeerProtocolError,
    TransferError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import RegionTable
from sglang_ext.disagg.runs import Runs
from sglang_ext.disagg.transports import (
    CancelToken,
    Channel,
    PeerInfo,
    Served,
    Transport,
    TransportName,
    _stream,
    host_memory_only,
)
from sglang_ext.wire import Codec, Message, WireError

SESSION_BYTES: Final = 16
SECRET_BYTES: Final = 32
NONCE_BYTES: Final = 16
HANDSHAKE_SECONDS: Final = 5.0
"""For a whole handshake, however many pieces it comes in."""
MAX_HANDSHAKES: Final = 64
"""Connections that may be proving themselves at a time. One more takes the place of the oldest: an honest
peer is through in milliseconds, and a slow one cannot keep others out."""


class _Answer(Message, frozen=True, tag="tcp"):
    port: int
    secret: bytes


_ANSWER: Codec[_Answer] = Codec(_Answer, 256)


def served_on(answer: bytes) -> tuple[int, bytes]:
    """The port in an owner's answer, and the secret by which a connection proves that it belongs to the
    session.

    Raises:
        PeerProtocolError: it makes no sense.
    """
    try:
        found = _ANSWER.decode(answer)
    except WireError as error:
        raise PeerProtocolError(f"tcp: {error}") from None
    if not 0 < found.port < 65536:
        raise PeerProtocolError(f"tcp: the peer serves on port {found.port}")
    return found.port, found.secret


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, nonce, hashlib.sha256).digest()


def _receive(sock: socket.socket, n: int, deadline: float) -> bytes:
    """deadline: on the monotonic clock, for all of it."""
    data = b""
    while len(data) < n:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left)
        part = sock.recv(n - len(data))
        if not part:
            raise ConnectionResetError("closed in the handshake")
        data += part
    return data


def _error(code: int) -> TransferError:
    if code == _stream.CANCELLED:
        return CancelledTransferError("tcp: the transfer was cancelled")
    if code == _stream.CLOSED:
        return PeerGoneError("tcp: the peer closed the connection")
    if code == _stream.PROTOCOL:
        return PeerProtocolError("tcp: the peer's reply is not the protocol")
    if code <= _stream.ERRNO:
        return PeerGoneError(f"tcp: {os.strerror(_stream.ERRNO - code)}")
    status = _stream.REFUSED - code
    text = {_stream.BAD_RANGE: "a range is outside of its memory", _stream.NO_GRANT: "the grant is over"}
    return PeerProtocolError(f"tcp: the peer refused: {text.get(status, f'status {status}')}")


class Connections:
    """Data connections to one owner, one per lane; each lane's is used by one thread at a time. A lane that
    broke connects again at its next use.
    """

    def __init__(self, target: tuple[str, int], session: bytes, secret: bytes, lanes: int) -> None:
        self._target = target
        self._session = session
        self._secret = secret
        self._sockets: list[socket.socket | None] = [None] * lanes
        self._closed = False
        self._sockets[0] = self._connect(CancelToken())

    def get(self, lane: int, token: CancelToken) -> socket.socket:
        """The connection of a lane.

        Raises:
            PeerGoneError: it cannot be made. CancelledTransferError: the token was cancelled before.
        """
        if self._closed:
            raise PeerGoneError("tcp: the channel is closed")
        if token.cancelled:
            raise CancelledTransferError("tcp: the transfer was cancelled")
        sock = self._sockets[lane]
        if sock is None:
            sock = self._sockets[lane] = self._connect(token)
        return sock

    def made(self, lane: int) -> socket.socket | None:
        """The connection of a lane, where it has one."""
        return self._sockets[lane]

    def drop(self, lane: int) -> None:
        """Bytes may still be on the way, without a reader: the connection goes, and they with it."""
        sock, self._sockets[lane] = self._sockets[lane], None
        if sock is not None:
            sock.close()

    def close(self) -> None:
        """Close all of them."""
        self._closed = True
        for lane in range(len(self._sockets)):
            self.drop(lane)

    def _connect(self, token: CancelToken) -> socket.socket:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        failure: OSError | None = None
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(
                *self._target, type=socket.SOCK_STREAM
            ):
                sock = socket.socket(family, kind, protocol)
                token.on_cancel(functools.partial(shut, sock))
                try:
                    sock.settimeout(max(0.001, deadline - time.monotonic()))
                    sock.connect(address)
                    self._prove(sock, deadline)
                    return sock
                except OSError as error:
                    sock.close()
                    failure = error
                except BaseException:
                    sock.close()
                    raise
        except OSError as error:
            failure = error
        finally:
            token.on_cancel(None)
        if token.cancelled:
            raise CancelledTransferError("tcp: the transfer was cancelled")
        raise PeerGoneError(f"tcp: cannot connect to {self._target[0]}:{self._target[1]}: {failure}")

    def _prove(self, sock: socket.socket, deadline: float) -> None:
        """Show that a connection belongs to this session."""
        _prepare(sock)
        nonce = _receive(sock, NONCE_BYTES, deadline)
        sock.sendall(self._session + _proof(self._secret, nonce))
        if _receive(sock, 1, deadline) != b"\x01":
            raise PeerGoneError("tcp: the owner does not know this session")
        sock.settimeout(None)


class TcpChannel(Channel):
    """Several data connections to one owner, one per lane."""

    name = TransportName.TCP
    ordered = True

    def __init__(
        self, regions: RegionTable, target: tuple[str, int], session: bytes, secret: bytes, lanes: int
    ) -> None:
        self.lanes = lanes
        self._bases = regions.bases
        self._scratch = [_stream.Scratch() for _ in range(lanes)]
        self._connections = Connections(target, session, secret, lanes)

    def read(self, lane: int, runs: Runs, token: CancelToken) -> None:
        self._run(lane, runs, token, None)
        fence()

    def read_then(self, lane: int, runs: Runs, then: Runs, token: CancelToken) -> None:
        # Asked for at once, in requests of their own: the owner's thread has sent the first before it begins
        # with the second.
        self._run(lane, np.concatenate((runs, then)), token, None, runs.shape[0])
        fence()

    def write(self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
        fence()
        self._run(lane, runs, token, grant)

    def _run(
        self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int] | None, barrier: int = 0
    ) -> None:
        sock = self._connections.get(lane, token)
        s = self._scratch[lane]
        token.on_cancel(lambda: shut(sock))
        try:
            fd = sock.fileno()
            if grant is None:
                code = _stream.read(
                    fd, runs, barrier, self._bases, s.ranges, s.head, s.iov, s.message, token.flag
                )
            else:
                packed = grant[0] | grant[1] << 16
                code = _stream.write(
                    fd, runs, self._bases, packed, s.ranges, s.head, s.iov, s.message, token.flag
                )
        finally:
            token.on_cancel(None)
        if token.cancelled or code:
            self._connections.drop(lane)
        if token.cancelled:
            raise CancelledTransferError("tcp: the transfer was cancelled")
        if code:
            raise _error(code)

    def close(self) -> None:
        self._connections.close()


def shut(sock: socket.socket) -> None:
    """End a connection, also while a thread waits for it; its descriptor stays open."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class TcpServed(Served):
    """One reader's data connections, each served by a thread."""

    def __init__(self, owner: TcpTransport, session: bytes, grants: npt.NDArray[np.int64]) -> None:
        self._owner = owner
        self._session = session
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._grants = grants
        self._lock = threading.Lock()
        self._threads: list[tuple[threading.Thread, socket.socket, npt.NDArray[np.int64]]] = []
        self._closed = False

    def start(self, sock: socket.socket) -> None:
        """Serve an authenticated connection."""
        flag = np.zeros(1, np.int64)
        thread = threading.Thread(target=self._serve, args=(sock, flag), name="kv-tcp-serve", daemon=True)
        with self._lock:
            if not self._closed and len(self._threads) < self._owner.max_connections:
                sock.sendall(b"\x01")
                self._threads = [t for t in self._threads if t[0].is_alive()]
                self._threads.append((thread, sock, flag))
                thread.start()
                return
        sock.close()

    def _serve(self, sock: socket.socket, flag: npt.NDArray[np.int64]) -> None:
        """Until the connection ends, or `flag` is set and it is shut."""
        s = _stream.Scratch()
        regions = self._owner.regions
        code = _stream.serve(
            sock.fileno(), regions.bases, regions.sizes, self._grants, s.ranges, s.head, s.iov, s.message,
            s.state, flag,
        )  # fmt: skip
        self._owner.ended(code)
        sock.close()

    def admit(self, slot: int) -> None:
        """Nothing to do: each write is held against `grants`."""

    def revoke_slot(self, slot: int) -> None:
        """As `admit`."""

    def fence(self) -> bool:
        """Cut all data connections; the reader connects again if it is alive and still allowed to."""
        self._cut()
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._owner.forget(self._session)
        self._cut()

    def _cut(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, []
        for _, sock, flag in threads:
            flag[0] = 1
            shut(sock)
        for thread, _, _ in threads:
            thread.join()


class TcpTransport(Transport):
    """See the top of this file.

    bind: address to serve data on; loopback unless the control plane has a key. lanes: connections per
        channel. ports: the first free one is served on; 0 is any.
    """

    name = TransportName.TCP

    def __init__(
        self, regions: RegionTable, bind: str = "127.0.0.1", lanes: int = 2, ports: Sequence[int] = (0,)
    ) -> None:
        super().__init__(regions)
        self._lanes = lanes
        if COMPILED:
            _stream.warm()
        self.max_connections = 64
        self._sessions: dict[bytes, TcpServed] = {}
        self._lock = threading.Lock()
        self._ends: dict[int, int] = {}
        self._greeting: dict[socket.socket, threading.Thread] = {}
        """Connections that are proving themselves, the oldest first."""
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._listener = bind_one(
            ports, lambda port: socket.create_server((bind, port), family=family, backlog=128)
        )
        self.port = int(self._listener.getsockname()[1])
        """It is served on."""
        self._thread = threading.Thread(target=self._listen, name="kv-tcp-listen", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TcpTransport port={self.port} sessions={len(self._sessions)} ends={self._ends}>"

    def unavailable(self) -> str | None:
        return host_memory_only(self.regions) if COMPILED else "numba is missing: pip install numba"

    def offer(self) -> bytes:
        return b"tcp"

    def withdraw(self, offer: bytes) -> None:
        """Nothing was reserved."""

    def accept(self, session: bytes, offer: bytes, grants: npt.NDArray[np.int64]) -> tuple[bytes, Served]:
        if (reason := host_memory_only(self.regions)) is not None:
            raise TransportUnavailableError(f"tcp: {reason}")
        served = self._serving(session, grants)
        with self._lock:
            self._sessions[session] = served
        return _ANSWER.encode(_Answer(self.port, served.secret)), served

    def _serving(self, session: bytes, grants: npt.NDArray[np.int64]) -> TcpServed:
        return TcpServed(self, session, grants)

    def open(self, peer: PeerInfo, session: bytes, offer: bytes, answer: bytes) -> Channel:
        port, secret = served_on(answer)
        return TcpChannel(self.regions, (peer.address, port), session, secret, self._lanes)

    def ended(self, code: int) -> None:
        """Count why a served connection ended."""
        with self._lock:
            self._ends[code] = self._ends.get(code, 0) + 1

    def forget(self, session: bytes) -> None:
        """A session takes no new connections."""
        with self._lock:
            self._sessions.pop(session, None)

    def close(self) -> None:
        shut(self._listener)
        self._thread.join()
        self._listener.close()
        with self._lock:
            greeting = dict(self._greeting)
        for sock, thread in greeting.items():
            shut(sock)
            thread.join()
        for session in list(self._sessions.values()):
            session.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            # A handshake must not hold up the next: it runs in a thread of its own, for seconds at most.
            thread = threading.Thread(target=self._greet, args=(sock,), name="kv-tcp-greet", daemon=True)
            with self._lock:
                if len(self._greeting) >= MAX_HANDSHAKES:
                    oldest = next(iter(self._greeting))
                    del self._greeting[oldest]
                    shut(oldest)
                self._greeting[sock] = thread
                thread.start()

    def _greet(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            _prepare(sock)
            nonce = secrets.token_bytes(NONCE_BYTES)
            sock.sendall(nonce)
            data = _receive(sock, SESSION_BYTES + hashlib.sha256().digest_size, deadline)
            with self._lock:
                self._greeting.pop(sock, None)
                session = self._sessions.get(data[:SESSION_BYTES])
            if session is None or not hmac.compare_digest(
                _proof(session.secret, nonce), data[SESSION_BYTES:]
            ):
                sock.close()
                return
            sock.settimeout(None)
            session.start(sock)
        except OSError:
            sock.close()
        finally:
            with self._lock:
                self._greeting.pop(sock, None)
