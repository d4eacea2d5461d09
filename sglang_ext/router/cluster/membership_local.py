"""Membership shared by the routers of one machine, through sockets in a folder that only they can enter.

Each router listens at a socket in the folder and connects to the sockets of all others. To each connection it
sends all its records, then every change. There is no leader and no file: every router has all records, so any
of them may die; if all die, they begin again without records.

Documents are sent last, one by one, and changes go before the documents that remain. A malformed or too large
frame is skipped. A router that reads too slowly is disconnected, and gets all records again when it
reconnects.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.errors import ConfigError, PeerError
from sglang_ext.folders import own_folder
from sglang_ext.protocol.cluster import StoreView
from sglang_ext.router.api.documents import MAX_DOCUMENT_BYTES, Document, decode_document
from sglang_ext.router.cluster.broadcast import RouterMessage, decode_message, encode_message
from sglang_ext.router.cluster.membership import (
    MAX_SESSION_CHARACTERS,
    ROUTER_TTL_S,
    Listener,
    RouterStatus,
    Sightings,
)
from sglang_ext.router.cluster.roster import Intent, Member, decode_member, encode_member
from sglang_ext.router.http.spare_files import SpareFiles
from sglang_ext.router.tenancy.bounded import Bounded, size_of
from sglang_ext.tasks import Rounds, Tasks

logger = logging.getLogger("router.membership")

SUFFIX = ".sock"
AGAIN_S = 0.5
"""Pause before a router is accepted again, where that failed."""
HEARING_S = 2.0
"""Longest wait of the start for the records of another router: a stopped one sends none."""
MAX_FRAME = 4 * MAX_DOCUMENT_BYTES
"""A larger one is not sent, and skipped."""
SLICE_BYTES = 1 << 20
MAX_BEHIND = 64 << 20
"""Bytes that may wait for one router."""
MAX_SESSIONS = 20_000
MAX_SESSION_BYTES = 16 << 20

MEMBER, DOCUMENT, SESSION, STATUS, MESSAGE, COMPLETE = b"m", b"d", b"s", b"r", b"w", b"c"
"""The kinds of frames, by their first byte. After ``COMPLETE``, everything is new."""


@dataclass(slots=True)
class _Hearing:
    """Progress of reading one router."""

    complete: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all its records have arrived."""
    sessions_are_new: bool = False
    """Its earlier sessions have arrived: a session from here on is newer than ours."""


class LocalMembership:
    """Membership of the routers that name one folder.

    Args:
        folder: of this user, mode 0700.
        router: this router's name.
        clock: seconds.
        rounds: run what listens for other routers.
    """

    shares = True

    def __init__(self, folder: Path, router: str, clock: Clock, *, rounds: Rounds | None = None) -> None:
        self._folder = folder
        self._router = router
        self._clock = clock
        self._rounds = rounds or Rounds(clock)
        self._tasks = Tasks(functools.partial(self._rounds.failed, "hear_routers"))
        self._knocked = asyncio.Event()
        self._listener: Listener | None = None
        self._directory = -1
        self._door: socket.socket | None = None
        self._spare = SpareFiles()
        self._hearers: set[asyncio.StreamWriter] = set()
        """Connections to routers that receive from this one."""
        self._heard: dict[str, _Hearing] = {}
        """Routers that this one receives from."""
        self._statuses: dict[str, tuple[float, RouterStatus]] = {}
        """The last status of each other router and its time of arrival, by socket."""
        self._sessions: Bounded[str, str] = Bounded(
            MAX_SESSION_BYTES, lambda session, instance: size_of(session), max_entries=MAX_SESSIONS
        )
        self.tables: Mapping[str, Bounded[Any, Any]] = {"local-sessions": self._sessions}
        self._status: RouterStatus | None = None
        self._since = clock.monotonic()
        self.others: Mapping[str, RouterStatus] = {}
        self.refused = 0
        """Frames that were malformed or too large."""
        self.unsent = 0
        self._sightings = Sightings(self._clock)
        """By instance: the stamp of its record, and when that was first seen here; ``monotonic``."""

    def __repr__(self) -> str:
        return f"LocalMembership({self._folder}, reads {len(self._heard)}, read by {len(self._hearers)})"

    # -- the contract ---------------------------------------------------------------------------------------

    async def start(self, listener: Listener) -> None:
        """Listen, and receive the records of the other routers.

        Raises:
            ConfigError: the folder is not there, or others than its user can enter it.
        """
        self._directory = _open_private(self._folder)
        self._spare.fill()
        self._listener = listener
        # By the folder's descriptor: the path of a socket has at most 107 characters. It gets its name when
        # it listens: a router that finds a socket without a listener takes its owner for dead.
        here = f"/proc/self/fd/{self._directory}/"
        self._door = door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        door.bind(f"{here}.{self._router}")
        os.chmod(f"{here}.{self._router}", 0o600)
        door.listen(64)
        os.rename(f"{here}.{self._router}", f"{here}{self._router}{SUFFIX}")
        self._tasks.keep(
            self._rounds.start("accept_routers", functools.partial(self._accept, door, listener))
        )
        self._look()
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARING_S):
                for hearing in list(self._heard.values()):
                    await hearing.complete.wait()

    async def stop(self) -> None:
        """End every connection; the other routers notice the end."""
        self._listener = None
        if self._door is not None:
            asyncio.get_running_loop().remove_reader(self._door)
            with suppress(FileNotFoundError):
                os.unlink(self._router + SUFFIX, dir_fd=self._directory)
            while self._tasks:
                await self._tasks.cancel()
            for writer in list(self._hearers):
                self._cut(writer)
            self._door.close()
            self._door = None
            os.close(self._directory)
            self._spare.close()
            await asyncio.sleep(0)  # in which the loop closes aborted connections
        self.others = {}

    def publish(self, member: Member) -> None:
        """Send the record to the other routers."""
        self._sightings.seen(member)
        self._tell_all(MEMBER, encode_member(member))

    def share_status(self, status: RouterStatus) -> None:
        """Send the status to the other routers, drop silent routers, and connect to new ones."""
        if self._listener is None:
            return
        self._status = status
        self._tell_all(STATUS, msgspec.json.encode(status))
        now = self._clock.monotonic()
        silent = [name for name, (at, _) in self._statuses.items() if now - at > ROUTER_TTL_S]
        for name in silent:
            del self._statuses[name]
        if silent:
            self._see_others()
        self._look()
        self._spare.fill()

    def remember(self, session: str, instance: str) -> None:
        """Send the session to the other routers."""
        if self._listener is not None and len(session) <= MAX_SESSION_CHARACTERS:
            self._keep(session, instance)
            self._tell_all(SESSION, msgspec.json.encode((session, instance)))

    def share(self, document: Document) -> None:
        """Send the document to the other routers."""
        self._tell_all(DOCUMENT, self._written(document))

    def broadcast(self, message: RouterMessage) -> None:
        """Send the message to the other routers."""
        self._tell_all(MESSAGE, encode_message(message))

    def view(self) -> StoreView:
        """Always there."""
        return StoreView(
            kind="local",
            since_s=round(self._clock.monotonic() - self._since, 3),
            address=f"local://{self._folder}",
        )

    # -- telling --------------------------------------------------------------------------------------------

    async def _accept(self, door: socket.socket, listener: Listener) -> float:
        """Wait for one router to connect, and send it all records; returns the pause until the next."""
        loop = asyncio.get_running_loop()

        def knock() -> None:
            loop.remove_reader(door)  # until the next round: this one may fail, and the router waits there
            self._knocked.set()

        loop.add_reader(door, knock)
        await self._knocked.wait()
        self._knocked.clear()
        try:
            # Not `sock_accept`: cancelled in the moment of an accept, it would lose the connection.
            connection, _ = self._spare.run(door.accept)
        except BlockingIOError:
            return 0.0
        except OSError as error:
            logger.warning("a router cannot be accepted, which is tried again: %s", error)
            return AGAIN_S
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        self._hearers.add(writer)
        writer.writelines(self._everything_small(listener))
        self._tasks.start(self._tell_documents(writer, listener), name="tell a router documents")
        self._tasks.start(self._until_gone(reader, writer), name="a router hears this one")
        self._look()
        return 0.0

    async def _until_gone(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read(1)  # the router sends nothing on this connection
        self._cut(writer)

    def _cut(self, writer: asyncio.StreamWriter) -> None:
        self._hearers.discard(writer)
        writer.transport.abort()

    def _everything_small(self, listener: Listener) -> Iterator[bytes]:
        for member in list(listener.records()):
            if member.intent is not Intent.STAY or self._sightings.alive(member, listener):
                yield _frame(MEMBER, encode_member(member))
        for session in self._sessions.items():
            yield _frame(SESSION, msgspec.json.encode(session))
        # Sessions end with the first frame of another kind: see `_take`.
        for message in listener.snapshot():
            yield from self._framed(MESSAGE, encode_message(message))
        if self._status is not None:
            yield _frame(STATUS, msgspec.json.encode(self._status))

    async def _tell_documents(self, writer: asyncio.StreamWriter, listener: Listener) -> None:
        """Send every document to a router, each when the one before is on its way, and then ``COMPLETE``."""
        with suppress(OSError):
            for document in list(listener.documents()):
                if not self._write(writer, self._framed(DOCUMENT, self._written(document))):
                    return
                await writer.drain()
                await asyncio.sleep(0)  # where nothing waits, draining lets nothing else run
            self._write(writer, [_frame(COMPLETE)])

    def _written(self, document: Document) -> bytes:
        return msgspec.json.encode(document.shifted(-self._clock.monotonic()))

    def _framed(self, kind: bytes, body: bytes) -> list[bytes]:
        """The frame of a message; none when it is too large."""
        if len(body) < MAX_FRAME:
            return [_frame(kind, body)]
        self.unsent += 1
        logger.warning("%d bytes of kind %r are not sent to other routers: too large", len(body), kind)
        return []

    def _tell_all(self, kind: bytes, body: bytes) -> None:
        if not (frames := self._framed(kind, body)):
            return
        for writer in list(self._hearers):
            if writer.transport.get_write_buffer_size() > MAX_BEHIND:
                logger.warning("another router does not keep up, and is to hear everything again")
                self._cut(writer)
            else:
                self._write(writer, frames)

    def _write(self, writer: asyncio.StreamWriter, frames: Iterable[bytes]) -> bool:
        """Write frames to a router; returns whether its connection was open."""
        if writer.transport.is_closing():  # uvloop raises RuntimeError where asyncio drops the bytes
            self._cut(writer)
            return False
        writer.writelines(frames)
        return True

    # -- hearing --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Connect to every router of the folder."""
        try:
            entries = self._spare.run(lambda: os.listdir(self._directory))
        except OSError as error:
            logger.warning("other routers cannot be looked for, which is tried again: %s", error)
            return
        for entry in entries:
            name, suffix = os.path.splitext(entry)
            if suffix == SUFFIX and name != self._router and name not in self._heard:
                hearing = self._heard[name] = _Hearing()
                self._tasks.start(self._hear(name, hearing), name=f"hear router {name}")

    async def _hear(self, name: str, hearing: _Hearing) -> None:
        writer = None
        try:
            path = f"/proc/self/fd/{self._directory}/{name}{SUFFIX}"
            reader, writer = await self._connect(path)
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                if not 0 < size <= MAX_FRAME:
                    self._refuse(name, f"a frame of {size} bytes")
                    while size > 0:
                        size -= len(await reader.readexactly(min(size, SLICE_BYTES)))
                    continue
                frame = await reader.readexactly(size)
                try:
                    self._take(name, frame[:1], frame[1:], hearing)
                except (PeerError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    self._refuse(name, str(error)[:200])
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):  # its router has died, and its name does not come again
                os.unlink(name + SUFFIX, dir_fd=self._directory)
        except (OSError, EOFError):
            pass  # it has gone
        finally:
            hearing.complete.set()
            del self._heard[name]
            if writer is not None:
                writer.transport.abort()
            if self._statuses.pop(name, None) is not None:
                self._see_others()

    async def _connect(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        sock = self._spare.run(lambda: socket.socket(socket.AF_UNIX, kind))
        try:
            await asyncio.get_running_loop().sock_connect(sock, path)
            return await asyncio.open_unix_connection(sock=sock)
        except BaseException:
            sock.close()
            raise

    def _refuse(self, name: str, why: str) -> None:
        self.refused += 1
        logger.warning("a message of router %s is dropped: %s", name, why)

    def _take(self, name: str, kind: bytes, body: bytes, hearing: _Hearing) -> None:
        if (listener := self._listener) is None:
            return
        if kind not in (MEMBER, SESSION):
            hearing.sessions_are_new = True
        if kind == MEMBER:
            member = decode_member(body)
            self._sightings.seen(member)
            listener.on_member(member)
        elif kind == DOCUMENT:
            listener.on_document(decode_document(body).shifted(self._clock.monotonic()))
        elif kind == SESSION:
            session, instance = msgspec.json.decode(body, type=tuple[str, str])
            # A session sent before the first frame of another kind may be older than ours.
            if hearing.sessions_are_new or session not in self._sessions:
                self._keep(session, instance)
                listener.on_session(session, instance)
        elif kind == STATUS:
            status = msgspec.json.decode(body, type=RouterStatus)
            self._statuses[name] = self._clock.monotonic(), status
            self._see_others()
        elif kind == MESSAGE:
            listener.on_message(decode_message(body))
        elif kind == COMPLETE:
            hearing.complete.set()
        else:
            raise PeerError(f"a frame of kind {kind!r}")

    def _keep(self, session: str, instance: str) -> None:
        self._sessions.put(session, instance)

    def _see_others(self) -> None:
        self.others = {status.router: status for _, status in self._statuses.values()}
        if self._listener is not None:
            self._listener.on_routers(self.others)


def _frame(kind: bytes, body: bytes = b"") -> bytes:
    return (1 + len(body)).to_bytes(4, "big") + kind + body


def _open_private(folder: Path) -> int:
    """A descriptor of a folder that only this user can enter."""
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"cannot open {folder}: {error.strerror}", field="--cluster") from None
    status = os.fstat(directory)
    if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        try:
            own_folder(folder, "--cluster")
        except BaseException:
            os.close(directory)
            raise
        return directory
    os.close(directory)
    raise ConfigError(
        f"others can enter {folder}, and could decide where prompts are sent",
        field="--cluster",
        hint=f"Make it your own: chmod 700 {folder}",
    )
