"""How an instance finds its routers, and stays with them: `POST /cluster/instances`, again and again.

    registered               the router's agent client sends something every second
    silent for `VERDICT_S`   register again, so that a router that was restarted has the instance again
    refused, unreachable     try again, less and less often, up to every `LONGEST_PAUSE_S`
    the server ends          `DELETE /cluster/instances/{instance}`

A thread of its own, because an HTTP call may hang, and neither the scheduler nor the agent may.
"""

from __future__ import annotations

import http.client
import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import msgspec

from sglang_ext.cluster_key import CLOCK_HEADER, ClusterKey
from sglang_ext.engine.events.router_names import AGAIN_S, DNS, RouterNames, addresses
from sglang_ext.protocol.cluster import (
    PATH,
    PROTOCOL,
    VERDICT_S,
    Registered,
    Registration,
    encode,
    instance_path,
    other_release,
)

logger = logging.getLogger(__name__)

CALL_S: Final = 2.0
LEAVE_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 1.0
"""A router that has just started is ready once its instances have sent their snapshots, and so waits for this
pause.
"""
CLOCKS_S: Final = 1.0
"""Clocks that differ by less count as equal."""
LOOK_S: Final = 0.5
"""Pause between looks at whether routers are silent."""


@dataclass
class _Router:
    """One router: its URL, its name, and when to register with it again."""

    url: str
    name: str = ""
    due: float = 0.0
    pause: float = FIRST_PAUSE_S
    registered: float | None = None
    problem: str = ""
    ahead_s: float = 0.0
    """How far the router's clock is ahead of ours: signatures use the router's time."""
    stale: bool = False
    """The router has a former registration of the instance."""


class Registrar:
    """See the module's docstring. Started by `start`, ended by `close`.

    Args:
        routers: URLs; those with ``dns+`` are looked up again and again (`router_names`).
        registration: the body of the call.
        key: signs it; ``None`` in a cluster without a key.
        silent_s: seconds since the agent received the last message of the router of that name.
        now: seconds, monotonic. wall: seconds since the epoch, for signatures.
        resolve, look_up_s: how names are looked up, and how often.
    """

    def __init__(
        self,
        routers: Sequence[str],
        registration: Registration,
        key: ClusterKey | None,
        silent_s: Callable[[str], float],
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        resolve: Callable[[str, int], Sequence[str]] = addresses,
        look_up_s: float = AGAIN_S,
    ) -> None:
        self._names = RouterNames(routers, resolve, look_up_s)
        self._routers = [_Router(url) for url in routers if not url.startswith(DNS)]
        self._registration = registration
        self._key = key
        self._silent_s = silent_s
        self._now = now
        self._wall = wall
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="kv-register", daemon=True)

    def start(self) -> None:
        """Begin to register."""
        self._thread.start()

    def update(self, registration: Registration) -> None:
        """Replace the registration, and send it to every router at once; from any thread."""
        self._registration = registration
        for router in self._routers:
            router.stale = True

    def rekey(self, public_key: str) -> None:
        """The agent listens by another public key from now on; from any thread."""
        self.update(msgspec.structs.replace(self._registration, agent_key=public_key))

    @property
    def registration(self) -> Registration:
        """The registration that routers get."""
        return self._registration

    def close(self) -> None:
        """Leave every router that has the instance registered, and end. At most `CALL_S` or `LOOK_UP_S` per
        name, and `LEAVE_S` per router.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        for router in self._routers:
            if router.registered is not None:
                try:
                    self._call(router, "DELETE", instance_path(self._registration.instance), b"", LEAVE_S)
                except (OSError, http.client.HTTPException) as error:
                    logger.info("cannot tell router %s that the instance leaves: %s", router.url, error)

    def _follow(self) -> None:
        """Take in routers that have come, and drop those that have gone."""
        known = {router.url: router for router in self._routers}
        urls = self._names.urls(self._now())
        for url in known.keys() - set(urls):
            logger.info("the router at %s has gone", url)
        self._routers = [known.get(url) or _Router(url) for url in urls]

    def _main(self) -> None:
        while not self._stopping.is_set():
            self._follow()
            for router in self._routers:
                if not self._stopping.is_set() and self._is_due(router):
                    self._register(router)
            self._stopping.wait(min(LOOK_S, max(0.05, self._next_due() - self._now())))

    def _next_due(self) -> float:
        return min(
            (router.due for router in self._routers if router.registered is None),
            default=self._now() + LOOK_S,
        )

    def _is_due(self, router: _Router) -> bool:
        now = self._now()
        if router.registered is None or router.stale:
            return now >= router.due
        # It connects to the agent within a moment, and sends something every second from then on.
        return min(now - router.registered, self._silent_s(router.name)) > VERDICT_S

    def _register(self, router: _Router) -> None:
        router.stale = False
        try:
            status, body = self._call(router, "POST", PATH, encode(self._registration), CALL_S)
            problem = "" if status == 200 else f"it answered {status}: {body[:300].decode(errors='replace')}"
            answer = msgspec.json.decode(body, type=Registered) if not problem else None
            if answer is not None and answer.protocol != PROTOCOL:
                problem, answer = f"protocol: {other_release(answer.protocol, PROTOCOL)}", None
        except ssl.SSLCertVerificationError as error:
            problem, answer = f"{error}. Set SSL_CERT_FILE to the certificate that vouches for it", None
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            problem, answer = str(error) or type(error).__name__, None
        now = self._now()
        if answer is not None:
            if answer.problem and answer.problem != router.problem:
                logger.warning(
                    "router %s does not reach this server: %s. If that is not its address, give "
                    "--kv-announce-host",
                    router.url,
                    answer.problem,
                )
            elif router.name != answer.router or (router.problem and not answer.problem):
                logger.info("registered with router %s at %s", answer.router, router.url)
            router.name, router.registered, router.problem = answer.router, now, answer.problem
            router.pause = FIRST_PAUSE_S
            return
        if problem != router.problem:
            logger.warning("cannot register with router %s: %s; will try again", router.url, problem)
        router.registered, router.problem = None, problem
        router.due = now + router.pause
        router.pause = min(LONGEST_PAUSE_S, router.pause * 1.6)

    def _call(
        self, router: _Router, method: str, path: str, body: bytes, seconds: float
    ) -> tuple[int, bytes]:
        """Call a router, and repeat the call once by the router's clock if it was refused for the time of its
        signature.
        """
        before = router.ahead_s
        status, answer = self._call_once(router, method, path, body, seconds)
        if status == HTTPStatus.UNAUTHORIZED and router.ahead_s != before:
            logger.warning("the clock of router %s is %.0f s ahead of this one", router.url, router.ahead_s)
            status, answer = self._call_once(router, method, path, body, seconds)
        return status, answer

    def _call_once(
        self, router: _Router, method: str, path: str, body: bytes, seconds: float
    ) -> tuple[int, bytes]:
        parts = urlsplit(router.url)
        target = parts.path.rstrip("/") + path
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        headers = {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = self._key.sign(method, target, body, self._wall() + router.ahead_s)
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            clock = response.getheader(CLOCK_HEADER)
            if clock and self._key is not None:
                ahead = self._key.ahead(clock, headers["authorization"], self._wall())
                if ahead is not None and abs(ahead - router.ahead_s) > CLOCKS_S:
                    router.ahead_s = ahead
            return response.status, response.read(64 << 10)
        finally:
            connection.close()

    def __repr__(self) -> str:
        known = sum(router.registered is not None for router in self._routers)
        return f"Registrar({known}/{len(self._routers)} routers)"
