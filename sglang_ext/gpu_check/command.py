"""``sglang-ext gpu-check``: its flags, its steps and its verdict."""

from __future__ import annotations

import json as to_json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_ext.cluster.doctor.findings import Finding, Level, as_json, problems, show
from sglang_ext.flags import Flagged, Parser, flag

PROG = "sglang-ext gpu-check"
Step = Callable[[], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Arguments(Flagged):
    """Flags of ``sglang-ext gpu-check``."""

    prog = PROG
    description = (
        "Check this machine's GPU: the card and its link, copies between GPU memory and DRAM (bytes, order, "
        "speed), a server's answers from each tier, and those of prefill and decode apart. Takes about "
        "five minutes and no network. The exit status is 0 when all is well, 1 when there are problems."
    )

    model_path: str | None = flag(
        None,
        "Serve this model, not one of the shape of Llama-3.2-1B that is made on the spot.",
        Parser(str, "MODEL"),
    )
    quick: bool = flag(False, "Without servers: under a minute.")
    json: bool = flag(False, "Print one JSON object instead of text.")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0 when all is well, 1 when there are problems, 2 for a wrong flag."""
    args = Arguments.parse(arguments)
    from sglang_ext.gpu_check.facts import no_gpu

    nothing = no_gpu()
    steps: list[Step] = [lambda: iter(() if nothing is None else (nothing,))]
    if nothing is None:
        steps = quick_steps()
        if not args.quick:
            steps.append(lambda: _server(args.model_path))
    found = run(steps, None if args.json else Console())
    if args.json:
        sys.stdout.write(to_json.dumps(verdict(found), indent=2) + "\n")
    return 1 if problems(found) else 0


def quick_steps() -> list[Step]:
    """All steps without a server."""
    from sglang_ext.engine.gpu_link import measure
    from sglang_ext.gpu_check import copies, facts

    def copying() -> Iterator[Finding]:
        link = measure()
        yield copies.limits(link)
        yield from copies.bytes_kept()
        yield from copies.orders()
        yield from copies.speeds(link)

    return [facts.facts, copying]


def run(steps: Sequence[Step], console: Console | None) -> list[Finding]:
    """All findings of all steps; a step that fails is a problem, and the next one is taken. console: shows
    each finding when it is there, and the verdict."""
    found: list[Finding] = []

    def add(finding: Finding) -> None:
        found.append(finding)
        if console is not None:
            show([finding], console)

    for step in steps:
        try:
            for finding in step():
                add(finding)
        except Exception as error:  # noqa: BLE001 - the other steps are worth having
            text = f"the step ended: {type(error).__name__}: {error}"
            add(Finding(Level.PROBLEM, "gpu-check", text, "Report this with the output of --json"))
    if console is not None:
        console.print(verdict(found)["verdict"])
    return found


def verdict(found: Sequence[Finding]) -> dict[str, object]:
    """The findings as plain data, with a sentence for all of them."""
    wrong = problems(found)
    slow = sum(finding.level is Level.WARNING for finding in found)
    text = f"{wrong} problems, {slow} warnings." if wrong or slow else "All is well."
    return {"problems": wrong, "warnings": slow, "verdict": text, "findings": as_json(found)}


def _server(model: str | None) -> Iterator[Finding]:
    from sglang_ext.gpu_check.facts import pairs
    from sglang_ext.gpu_check.models import write_model
    from sglang_ext.gpu_check.serving import Plan, answers

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = Path(folder) / "model"
        if model is None:
            path.mkdir()
            write_model(path)
        pair = pairs().level is Level.OK
        yield from answers(Plan(path if model is None else Path(model), Path(folder), pair=pair))
