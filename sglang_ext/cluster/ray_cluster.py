"""A cluster on Ray: each server and each router in a placement group, run by the same supervisor as on one
machine. Ray places parts, also again when a node is lost; `lifecycle` decides which parts are started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sglang_ext.cluster import ray_plan
from sglang_ext.cluster.config import ClusterConfig
from sglang_ext.cluster.plan import Keys, Part
from sglang_ext.cluster.ray_plan import PORTS, Demand, Node, Place
from sglang_ext.cluster.ray_runner import Runner
from sglang_ext.cluster.supervisor import Cluster, Observer
from sglang_ext.errors import ConfigError
from sglang_ext.folders import open_own

DIED = 1
"""The exit code of a part whose node or actor has died, or that could not be placed."""
PLACING_S = 60.0
"""How long Ray may take to find room that there is."""
ENDING_S = 10.0


def library() -> Any:
    """Ray.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        importlib.import_module("ray.util.placement_group")
        importlib.import_module("ray.util.scheduling_strategies")
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            "Ray is not installed", field="--ray", hint="pip install 'ray>=2.40', on every node"
        ) from None


class RayProcess:
    """A part's processes on the nodes where Ray has room for it; see ``process.Running``.

    Args:
        group: the placement group.
        bundles: indices of the part's bundles in the group.
        wanted: ports of each.
        make: returns the parts to run, given their places.
        keys: files with the keys.
        log: file to which the output returned to the driver is appended.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        ray: Any,
        group: Any,
        bundles: Sequence[int],
        wanted: Sequence[int],
        make: Callable[[Sequence[Place]], tuple[Part, ...]],
        keys: Keys,
        log: Path,
        grace_s: float,
    ) -> None:
        self._ray = ray
        self._group = group
        self._bundles = bundles
        self._wanted = wanted
        self._make = make
        self._keys = keys
        self._log = log
        self._grace_s = grace_s
        self._runners: list[Any] = []
        self._sent: list[str] = []
        self.url = ""
        self.pid: int | None = None

    async def run(self) -> int:
        """Place it, and run it to its end; when one node of a server ends, its other nodes are ended."""
        failure = self._ray.exceptions.RayError
        try:
            places = await self._place()
            parts = self._make(places)
            self.url = parts[0].url
            running = [
                asyncio.ensure_future(_result(runner.run.remote(part, self._grace_s)))
                for runner, part in zip(self._runners, parts, strict=True)
            ]
            for what in self._sent:
                self._send(what)
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            self._send("terminate")
            ended = await asyncio.gather(*running, return_exceptions=True)
            for end in ended:
                if isinstance(end, BaseException) and not isinstance(end, failure):
                    raise end
                self._write(end)
            first = next(end for end, task in zip(ended, running, strict=True) if task.done())
            return DIED if isinstance(first, BaseException) else int(first[0])
        except (failure, ConfigError) as error:
            self._write(error)
            return DIED
        finally:
            for runner in self._runners:
                self._ray.kill(runner)
            self._runners = []

    async def _place(self) -> list[Place]:
        strategies = self._ray.util.scheduling_strategies
        table = self._ray.util.placement_group_table
        actor = self._ray.remote(Runner)
        keys = {
            path.name: path.read_text(encoding="utf-8") for path in (self._keys.cluster, self._keys.servers)
        }
        bundles = self._group.bundle_specs
        self._runners = [
            actor.options(
                num_cpus=bundles[bundle].get("CPU", 0),
                num_gpus=bundles[bundle].get("GPU", 0),
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=bundle
                ),
            ).remote(keys)
            for bundle in self._bundles
        ]
        for runner in self._runners:
            await _result(runner.idle.remote())
        where = (await asyncio.to_thread(table, self._group))["bundles_to_node_id"]
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in await nodes_of(self._ray)}
        return [
            await _result(runner.place.remote(address[where[bundle]], list(self._wanted)))
            for runner, bundle in zip(self._runners, self._bundles, strict=True)
        ]

    def _write(self, end: Any) -> None:
        with os.fdopen(open_own(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
            log.write(f"{end}\n".encode() if isinstance(end, BaseException) else end[1])

    def take_over(self) -> None:
        """Does nothing: no process stands by on Ray."""

    def terminate(self) -> None:
        """Ask it to end."""
        self._send("terminate")

    def hasten(self) -> None:
        """End it at once."""
        self._send("hasten")

    def kill(self) -> None:
        """End it with its actors: their guards see it."""
        for runner in self._runners:
            self._ray.kill(runner)

    def _send(self, what: str) -> None:
        self._sent.append(what)
        for runner in self._runners:
            runner.send.remote(what)


async def _result(reference: Any) -> Any:
    return await reference


async def nodes_of(ray: Any) -> list[dict[str, Any]]:
    """Ray's records of its living nodes."""
    return [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]


async def _reserve(ray: Any, wanted: Sequence[Demand]) -> dict[str, Any]:
    """A placement group for each, once Ray has found the room."""
    make = ray.util.placement_group
    groups = {
        demand.name: make([dict(each) for each in demand.bundles], strategy="STRICT_SPREAD", name="")
        for demand in wanted
    }
    try:
        async with asyncio.timeout(PLACING_S):
            for group in groups.values():
                await _result(group.ready())
    except TimeoutError:
        raise ConfigError(
            f"Ray found no room within {PLACING_S:g} s: something else uses its nodes",
            field="--ray",
            hint="`ray status` shows it",
        ) from None
    return groups


@contextlib.asynccontextmanager
async def running_on_ray(
    config: ClusterConfig, log_dir: Path, keys: Keys, observer: Observer | None = None
) -> AsyncIterator[Cluster]:
    """A cluster on Ray, starting; it has ended when the block has.

    Raises:
        ConfigError: Ray is not installed, cannot be reached, or has no room.
    """
    ray = library()
    # In a thread: in the main one, Ray would take SIGTERM for itself.
    connect = partial(
        ray.init, config.ray, log_to_driver=False, namespace="sglang-ext", logging_level="ERROR"
    )
    try:
        await asyncio.to_thread(connect)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot reach Ray: {error}", field="--ray") from None
    try:
        nodes = [
            Node(
                node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
            )
            for node in await nodes_of(ray)
        ]
        groups = await _reserve(ray, ray_plan.demands(config, nodes))
        makers = _makers(config, nodes)

        def process(part: Part, log: Path) -> RayProcess:
            group, bundles, wanted, make = makers[part.name]
            return RayProcess(ray, groups[group], bundles, wanted, make, keys, log, config.stop_timeout_secs)

        cluster = Cluster(
            ray_plan.unplaced(config),
            log_dir,
            restarts=config.restart,
            start_timeout_s=config.start_timeout_secs,
            stop_timeout_s=config.stop_timeout_secs + ENDING_S,
            observer=observer,
            elsewhere=process,
        )
        async with cluster:
            yield cluster
    finally:
        await asyncio.to_thread(ray.shutdown)


Maker = tuple[str, Sequence[int], Sequence[int], Callable[[Sequence[Place]], tuple[Part, ...]]]


def _makers(config: ClusterConfig, nodes: Sequence[Node]) -> dict[str, Maker]:
    """For each part: its placement group, its bundles there, its ports, and a function that makes it."""
    found: dict[str, Maker] = {}
    for index in range(config.servers):
        name = ray_plan.name_of(config, index)
        bundles = range(ray_plan.nodes_of(config.flags_of(index)))
        found[name] = (
            name,
            bundles,
            (0,) * PORTS,
            partial(ray_plan.server_parts, config, index, nodes),
        )
    for number in range(config.routers):
        found[ray_plan.router_name(config, number)] = (
            "routers",
            (number,),
            (config.port,),
            partial(_router, config, number),
        )
    return found


def _router(config: ClusterConfig, number: int, places: Sequence[Place]) -> tuple[Part, ...]:
    return (ray_plan.router_part(config, number, places[0]),)
