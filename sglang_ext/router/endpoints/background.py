"""Answers that go on when their request is answered (``background: true``): they count until they end.

SGLang answers such a request at once and generates afterwards. The answer keeps the resources of its request:
a place among the admitted, a share of its instance, one of its key's ``concurrent``. The router polls the
instance until the answer has ended, and charges the generated tokens to the key.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

from sglang_ext.clock import Clock
from sglang_ext.errors import DeadlineError, PeerError
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.usage import Usage
from sglang_ext.router.dispatch.queueing import Admission
from sglang_ext.router.fleet.fleet import USABLE, Fleet, Load
from sglang_ext.router.fleet.worker import WorkerApi
from sglang_ext.router.http.types import ConnectFailed
from sglang_ext.router.tenancy.tenants import Meter
from sglang_ext.tasks import Tasks

logger = logging.getLogger("router.background")

FIRST_LOOK_S = 0.1
MOST_BETWEEN_LOOKS_S = 2.0
CALL_TIMEOUT_S = 10.0


class Background:
    """Keeps what responses hold that generate in the background.

    Args:
        api: asks the instances.
        clock: seconds.
        limit_s: how long one may take; then it is cancelled.
    """

    def __init__(
        self, api: WorkerApi, fleet: Fleet, admission: Admission, clock: Clock, limit_s: float
    ) -> None:
        self._api = api
        self._fleet = fleet
        self._admission = admission
        self._clock = clock
        self._limit_s = limit_s
        self._watching = Tasks(
            lambda error: logger.error("a response in the background is watched no more", exc_info=error)
        )

    def keep(self, dialect: Dialect, response_id: str, load: Load, meter: Meter | None) -> None:
        """Keep the resources of the request of an answer; the request may let go of them now.

        Args:
            dialect: of the request.
            load: of the request, at the instance that generates.
            meter: of its key.
        """
        instance = load.row.name
        held = ExitStack()
        held.enter_context(self._admission.held())
        held.enter_context(self._fleet.carrying(instance, 0))
        if meter is not None:
            held.enter_context(meter.carrying())
        task = self._watching.start(
            self._watch(dialect, response_id, instance, meter), name=f"watch {response_id} in the background"
        )
        task.add_done_callback(lambda _: held.close())

    async def _watch(self, dialect: Dialect, response_id: str, instance: str, meter: Meter | None) -> None:
        path, pause = f"{dialect.path}/{response_id}", FIRST_LOOK_S
        end = self._clock.monotonic() + self._limit_s
        while self._clock.monotonic() < end:
            await self._clock.sleep(pause)
            pause = min(2 * pause, MOST_BETWEEN_LOOKS_S)
            row = self._fleet.rows.get(instance)
            if row is None:
                return
            try:
                answer = await self._api.call(instance, "GET", path, timeout_s=CALL_TIMEOUT_S)
            except ConnectFailed:
                if row.state not in USABLE:
                    return  # it is down, and the response with it
                continue
            except (PeerError, DeadlineError) as error:
                logger.warning("%s", error)
                continue
            kept = answer.json() if answer.status == 200 else None
            if not dialect.still_runs(kept):
                usage = Usage()
                dialect.read(usage, kept, 1)
                if meter is not None:
                    meter.charge(usage.completion_tokens or 0)
                return
        logger.warning("%s took more than %g s, and is cancelled", response_id, self._limit_s)
        try:
            await self._api.call(instance, "POST", f"{path}/cancel", timeout_s=CALL_TIMEOUT_S)
        except (PeerError, DeadlineError) as error:
            logger.warning("%s", error)

    async def stop(self) -> None:
        """Ask after none any more."""
        await self._watching.cancel()

    def __len__(self) -> int:
        return len(self._watching)

    def __repr__(self) -> str:
        return f"Background({len(self)} responses)"
