"""The tenants of a simulated router and their limits, kept by the router's own meters and budgets.

Each tenant has one key, as a key file would name it. A request is counted as `http.connection` and
`app.service` count one: all requests of the router, then the bytes of its client, then the limits of its key.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from sglang_ext.clock import Clock
from sglang_ext.router.http.state import HttpLimits, ServerState
from sglang_ext.router.http.types import Handler, Request
from sglang_ext.router.tenancy.budgets import Budgets
from sglang_ext.router.tenancy.tenants import Caller, KeyEntry, Meter
from sglang_ext.simulator.settings import Settings, of_tenant

REQUEST = Request("POST", "/generate", "/generate")
ADDRESS = "10.255.0.1"
"""Of all clients; without tenants they share one budget of bytes."""


class Tenants:
    """See the module's docstring.

    Args:
        names: of the tenants; those without one are named by their numbers.
    """

    def __init__(
        self, settings: Settings, clock: Clock, loop: asyncio.AbstractEventLoop, names: Sequence[str] = ()
    ) -> None:
        self._settings, self._clock, self._names = settings, clock, names
        self._callers: dict[int, Caller] = {}
        self._server: ServerState | None = None
        if settings.max_concurrent_requests:
            limits = HttpLimits(max_concurrent_requests=settings.max_concurrent_requests)
            # No connection asks it for a handler.
            self._server = ServerState(cast(Handler, None), limits, clock, loop)
        self._budgets: Budgets | None = None
        if settings.bytes_per_minute:
            self._budgets = Budgets(clock, bytes_per_minute=settings.bytes_per_minute, tokenizing_s=0.0)

    @property
    def apart(self) -> bool:
        """Whether clients have keys. Without, all are one."""
        return self._settings.tenants > 1 or self._settings.limits_tenants

    def caller(self, number: int) -> Caller:
        """A tenant, by its number."""
        found = self._callers.get(number)
        if found is None:
            found = self._callers[number] = self._made(number) if self.apart else Caller()
        return found

    def _made(self, number: int) -> Caller:
        name = self._names[number] if number < len(self._names) else f"tenant-{number}"
        settings = self._settings
        priority = int(of_tenant(settings.priority, number))
        entry = KeyEntry(
            tenant=name,
            digest=hashlib.sha256(name.encode()).digest(),
            priority=priority,
            requests_per_second=of_tenant(settings.requests_per_second, number) or None,
            burst=int(of_tenant(settings.burst, number)) or None,
            concurrent=int(of_tenant(settings.concurrent, number)) or None,
            tokens_per_minute=int(of_tenant(settings.tokens_per_minute, number)) or None,
        )
        meter = Meter(entry, self._clock) if settings.limits_tenants else None
        return Caller(name, priority, False, name, meter)

    @contextmanager
    def request(self, caller: Caller, body_bytes: int) -> Iterator[None]:
        """Count a request while the block runs.

        Raises:
            RequestRefused: it is beyond a limit.
        """
        server = self._server
        if server is None and self._budgets is None and caller.meter is None:
            yield
            return
        if server is not None:
            if (refused := server.admit(REQUEST)) is not None:
                raise refused
            server.active += 1
        try:
            if self._budgets is not None:
                self._budgets.of(caller, ADDRESS).take_body(body_bytes)
            if caller.meter is None:
                yield
            else:
                with caller.meter.request():
                    yield
        finally:
            if server is not None:
                server.active -= 1

    def check(self) -> None:
        """Verify that no request is counted that has ended. Raises InternalError or AssertionError."""
        assert self._server is None or not self._server.active, "requests are counted that have ended"
        for caller in self._callers.values():
            if caller.meter is not None:
                caller.meter.check()
                assert not caller.meter.running, f"requests of {caller.tenant} are counted that have ended"
