"""The rows of the tiers benchmark that need real SGLang servers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lib.common import SEED, Options, Report
from benchmarks.tiers.decode import measure_decode
from benchmarks.tiers.disk import temporary
from benchmarks.tiers.servers import MODEL, Client, Prompts, Sizes, kv_layout, spec
from benchmarks.tiers.ttft import MOST_COLD, Stage, measure_length, report_lengths, sizes_for
from sglang_ext.tiered_store.disk.speed import choose_io
from sglang_ext.tiered_store.disk.state import IoMode
from tests.support.servers.server import ServerProcess

QUICK_LENGTHS = (2048, 8192)
LENGTHS = (2048, 8192, 16384)
TINY_LENGTH = 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured."""

    lengths: tuple[int, ...]
    cold_rounds: int
    seconds_per_length: float
    answers: int
    decode_rounds: int
    decode_seconds: float


def plan_for(options: Options) -> Plan:
    """With --quick, a plan that fits into 180 s beside the other parts."""
    if options.tiny:
        return Plan((TINY_LENGTH,), 1, 0.1, 2, 1, 1.0)
    if options.quick:
        return Plan(QUICK_LENGTHS, 2, 3.0, 8, 3, 20.0)
    return Plan(LENGTHS, MOST_COLD, 120.0, 64, 11, 300.0)


def measure_servers(options: Options, report: Report, folder: Path | None) -> None:
    """Rows of TTFT by tier, of how much of a load it shows, and of decoding beside write-through."""
    plan = plan_for(options)
    sizes = sizes_for(max(plan.lengths))
    with temporary(folder) as path:
        measure_on(plan, report, sizes, path)


def measure_on(plan: Plan, report: Report, sizes: Sizes, path: Path) -> None:
    """The same in a folder, with servers whose disk is read as `--kv-disk-io auto` reads it here."""
    io = choose_io(path, kv_layout(), IoMode.AUTO)
    report.note(
        f"servers: model {MODEL!r}, float32, on this machine's CPU, one request at a time; --kv-disk-io auto "
        f"reads {io.value}"
    )
    with serving(sizes, path / "writes", "disk", io) as writing:
        _measure_ttft(plan, report, writing, sizes, path / "writes", io)
        # Both servers of the comparison begin with empty tiers.
        writing.server.flush()
        with serving(sizes, path / "off", "off", io) as off:
            measure_decode(
                report,
                writing,
                off,
                Prompts(SEED + 2),
                answers=plan.answers,
                rounds=plan.decode_rounds,
                seconds=plan.decode_seconds,
            )


@contextlib.contextmanager
def serving(sizes: Sizes, folder: Path, durability: str, io: IoMode) -> Iterator[Client]:
    """A server that has answered once: the first request compiles."""
    with ServerProcess(spec(sizes, folder, durability, io)) as server:
        client = Client(server, folder)
        try:
            client.ask(Prompts(SEED).new(256))
            yield client
        finally:
            client.close()


def _measure_ttft(plan: Plan, report: Report, client: Client, sizes: Sizes, folder: Path, io: IoMode) -> None:
    stage = Stage(client, sizes, Prompts(SEED + 1), folder, io)
    stage.warm_up()
    stage.settle()
    lengths = [
        measure_length(stage, tokens, cold_rounds=plan.cold_rounds, seconds=plan.seconds_per_length)
        for tokens in plan.lengths
    ]
    report_lengths(report, lengths)
