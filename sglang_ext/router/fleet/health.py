"""Probing the workers: their facts at first, and their liveness from then on.

One task per worker. A worker without facts, or that was down, is asked for them; any other is probed. The
verdict over a silent one falls within max(interval, timeout) + threshold * timeout (3 s by default): failed
probes follow each other without a pause. A probe that is late while answers of requests come counts for
nothing: the worker is busy, and lives. A worker that has left is probed while requests still run there, so
that they do not wait for a dead one.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from sglang_ext.clock import Clock
from sglang_ext.errors import ConfigError, DeadlineError, PeerError
from sglang_ext.router.fleet.facts import InstanceFacts
from sglang_ext.router.fleet.fleet import Fleet, InstanceRecord
from sglang_ext.router.fleet.lifecycle import USABLE, State
from sglang_ext.router.fleet.worker import NotUsable, WorkerApi
from sglang_ext.router.http.types import ConnectFailed
from sglang_ext.tasks import Rounds

logger = logging.getLogger("router.health")

RETRY_S = 1.0
"""Pause before a worker that is down, or does not fit, is asked again."""
_PROBED = USABLE | {State.DRAINING, State.LEFT}
"""States in which a worker whose facts are known is probed; in the others it is asked for its facts."""


class HealthWatch:
    """Watches workers of a fleet; takes in liveness from their agents' channels, too.

    Args:
        fleet: receives the findings.
        clock: for pauses.
        interval_s: between two probes that are answered.
        timeout_s: for each probe.
        rounds: run the watching. A worker whose check fails by a fault of this router counts as not
            answering.
    """

    def __init__(
        self,
        fleet: Fleet,
        api: WorkerApi,
        clock: Clock,
        *,
        interval_s: float,
        timeout_s: float,
        rounds: Rounds,
    ) -> None:
        self._fleet = fleet
        self._api = api
        self._clock = clock
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._rounds = rounds
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._started = False

    async def first_round(self) -> None:
        """Ask every worker once, at the same time.

        Raises:
            ConfigError: workers serve different models; the message says which and how they differ.
        """
        rows = self._fleet.rows.items()
        await asyncio.gather(*(self.check_once(name) for name, row in rows if row.state is not State.LEFT))
        for row in self._fleet.rows.values():
            if row.other_model:
                raise ConfigError(
                    f"{row.name} cannot be served together with the others: {row.why}",
                    field="--worker-urls",
                    hint="Start a router of its own for each model",
                )

    def start(self) -> None:
        """Watch the fleet's workers from now on."""
        self._started = True
        for name in self._fleet.rows:
            self.watch(name)

    def watch(self, name: str) -> None:
        """Look after a worker from now on, beginning with a look right now; before ``start``, nothing."""
        if not self._started:
            return
        if (running := self._tasks.pop(name, None)) is not None:
            running.cancel()
        task = self._tasks[name] = self._rounds.start(
            "health", functools.partial(self._look, name), of_one_peer=True
        )
        task.add_done_callback(functools.partial(self._ended, name))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def stop(self) -> None:
        """Stop watching."""
        self._started = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def on_heartbeat(self, name: str, epoch: str) -> None:
        """The agent of an instance (by URL) lives."""
        row = self._fleet.rows.get(name)
        if row is not None and row.epoch == epoch:
            self._fleet.on_heartbeat(name)

    def on_silent(self, name: str) -> None:
        """The agent of an instance (by URL) was silent for too long."""
        self._fleet.lost(name, "its agent is silent")
        self.watch(name)

    async def _look(self, name: str) -> float | None:
        """Ask one worker; returns the pause until it is asked again, None when it never is."""
        row = self._fleet.rows.get(name)
        if row is None or _is_over(row):
            return None
        try:
            answered = await self.check_once(name)
        except Exception as error:
            if name in self._fleet.rows:
                self._fleet.missed(name, f"cannot be judged: {error!r}")
            raise
        if row.state not in _PROBED or row.facts is None:
            return RETRY_S
        return self._interval_s if answered else 0.0

    async def check_once(self, name: str) -> bool:
        """Ask one worker for its facts or probe it, as its state requires, and report to the fleet. Returns
        whether it answered.
        """
        row = self._fleet.rows[name]
        known = row.facts if row.state in _PROBED else None
        fatal, answers = row.fatal, row.answers
        try:
            if known is None:
                facts = await self._api.learn(name)
                if row.fatal == fatal:  # else another process may have reported them
                    self._fleet.learnt(name, facts)
                return True
            pulse = await self._api.probe(name, self._timeout_s)
            if not _is_probed(row, known):  # meanwhile found dead, or restarted
                return True
            if pulse.weight_version != known.weight_version:
                logger.info("instance %s has weights %s now", name, pulse.weight_version)
                self._fleet.learnt(name, await self._api.learn(name))
            else:
                self._fleet.alive(name)
            return True
        except ConnectFailed as error:
            self._fleet.unconnected(name, str(error), refused=error.refused)
        except NotUsable as error:
            # While it starts or stops, SGLang answers with errors; for a worker with facts that is no
            # verdict.
            if known is None:
                self._fleet.rejected(name, str(error))
                return True
            self._fleet.missed(name, str(error))
        except (PeerError, DeadlineError) as error:
            if _is_probed(row, known) and row.answers > answers:
                self._fleet.alive(name)
            else:
                self._fleet.missed(name, str(error))
        return False


def _is_probed(row: InstanceRecord, known: InstanceFacts | None) -> bool:
    """Whether a worker has the same facts as when its probe was sent."""
    return known is not None and row.facts is known and row.state in _PROBED


def _is_over(row: InstanceRecord) -> bool:
    """Whether no event can concern this router any more: it has left, and no request runs there."""
    return row.state is State.LEFT and not row.in_flight
