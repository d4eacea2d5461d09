"""Aborting requests by name: at the instance that runs them, or by closing the connection to it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sglang_ext.errors import DeadlineError, PeerError
from sglang_ext.router.dispatch.flight import Flight, Flights, abort
from sglang_ext.router.fleet.worker import WorkerApi

logger = logging.getLogger("router.aborting")

CALL_TIMEOUT_S = 10.0


class Aborting:
    """Aborts requests of this router."""

    def __init__(self, flights: Flights, api: WorkerApi) -> None:
        self._flights = flights
        self._api = api

    async def abort(self, name: str | None, scope: str) -> int:
        """Abort the requests of the callers with this scope that have this name, or all of them.

        A request that the client named by ``rid`` is aborted by its worker, whose answer then says so. Of
        others the connection is closed, and their clients get a 499, or the end of their stream.
        """
        flights = self._flights.of(scope) if name is None else self._flights.named(name, scope)
        for flight in flights:
            if name is None or not await self._by_worker(flight, name):
                abort(flight)
        return len(flights)

    async def _by_worker(self, flight: Flight, name: str) -> bool:
        """Whether the request was aborted where it runs."""
        record = flight.record
        if name not in flight.admitted.rids or record.instance is None:
            return False
        body = {"rid": record.caller.scope + name}
        where = [each for each in (record.instance, record.prefill_instance) if each is not None]
        return all(await asyncio.gather(*(self.abort_at(each, body) for each in where)))

    async def abort_at(self, instance: str, body: dict[str, Any]) -> bool:
        """Whether an instance has taken an abort."""
        try:
            answer = await self._api.call(
                instance, "POST", "/abort_request", body=body, timeout_s=CALL_TIMEOUT_S
            )
        except (PeerError, DeadlineError) as error:
            logger.warning("%s", error)
            return False
        return answer.status == 200

    def __repr__(self) -> str:
        return f"Aborting({self._flights})"
