"""How long an all-reduce between N ranks of this machine takes, to predict another TP.

``python -m sglang_ext.calibration.reductions --ranks 2 --device cpu`` prints one JSON object. The ranks are
processes with torch's own process group (gloo on a CPU, NCCL on GPUs), one thread each, as SGLang's are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from sglang_ext.cost_model.fit import non_negative
from sglang_ext.cost_model.fitting import typical
from sglang_ext.cost_model.operators import Link
from sglang_ext.errors import PeerError

SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23)
"""Bytes."""
REPEATS = 25
WORK_ROWS, WORK_WIDTH = 64, 512
"""Of a matrix product between two all-reduces, as there is in a forward pass: ranks that have worked arrive
apart, and have to be woken."""
SHORTEST_S = 1e-6
TIMEOUT_S = 180.0


def measure(ranks: int, *, gpu: bool = False) -> Link:
    """The all-reduce between ``ranks`` processes.

    Raises:
        PeerError: it cannot be measured here; says what the processes printed.
    """
    command = [sys.executable, "-m", "sglang_ext.calibration.reductions", "--ranks", str(ranks)]
    try:
        ended = subprocess.run(
            [*command, "--device", "cuda" if gpu else "cpu"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            encoding="utf-8",
        )
        times = {int(size): float(seconds) for size, seconds in json.loads(ended.stdout).items()}
    except subprocess.CalledProcessError as error:
        raise PeerError(
            f"an all-reduce between {ranks} ranks cannot be measured: {error.stderr[-500:]}"
        ) from error
    except (subprocess.TimeoutExpired, ValueError, AttributeError) as error:
        raise PeerError(f"an all-reduce between {ranks} ranks cannot be measured: {error}") from error
    return fit_link(times)


def fit_link(times: dict[int, float]) -> Link:
    """A link from seconds by bytes."""
    columns = np.array([[1.0, float(size)] for size in times])
    fixed, per_byte = non_negative(columns, list(times.values()))
    return Link(float(fixed), float(per_byte))


def _rank(rank: int, ranks: int, store: str, device: str) -> dict[int, float]:
    import torch
    import torch.distributed as dist

    if hasattr(os, "sched_setaffinity") and device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        weights = torch.ones(WORK_WIDTH, WORK_WIDTH, device=device)
        rows = torch.ones(WORK_ROWS, WORK_WIDTH, device=device)

        def seconds(tensor: torch.Tensor | None) -> float:
            """Of one round: some work, and an all-reduce behind it if there is a tensor."""
            begin = time.perf_counter()
            torch.mm(rows, weights)
            if tensor is not None:
                dist.all_reduce(tensor)
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        found: dict[int, float] = {}
        for size in SIZES:
            tensor = torch.zeros(size // 4, device=device)
            dist.barrier()
            # Ranks that wait for each other run in step: nothing may stand between these rounds.
            both = [seconds(tensor) for _ in range(REPEATS + 3)][3:]
            alone = [seconds(None) for _ in range(REPEATS + 3)][3:]
            found[size] = max(typical(both) - typical(alone), SHORTEST_S)
        return found
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a parent that starts the ranks, or as one of them; returns the exit status."""
    import tempfile

    parser = argparse.ArgumentParser(prog="python -m sglang_ext.calibration.reductions")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    given = parser.parse_args(arguments)
    if given.store:
        _rank(given.rank, given.ranks, given.store, given.device)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        others = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "sglang_ext.calibration.reductions"),
                    *("--ranks", str(given.ranks), "--device", given.device),
                    *("--rank", str(rank), "--store", store),
                ]
            )
            for rank in range(1, given.ranks)
        ]
        try:
            found = _rank(0, given.ranks, store, given.device)
            codes = [process.wait(TIMEOUT_S) for process in others]
        finally:
            for process in others:
                process.kill()
                process.wait()
    sys.stdout.write(json.dumps(found) + "\n")
    return max(codes, default=0)


if __name__ == "__main__":
    raise SystemExit(main())
