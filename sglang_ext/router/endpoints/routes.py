"""The table of endpoints: methods, handler and access of each path."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from sglang_ext.router.http.types import Request, RequestRefused, Responder
from sglang_ext.router.telemetry.record import Record

Handler: TypeAlias = Callable[[Request, Responder, Record], Awaitable[None]]


class Access(enum.Enum):
    """The callers that an endpoint admits."""

    OPEN = enum.auto()
    """Any caller, as with SGLang: probes have no key."""
    CLIENT = enum.auto()
    """Callers with a key, where keys are asked for."""
    ADMIN = enum.auto()
    """Callers with an administrator's key, where keys are asked for."""
    OWN = enum.auto()
    """The handler checks for itself, as those that speak to other parts of the cluster do."""


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint."""

    path: str
    """Exact, or a prefix when it ends with ``/``."""
    methods: frozenset[str]
    handler: Handler
    access: Access = Access.CLIENT
    logged: bool = True
    """Whether requests are in the access log; paths polled every few seconds would drown the rest."""


class RouteTable:
    """Finds the endpoint of a request: exact paths first, then the longest prefix."""

    def __init__(self, routes: Iterable[Route] = ()) -> None:
        self._exact: dict[str, Route] = {}
        self._prefixes: list[Route] = []
        for route in routes:
            self.add(route)

    def add(self, route: Route) -> None:
        """Add an endpoint; it goes before one of the same path."""
        if not route.path.endswith("/") or route.path == "/":
            self._exact[route.path] = route
            return
        self._prefixes = [known for known in self._prefixes if known.path != route.path] + [route]
        self._prefixes.sort(key=lambda known: -len(known.path))

    def get(self, path: str) -> Route | None:
        """The endpoint of a path."""
        route = self._exact.get(path)
        if route is not None:
            return route
        for route in self._prefixes:
            if path.startswith(route.path) and len(path) > len(route.path):
                return route
        return None

    def __iter__(self) -> Iterator[Route]:
        yield from self._exact.values()
        yield from self._prefixes


def found(route: Route | None, request: Request) -> Route:
    """The endpoint of a request, if it is there and takes the method.

    Raises:
        RequestRefused: 404 or 405.
    """
    if route is None:
        raise RequestRefused(f"there is no {request.path[:200]} here", status=404, code="not_found")
    if request.method not in route.methods:
        allowed = ", ".join(sorted(route.methods))
        raise RequestRefused(
            f"{request.path} takes {allowed}, not {request.method}",
            status=405,
            code="method_not_allowed",
            headers={"allow": allowed},
        )
    return route
