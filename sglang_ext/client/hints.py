"""Hints from Python programs: tell a router which request comes next, without waiting for it.

    hints = Hints("http://127.0.0.1:30000")
    with advise(hints, session="reviewer", earliest_s=2.0):
        patch = coder.run(task)          # while one agent works, the next one's KV is brought up
    reviewer.run(patch)                  # its requests carry the header x-session-id: reviewer

When the block fails, the request will not come, and the hint is taken back.

A hint never changes an answer, and a program never fails or waits because of one: a hint that cannot be sent
is dropped and counted, and the log says so once. Needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from .connection import Address, hint_fields

logger = logging.getLogger(__name__)

PATH = "/v1/advisory"
MOST_WAITING = 256
"""Hints that wait to be sent; the oldest goes, because the newest is worth most."""
TIMEOUT_S = 5.0


class Announcement:
    """A hint that was given."""

    def __init__(self, hints: Hints, body: bytes) -> None:
        self._hints = hints
        self.body = body
        self.id: str | None = None
        """The router's name of it, once it has answered."""

    def withdraw(self) -> None:
        """The request will not come. Returns at once."""
        self._hints._withdraw(self)


class Hints:
    """Sends hints to a router, from a thread of its own.

    Args:
        url: of the router.
        api_key: where it asks for one.

    Raises:
        ValueError: ``url`` is not of the form ``http://host:port``.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._address = Address(url, api_key)
        self._waiting: deque[tuple[str, Announcement]] = deque()
        """Requests to send, in order: (POST or DELETE, the hint)."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._said = False
        self.sent = 0
        self.withdrawn = 0
        self.dropped = 0

    def hint(
        self,
        *,
        session: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        earliest_s: float = 0.0,
        ttl_s: float | None = None,
        priority: int | None = None,
    ) -> Announcement:
        """Announce a request of a session, or a request that continues a conversation. Returns at once.

        Args:
            session: as requests name it.
            messages, text, input_ids: the conversation so far; one of them, or none with a session that the
                router has seen.
            earliest_s: seconds from now before which it does not come.
            ttl_s: how long after that it may come.
            priority: of the request.
        """
        fields = hint_fields(session, messages, text, input_ids, earliest_s, ttl_s, priority)
        body = json.dumps(fields).encode()
        announced = Announcement(self, body)
        self._put("POST", announced)
        return announced

    def _withdraw(self, announced: Announcement) -> None:
        with self._changed:
            for waiting in self._waiting:
                if waiting == ("POST", announced):
                    self._waiting.remove(waiting)  # it was never sent
                    return
        self._put("DELETE", announced)

    def _put(self, method: str, announced: Announcement) -> None:
        with self._changed:
            if self._closed:
                return
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append((method, announced))
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="kv-hints", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _main(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    break
                method, announced = self._waiting.popleft()
            if method == "DELETE" and announced.id is None:
                continue  # the router did not take it
            try:
                connection = connection or self._address.connect(TIMEOUT_S)
                self._send(connection, method, announced)
            except (OSError, http.client.HTTPException) as error:
                if connection is not None:
                    connection.close()
                connection = None
                self._failed(f"{type(error).__name__}: {error}")
        if connection is not None:
            connection.close()

    def _send(self, connection: http.client.HTTPConnection, method: str, announced: Announcement) -> None:
        path, headers = self._address.path + PATH, self._address.headers
        if method == "DELETE":
            connection.request(method, f"{path}/{announced.id}", headers=headers)
        else:
            connection.request(method, path, announced.body, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status == 200:
            self.sent += method == "POST"
            self.withdrawn += method == "DELETE"
            with contextlib.suppress(ValueError, AttributeError):
                announced.id = json.loads(answer).get("id")
        else:
            self._failed(f"{response.status}: {answer[:200].decode(errors='replace')}")

    def _failed(self, why: str) -> None:
        self.dropped += 1
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        logger.log(level, "a hint was not taken, and programs go on without: %s", why)

    def close(self) -> None:
        """Send the hints that wait, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Hints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Hints({self.sent} sent, {self.dropped} dropped)"


@contextmanager
def advise(hints: Hints, session: str | None = None, **conversation: Any) -> Iterator[None]:
    """While the block works, have the KV brought up for the request that comes after it.

    Args:
        hints: of the router that the request goes to.
        session: as that request will name it.
        conversation: see ``Hints.hint``.
    """
    announced = hints.hint(session=session, **conversation)
    try:
        yield
    except BaseException:
        announced.withdraw()
        raise
