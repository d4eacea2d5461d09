"""The routers' addresses: those that are listed, and all that a name in the DNS stands for.

``dns+http://NAME:PORT`` means every address of NAME, as a headless Service of Kubernetes gives them. The name
is looked up again and again, because routers come and go. Decides; looking up is a function that comes in and
runs in a thread of its own: a DNS answer may take half a minute, and no thread here waits that long.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

DNS: Final = "dns+"
"""Before a URL whose name stands for several routers."""
AGAIN_S: Final = 5.0
"""Seconds between two look-ups of a name."""
LOOK_UP_S: Final = 1.0
"""Seconds to wait for an answer; a later answer counts at the next look-up."""


def addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, in order.

    Raises:
        OSError: it cannot be looked up.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(each[4][0]) for each in found})


class RouterNames:
    """See the module's docstring.

    Args:
        given: URLs, as `--kv-router` has them.
        resolve: addresses of a host and port; raises OSError.
        again_s: between two look-ups of a name.
        limit_s: wait for the answer of one.
    """

    def __init__(
        self,
        given: Sequence[str],
        resolve: Callable[[str, int], Sequence[str]] = addresses,
        again_s: float = AGAIN_S,
        limit_s: float = LOOK_UP_S,
    ) -> None:
        self._listed = [url for url in given if not url.startswith(DNS)]
        self._found: dict[str, list[str]] = {url: [] for url in given if url.startswith(DNS)}
        self._resolve = resolve
        self._again_s = again_s
        self._limit_s = limit_s
        self._asked: dict[str, Future[Sequence[str]]] = {}
        """By URL: look-ups that have not answered yet."""
        self._due = float("-inf")
        self._problem = ""

    def urls(self, now: float) -> list[str]:
        """The URLs of the present routers. now: seconds, monotonic; names are looked up when it is time."""
        if self._found and now >= self._due:
            self._due = now + self._again_s
            for url in self._found:
                self._look_up(url)
        return list(dict.fromkeys([*self._listed, *(each for urls in self._found.values() for each in urls)]))

    def _look_up(self, url: str) -> None:
        parts = urlsplit(url.removeprefix(DNS))
        host, port = parts.hostname or "", parts.port or 80
        try:
            there = self._resolved(url, host, port)
        except OSError as error:
            # A failure of the DNS does not mean that routers have gone: their last addresses stay.
            problem = f"cannot look up the routers at {host}: {error}; will try again"
            if problem != self._problem:
                logger.warning("%s", problem)
            self._problem = problem
            return
        self._problem = ""
        self._found[url] = [
            f"http://[{each}]:{port}" if ":" in each else f"http://{each}:{port}" for each in there
        ]

    def _resolved(self, url: str, host: str, port: int) -> Sequence[str]:
        """Raises:
        OSError: it cannot be looked up, or there is no answer yet.
        """
        future = self._asked.pop(url, None)
        if future is None:
            future = Future()
            thread = threading.Thread(
                target=_settle, args=(future, self._resolve, host, port), name="kv-dns", daemon=True
            )
            thread.start()
        try:
            return future.result(self._limit_s)
        except TimeoutError:
            self._asked[url] = future
            raise OSError(f"no answer within {self._limit_s:g} s") from None


def _settle(
    future: Future[Sequence[str]], resolve: Callable[[str, int], Sequence[str]], host: str, port: int
) -> None:
    try:
        future.set_result(resolve(host, port))
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid name
        future.set_exception(OSError(str(error)))
