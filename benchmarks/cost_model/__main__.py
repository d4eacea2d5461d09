"""How far the cost model's predictions are from real servers, at the operator and at the arch level.

A server on one core is calibrated as ``sglang-ext calibrate`` does it. Then prefills of lengths and cached
shares that calibration has not seen are timed on it, and on a server of the same model with two ranks on one
core each (TP 2): both levels predict it from the profile of one rank, by shapes alone, and with the constants
of the parallelism, two numbers that six other prefills at TP 2 give (MemServe, sections 5.3.2 and 8.4, figure
14). The error of a point is |predicted - measured| / measured.

Then batches: behind a prompt that keeps the server busy, so many others are sent, which it computes together
when that is done. The time for the queue beyond its first request alone is compared with exec over the batch,
and with the sum of exec over its prompts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.lib.common import Options, Report, at_most
from benchmarks.lib.quiet import DEFAULT, go_first, undisturbed
from sglang_ext.calibration import measure
from sglang_ext.calibration.command import Arguments, with_scaling
from sglang_ext.calibration.command import run as calibrate
from sglang_ext.calibration.instance import Instance
from sglang_ext.calibration.plan import Point, Tokens, anchors, between, points
from sglang_ext.cluster.guard import descendants
from sglang_ext.cost_model import ArchLevel, Batch, OperatorLevel, Passes, Profile, save
from sglang_ext.cost_model.fitting import Timed, merged
from sglang_ext.flags import flag
from tests.support.servers.server import ServerProcess, ServerSpec

NAME = "cost_model"
FIGURES = ("op_mean_error", "arch_mean_error", "batch_mean_error", "op_mean_error_tp2", "arch_mean_error_tp2")
AIMS = {figure: at_most(0.1) for figure in FIGURES}
MODEL = "small"
LONGEST = 2048
POOL = 24_000
"""Tokens of the servers' KV pools."""
AIM = 0.10
BUSY = 1024
"""Tokens of the prompt behind which a batch gathers."""
BATCHES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((512, 0), (256, 0)),
    ((256, 512), (128, 0)),
    ((256, 0),) * 4,
    ((320, 0), (64, 512), (160, 0), (16, 512)),
    ((96, 0),) * 8,
    ((16, 512), (64, 0)) * 4,
)
"""(new, context) of the prompts of each batch."""


@dataclass(frozen=True, kw_only=True)
class CostModelOptions(Options):
    """The flags of this benchmark."""

    model: str = flag(MODEL, "Which tiny model.")
    profile: Path | None = flag(None, "Keep the profile here.", metavar="FILE")


def main(argv: Sequence[str] | None = None) -> int:
    options = CostModelOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    run(options, report)
    return report.finish(options)


def run(options: CostModelOptions, report: Report) -> None:
    """Calibrate, predict, measure, compare."""
    model = options.model
    lengths, rounds = options.pick((7, 9), quick=(5, 5), tiny=(5, 1))
    with _server(model, "0", 1) as (server, quiet):
        report.note(quiet)
        profile = _calibrate(server.url, lengths, rounds, options.profile)
        _add_profile(report, profile)
        unseen = between(points(LONGEST, lengths))
        one = _measure(server.url, unseen, rounds)
        batches = measure_batches(server.url, rounds)
    if profile.operators is None:
        raise SystemExit(f"operators were not measured: {'; '.join(profile.notes)}")
    op, arch = profile.operators, profile.arch
    report.summary["op_mean_error"] = _compare(report, "TP 1, operator level", op, one)
    report.summary["arch_mean_error"] = _compare(report, "TP 1, arch level", arch, one)
    compare_batches(report, op, batches)
    if len(os.sched_getaffinity(0)) < 2:
        report.note("TP 2 needs two cores; left out")
        return
    with _server(model, "0|1", 2) as (server, quiet):
        report.note(quiet)
        few = [point for point in anchors(LONGEST) if point not in unseen]
        constants = [Timed(*one) for one in _measure(server.url, few, rounds, run=2)]
        two = _measure(server.url, unseen, rounds)
    told = with_scaling(profile, 2, constants)
    assert told.operators is not None
    for name, key, by_shapes, scaled in (
        ("operator level", "op_mean_error_tp2", op.scaled(2), told.operators.scaled(2)),
        ("arch level", "arch_mean_error_tp2", arch.scaled(2), told.arch.scaled(2)),
    ):
        report.summary[key] = _compare(report, f"TP 2, {name}", scaled, two)
        report.summary[f"{key}_by_shapes"] = _compare(report, f"TP 2, {name}, by shapes", by_shapes, two)
        report.add(
            f"constants of TP 2, {name}",
            points=len(few),
            factor=scaled.scaling.factor,
            fixed_ms=scaled.scaling.fixed_s * 1e3,
        )


@contextmanager
def _server(model: str, cores: str, tp: int) -> Iterator[tuple[ServerProcess, str]]:
    """A server whose ranks have a core each, and the cores for other work."""
    spec = ServerSpec(
        model=model,
        flags=(
            *("--tp-size", str(tp), "--max-total-tokens", str(POOL), "--mem-fraction-static", "0.5"),
            # On a CPU, attention looks at the whole prompt again for each piece: one piece is one prefill.
            *("--chunked-prefill-size", "-1"),
        ),
        # One thread per rank: without SGLang's own CPU kernels the binding alone leaves each rank all cores.
        environment={"SGLANG_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": "1"},
    )
    with ServerProcess(spec) as server:
        ours = [os.getpid(), *descendants(server.pid)]
        first = go_first(ours)
        try:
            share = undisturbed()
            order = "before" if first else "among"
            yield (
                server,
                f"TP {tp}: servers run {order} other work, a core is ours for {share:.0%} of the time",
            )
        finally:
            go_first([os.getpid()], DEFAULT)


def _calibrate(url: str, lengths: int, rounds: int, keep: Path | None) -> Profile:
    given = Arguments(longest=LONGEST, lengths=lengths, rounds=rounds, scale_to_tp=(2,))
    profile = calibrate(given, url, lambda what, done, of: None)
    with tempfile.TemporaryDirectory() as folder:
        save(profile, keep or Path(folder) / "profile.json")
    return profile


def _measure(url: str, unseen: Sequence[Point], rounds: int, run: int = 1) -> list[tuple[int, int, float]]:
    """(new, context, seconds) of every point; run: another one for each on a server, for other tokens."""
    instance = Instance(url)
    try:
        facts = instance.facts()
        model = measure.read_model(facts.model_path, facts.dtype)
        tokens = Tokens(model.vocabulary if model else measure.SAFE_VOCABULARY, os.getpid() + run)
        bench = measure.Bench(instance, tokens, LONGEST)
        bench.warm_up([unseen[0], unseen[-1]])
        samples = measure.prefills(bench, unseen, rounds, lambda what, done, of: None)
    finally:
        instance.close()
    return [(one.new, one.context, one.seconds) for one in merged(samples)]


def measure_batches(url: str, rounds: int) -> list[float]:
    """Seconds of each of ``BATCHES``: the median over the rounds."""
    busy, other = Instance(url), Instance(url)
    try:
        facts = other.facts()
        model = measure.read_model(facts.model_path, facts.dtype)
        tokens = Tokens(model.vocabulary if model else measure.SAFE_VOCABULARY, os.getpid() + 3)
        base = tokens.fresh(max(context for batch in BATCHES for _, context in batch))
        seconds: list[list[float]] = [[] for _ in BATCHES]
        for _ in range(rounds):
            other.prefill(base)
            alone = busy.prefill(tokens.fresh(BUSY)).seconds
            for batch, found in zip(BATCHES, seconds, strict=True):
                prompts = [base[:context] + tokens.fresh(new) for new, context in batch]
                found.append(_behind(busy, other, tokens.fresh(BUSY), prompts, alone / 3) - alone)
        return [float(np.median(found)) for found in seconds]
    finally:
        busy.close()
        other.close()


def _behind(
    busy: Instance, other: Instance, first: list[int], prompts: list[list[int]], wait_s: float
) -> float:
    """From sending ``first`` until all prompts, sent while it is computed, have their first tokens."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(busy.prefill, first)
        time.sleep(wait_s)
        other.first_tokens(prompts)
        end = time.perf_counter()
        sent.result()
    return end - begin


def compare_batches(report: Report, level: OperatorLevel, measured: Sequence[float]) -> None:
    """Add a row per batch, and the mean errors of both estimates."""
    errors: dict[str, list[float]] = {"batch": [], "sum": []}
    for batch, seconds in zip(BATCHES, measured, strict=True):
        passes = Passes(level.batch_s)
        for new, context in batch:
            passes = passes.adding(new, context)
        # Work outside of forward passes ran while the first prompt was computed.
        singles = [level.seconds(new, context) for new, context in batch]
        predicted = {"batch": passes.seconds - level.around_s, "sum": sum(singles) - level.around_s}
        for name, told in predicted.items():
            errors[name].append(abs(told - seconds) / seconds)
        report.add(
            "batches, TP 1, operator level",
            prompts=len(batch),
            new=sum(new for new, _ in batch),
            cached=sum(context for _, context in batch),
            measured_ms=seconds * 1e3,
            batch_ms=predicted["batch"] * 1e3,
            sum_ms=predicted["sum"] * 1e3,
            batch_error=errors["batch"][-1],
            sum_error=errors["sum"][-1],
        )
    report.summary["batch_mean_error"] = float(np.mean(errors["batch"]))
    report.summary["batch_mean_error_as_sum"] = float(np.mean(errors["sum"]))


def _compare(
    report: Report, case: str, level: OperatorLevel | ArchLevel, measured: Sequence[tuple[int, int, float]]
) -> float:
    """Add a row per point and one for all; returns the mean error."""
    errors = []
    for new, context, seconds in measured:
        predicted = level.seconds(new, context)
        errors.append(abs(predicted - seconds) / seconds)
        report.add(
            case,
            prompt=new + context,
            cached=context,
            measured_ms=seconds * 1e3,
            predicted_ms=predicted * 1e3,
            error=errors[-1],
        )
    mean = float(np.mean(errors))
    report.add(
        case,
        points=len(errors),
        mean_error=mean,
        p50_error=float(np.median(errors)),
        worst_error=max(errors),
        within_aim=mean < AIM,
    )
    return mean


def _add_profile(report: Report, profile: Profile) -> None:
    for note in profile.notes:
        report.note(note)
    report.add(
        "calibration",
        samples=profile.quality.samples,
        op_error=profile.quality.operator_mean_error,
        arch_error=profile.quality.arch_mean_error,
        longest=profile.longest_prompt,
    )
    if profile.operators is None:
        return
    for new, context in ((1024, 0), (256, 768)):
        parts = profile.operators.parts(Batch.of(new, context))
        report.add(
            "parts of exec, ms",
            prompt=new + context,
            cached=context,
            **{name: seconds * 1e3 for name, seconds in parts.items()},
        )


if __name__ == "__main__":
    sys.exit(main())
