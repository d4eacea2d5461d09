"""Access control for web pages: checks of ``Host`` and ``Origin``.

Without a key, every client that can connect may use the router, and every page in a browser on this machine
can connect to loopback. Two headers identify such a page, and no page can forge them:

    Origin   the page that sends; every cross-origin POST has it, also a simple one with text/plain
    Host     the name that the page was loaded from, if its name was rebound to this address

An unknown host name is refused, and so is an origin other than the router's own. An address cannot be
rebound, so every IP address is a valid host. With a key, both are left alone unless configured: no
browser sends a key that the page does not have.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping

from sglang_ext.router.http.types import Request, RequestRefused, Responder

ANY = "*"
PREFLIGHT_MAX_AGE_S = 600
_METHODS = "GET, POST, PUT, DELETE"
_FOREIGN = ("cross-site", "same-site")
_KNOWN_HOSTS = 1024
"""Host headers whose verdict is remembered."""


class WebSites:
    """The allowed hosts and origins of requests.

    Args:
        hosts: names under which the router may be addressed, besides IP addresses and ``localhost``;
            ``None`` for any.
        origins: origins of web pages besides the router's own; ``None`` for any.
        cors: origins whose pages may read the answers.
    """

    def __init__(
        self, hosts: Iterable[str] | None, origins: Iterable[str] | None, cors: Iterable[str] = ()
    ) -> None:
        self._hosts = None if hosts is None or ANY in (hosts := frozenset(hosts)) else hosts
        self._origins = None if origins is None or ANY in (origins := frozenset(origins)) else origins
        self._cors = frozenset(cors)
        self._knows: Callable[[str], bool] = functools.lru_cache(_KNOWN_HOSTS)(self._is_own)

    def check(self, request: Request, *, public: bool = False) -> None:
        """Refuse requests that a foreign page makes a browser send.

        Args:
            public: a foreign page may load the endpoint's answer, though not read it.

        Raises:
            RequestRefused: 403; names the flag that would allow the request.
        """
        headers = request.headers
        host = headers.get("host")
        if self._hosts is not None and host is not None and not self._knows(host):
            raise _refused(
                f"the request is for the host {host[:200]!r}, which this router does not know as its own "
                "name; send it to localhost or an IP address, or add the name with --allowed-hosts",
                "host_not_allowed",
            )
        if self._origins is None:
            return
        origin = headers.get("origin")
        if origin is None:
            if not public and headers.get("sec-fetch-site") in _FOREIGN:
                raise _cross_site("another site")
        elif not self._may(origin.lower(), (host or "").lower()):
            raise _cross_site(repr(origin[:200]))

    def _may(self, origin: str, host: str) -> bool:
        own = bool(host) and origin in (f"http://{host}", f"https://{host}")
        return own or self._origins is None or origin in self._origins

    def _is_own(self, host: str) -> bool:
        name = host_name(host)
        if name == "localhost" or name.endswith(".localhost") or name in (self._hosts or ()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def cors(self, request: Request) -> dict[str, str] | None:
        """Headers that let the page which sent a request read its answer; ``None`` when it may not."""
        origin = request.headers.get("origin")
        if origin is None or not (origin.lower() in self._cors or ANY in self._cors):
            return None
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "*",
            "vary": "origin",
        }

    def __repr__(self) -> str:
        hosts, origins = ("any" if each is None else len(each) for each in (self._hosts, self._origins))
        return f"WebSites(hosts={hosts}, origins={origins}, cors={len(self._cors)})"


def sites_of(
    allowed_hosts: Iterable[str], allowed_origins: Iterable[str], host: str, *, keyed: bool
) -> WebSites:
    """The rules of a router.

    Args:
        allowed_hosts, allowed_origins: as configured.
        host: the address that it listens on.
        keyed: it asks for a key.
    """
    hosts, origins = frozenset(map(str.lower, allowed_hosts)), frozenset(allowed_origins)
    return WebSites(
        None if keyed and not hosts else hosts | own_names(host),
        None if keyed and not origins else origins,
        origins,
    )


def own_names(host: str) -> frozenset[str]:
    """Names of this machine, and of the address that the router listens on."""
    machine = socket.gethostname().lower()
    short = machine.partition(".")[0]
    return frozenset({host.lower(), machine, short, f"{short}.local"} - {""})


def host_name(host: str) -> str:
    """The name or address in a Host header."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def is_preflight(request: Request) -> bool:
    """Whether the request is a browser's CORS preflight."""
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


def preflight_headers(request: Request) -> dict[str, str]:
    """Headers of the answer to a preflight whose origin is allowed."""
    headers = {
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": request.headers.get("access-control-request-headers", ""),
        "access-control-max-age": str(PREFLIGHT_MAX_AGE_S),
    }
    if "access-control-request-private-network" in request.headers:
        headers["access-control-allow-private-network"] = "true"
    return headers


class ReadableAnswer(Responder):
    """A responder whose answers have more headers.

    Args:
        responder: where they go.
        headers: added to every answer.
    """

    def __init__(self, responder: Responder, headers: Mapping[str, str]) -> None:
        self._responder = responder
        self._headers = headers

    @property
    def started(self) -> bool:
        return self._responder.started

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self._responder.send(status, {**headers, **self._headers}, body)

    async def start(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> None:
        await self._responder.start(status, {**headers, **self._headers}, data)

    async def write(self, data: bytes) -> None:
        await self._responder.write(data)

    async def finish(self) -> None:
        await self._responder.finish()

    def cut(self) -> None:
        self._responder.cut()


def _cross_site(who: str) -> RequestRefused:
    return _refused(
        f"the request comes from a web page of {who}; allow its origin with --allowed-origins, "
        "or set a key (--api-key)",
        "cross_site",
    )


def _refused(message: str, code: str) -> RequestRefused:
    return RequestRefused(message, status=403, code=code, kind="permission_error")
