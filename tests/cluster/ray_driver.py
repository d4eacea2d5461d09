"""Runs a cluster of small servers on Ray as `sglang-ext cluster --ray` does, and prints its states.

python ray_driver.py ADDRESS PORT FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_processes import SMALL_SERVER
from rich.console import Console

from sglang_ext.cluster import command, ray_cluster, ray_plan
from sglang_ext.cluster.config import ClusterConfig
from sglang_ext.cluster.plan import Part

FOLDER = Path(sys.argv[3])
planned = ray_cluster._makers
unplaced = ray_plan.unplaced


def small(part: Part, place: ray_plan.Place) -> Part:
    host, port = place.address, str(place.ports[0])
    words = (sys.executable, "-S", str(SMALL_SERVER), port, str(FOLDER / f"{part.name}.pids"), f"host={host}")
    return replace(part, command=words)


def makers(*given: Any) -> Any:
    """As planned, with small servers in place of SGLang's and the router."""

    def of(make: Any) -> Any:
        def made(places: Sequence[ray_plan.Place]) -> tuple[Part, ...]:
            return tuple(small(part, place) for part, place in zip(make(places), places, strict=True))

        return made

    return {name: (*rest, of(make)) for name, (*rest, make) in planned(*given).items()}


ray_cluster._makers = makers
ray_plan.unplaced = lambda config: tuple(replace(part, ready_path="/health") for part in unplaced(config))
config = ClusterConfig(
    model_path="m", ray=sys.argv[1], port=int(sys.argv[2]), restart=2, log_dir=FOLDER / "logs"
)
sys.exit(asyncio.run(command.run(config, Console(width=300))))
