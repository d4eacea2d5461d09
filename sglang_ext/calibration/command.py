"""``sglang-ext calibrate``: measure a running instance, and keep a cost profile of its model and device."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from sglang_ext.calibration import measure, reductions
from sglang_ext.calibration.instance import Facts, Instance
from sglang_ext.calibration.plan import Tokens, anchors, points
from sglang_ext.calibration.started import started
from sglang_ext.cost_model import fitting, profile
from sglang_ext.cost_model.fit import relative_errors
from sglang_ext.cost_model.levels import ArchLevel, OperatorLevel
from sglang_ext.cost_model.operators import Link
from sglang_ext.errors import ConfigError, PeerError, SglangExtError
from sglang_ext.flags import COUNT, SECONDS, WORDS, Flagged, Parser, flag, list_flag, one_of
from sglang_ext.flags.removed import CALIBRATE
from sglang_ext.tiers import Tier, tiers_below


def _link(text: str) -> Link:
    """``10`` (GB/s) or ``10:0.002`` (and seconds for each load)."""
    speed, _, fixed = text.partition(":")
    try:
        value, seconds = float(speed), float(fixed or 0)
    except ValueError:
        value, seconds = 0.0, 0.0
    if not (0 < value < 1e6 and 0 <= seconds < 60):
        raise ValueError(f"{text!r} is not a bandwidth in GB/s, such as 10, or 10:0.002")
    return Link(seconds, 1 / (value * 1e9))


LINK = Parser(_link, "GB/S")


@dataclass(frozen=True, kw_only=True)
class Arguments(Flagged):
    """Flags of ``sglang-ext calibrate``."""

    prog = "sglang-ext calibrate"
    description = (
        "Measures how long a running SGLang server takes for prompts of several lengths and cached shares, "
        "and for each operator of its forward pass, and writes a cost profile that the router chooses by "
        "(--policy cost). The server should do nothing else meanwhile: calibrate waits, and says so, "
        "when it does."
    )

    lists = (
        list_flag("--measure", "Prompts and operators to measure."),
        list_flag(
            "--links", "Bandwidths in GB/s, such as dram=10, with seconds per load, as in dram=10:0.002."
        ),
    )
    removed = CALIBRATE

    url: str | None = flag(None, "The server, http://host:port.")
    model_path: str | None = flag(
        None, "Instead of --url: start a server of this model, and end it afterwards.", metavar="MODEL"
    )
    server_args: tuple[str, ...] = flag((), "With --model-path: SGLang flags, in one argument.", WORDS)
    start_timeout_secs: float = flag(
        600.0, "How long its start may take.", SECONDS, within="--measure", key="start-timeout"
    )
    api_key: str | None = flag(
        None,
        "The key that the server asks for.",
        secret=True,
        variable="SGLANG_EXT_WORKER_API_KEY",
        variable_only=True,
    )
    profile: Path | None = flag(None, "Write here instead of the user's cache folder.", metavar="FILE")
    device_name: str | None = flag(None, "What the profile calls the device.", metavar="NAME")
    longest: int = flag(4096, "Tokens of the longest prompt.", metavar="TOKENS", within="--measure")
    lengths: int = flag(7, "Prompt lengths to measure.", within="--measure")
    rounds: int = flag(5, "Times each prompt is measured.", within="--measure")
    operators: str = flag(
        "on",
        "Measure each operator of the forward pass; off fits times to first token alone (arch level).",
        one_of("on", "off"),
        within="--measure",
    )
    scale_to_tp: tuple[int, ...] = flag(
        (),
        "Measure all-reduces between N ranks of this machine, to predict --tp-size N. May be repeated.",
        COUNT,
        several="append",
    )
    scale_profile: Path | None = flag(
        None,
        "Measure a few prompts only, and keep in this profile of the same model how times change with the "
        "server's --tp-size. The profile has to know its all-reduce (--scale-to-tp).",
        metavar="FILE",
    )
    dram: Link | None = flag(None, "The bandwidth from DRAM to HBM.", LINK, within="--links")
    disk: Link | None = flag(None, "The bandwidth from disk to HBM.", LINK, within="--links")
    transfer: Link | None = flag(None, "The bandwidth between two instances.", LINK, within="--links")
    quiet: bool = flag(False, "Show no progress.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest < 256 or self.lengths < 3 or self.rounds < 1:
            raise ConfigError("longest must be at least 256, lengths 3 and rounds 1", field="--measure")
        if any(ranks < 2 for ranks in self.scale_to_tp):
            raise ConfigError("an all-reduce needs at least two ranks", field="--scale-to-tp")


def run(given: Arguments, url: str, progress: measure.Progress) -> profile.Profile:
    """Measure and fit.

    Raises:
        SglangExtError: the instance cannot be measured.
    """
    instance = Instance(url, given.api_key)
    try:
        facts = instance.facts()
        model = measure.read_model(facts.model_path, facts.dtype)
        longest = measure.longest_prompt(facts, given.longest)
        grid = points(longest, given.lengths)
        tokens = Tokens(model.vocabulary if model else measure.SAFE_VOCABULARY, os.getpid())
        bench = measure.Bench(instance, tokens, longest)
        bench.warm_up([grid[0], grid[-1], grid[len(grid) // 2]])
        found = measure.Measured()
        found.samples = measure.prefills(bench, grid, given.rounds, progress)
        if model is None:
            found.notes.append(f"no config.json at {facts.model_path}: operators were not measured")
        elif given.operators == "on":
            try:
                found.steps, found.units = measure.operators(
                    bench, instance, facts, grid, max(3, given.rounds), model.shape.hidden, progress
                )
            except measure.BusyError:
                raise
            except PeerError as error:
                found.notes.append(f"operators were not measured: {error}")
        found.decode = measure.decode(
            bench, instance, facts, tokens, longest, max(2, given.rounds // 2), progress
        )
        if found.steps:
            try:
                found.overlap_s = measure.overlap(bench, instance, facts, tokens, progress)
            except measure.BusyError:
                raise
            except PeerError as error:
                found.notes.append(f"the overlap of passes was not measured: {error}")
        found.disturbed = bench.disturbed
    finally:
        instance.close()
    links = {
        str(n): reductions.measure(n, gpu=facts.device == "cuda") for n in sorted(set(given.scale_to_tp))
    }
    name = given.device_name or device_name(facts.device, instance.host)
    return fitted(facts, model, found, longest, name, links, _media(given), given.transfer)


def scale(given: Arguments, url: str, path: Path, progress: measure.Progress) -> profile.Profile:
    """The profile at ``path`` with the constants of the parallelism of a running instance.

    Raises:
        SglangExtError: the instance cannot be measured, or is of another model.
    """
    known = profile.load(path)
    instance = Instance(url, given.api_key)
    try:
        facts = instance.facts()
        of_profile, of_server = (known.identity.model, known.identity.dtype), (facts.model, facts.dtype)
        if of_profile != of_server or facts.tp == known.identity.tp or facts.pp != known.identity.pp:
            raise ConfigError(
                f"the server has {facts.model}, {facts.dtype}, TP {facts.tp}, PP {facts.pp}; "
                f"the profile is of {known.identity}",
                field="--scale-profile",
                hint="Name the profile of the same model, dtype and PP at another TP",
            )
        model = measure.read_model(facts.model_path, facts.dtype)
        tokens = Tokens(model.vocabulary if model else measure.SAFE_VOCABULARY, os.getpid())
        longest = measure.longest_prompt(facts, min(given.longest, known.longest_prompt))
        samples = scaling_samples(measure.Bench(instance, tokens, longest), longest, given.rounds, progress)
    finally:
        instance.close()
    return with_scaling(known, facts.tp, samples)


def scaling_samples(
    bench: measure.Bench, longest: int, rounds: int, progress: measure.Progress
) -> list[fitting.Timed]:
    """Prefills to which the constants of a parallelism are fitted."""
    few = anchors(longest)
    bench.warm_up([few[0], few[-1]])
    return measure.prefills(bench, few, rounds, progress)


def with_scaling(known: profile.Profile, tp: int, samples: Sequence[fitting.Timed]) -> profile.Profile:
    """The profile with the constants of ``tp`` ranks: no I/O."""

    def scaled(level: _Level) -> _Level:
        bare = msgspec.structs.replace(
            level, scalings={ranks: one for ranks, one in level.scalings.items() if ranks != str(tp)}
        )
        try:
            found = fitting.fit_scaling(bare.scaled(tp), samples)
        except ValueError as error:
            raise PeerError(f"the constants of {tp} ranks cannot be fitted: {error}") from error
        return msgspec.structs.replace(bare, scalings={**bare.scalings, str(tp): found})

    return msgspec.structs.replace(
        known,
        arch=scaled(known.arch),
        operators=None if known.operators is None else scaled(known.operators),
    )


_Level = TypeVar("_Level", OperatorLevel, ArchLevel)


def _media(given: Arguments) -> dict[str, Link]:
    links = {tier.name: getattr(given, tier.name, None) for tier in tiers_below(Tier.HBM)}
    return {name: link for name, link in links.items() if link is not None}


def fitted(
    facts: Facts,
    model: measure.ModelShape | None,
    found: measure.Measured,
    longest: int,
    device: str,
    links: dict[str, Link],
    tiers: dict[str, Link],
    transfer: Link | None,
) -> profile.Profile:
    """The profile fitted to measurements: no I/O."""
    notes = list(found.notes)
    arch = fitting.fit_arch(found.samples, model.shape if model else None, facts.tp, links)
    operators: OperatorLevel | None = None
    if found.steps and model is not None:
        try:
            operators = fitting.fit_operators(
                found.steps,
                found.samples,
                model.shape,
                units=found.units,
                tp=facts.tp,
                pp=facts.pp,
                reductions=links,
                overlap_s=found.overlap_s,
            )
        except ValueError as error:
            notes.append(f"operators were not fitted: {error}")
    if found.disturbed:
        notes.append(f"the instance was found working for others {found.disturbed} times")
    groups: dict[tuple[int, int], list[float]] = {}
    for sample in found.samples:
        groups.setdefault((sample.new, sample.context), []).append(sample.seconds)
    uneven = float(np.median([fitting.spread(times) for times in groups.values()]))
    if uneven > fitting.AGREE:
        notes.append(
            f"repetitions differ by {uneven:.0%}: something else used the machine; lower quarters were taken"
        )
    merged = fitting.merged(found.samples)
    seconds = [one.seconds for one in merged]

    def mean_error(level: OperatorLevel | ArchLevel) -> float:
        predicted = [level.seconds(one.new, one.context) for one in merged]
        return float(np.mean(relative_errors(predicted, seconds)))

    return profile.Profile(
        schema=profile.SCHEMA,
        identity=profile.Identity(facts.model, device, facts.dtype, facts.tp, facts.pp),
        arch=arch,
        quality=profile.Quality(
            len(found.samples), mean_error(arch), None if operators is None else mean_error(operators)
        ),
        longest_prompt=longest,
        kv_bytes_per_token=model.kv_bytes_per_token if model else 128 * 1024,
        operators=operators,
        decode=found.decode,
        tiers=tiers,
        transfer=transfer,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        notes=tuple(notes),
    )


def device_name(device: str, host: str) -> str:
    """Name of the device: from this machine if the server runs on it, else the server's own word."""
    if host not in ("127.0.0.1", "localhost", "::1"):
        return device
    try:
        if device == "cuda":
            shown = subprocess.run(
                ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
                encoding="utf-8",
            )
            return shown.stdout.splitlines()[0].strip()
        if device == "cpu":
            with open("/proc/cpuinfo", encoding="utf-8") as file:
                return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, subprocess.SubprocessError, StopIteration, IndexError):
        pass
    return device


def report(made: profile.Profile, path: Path) -> str:
    """The summary that the command prints at its end."""
    lines = [f"{made.identity}", f"profile: {path}"]
    quality = made.quality
    if quality.operator_mean_error is not None:
        lines.append(f"operator level: mean error {quality.operator_mean_error:.1%} on what it was fitted to")
    lines.append(f"arch level:     mean error {quality.arch_mean_error:.1%} on what it was fitted to")
    lines += [
        f"prompt of {x:>6} tokens: {made.level.seconds(x, 0) * 1e3:9.1f} ms; "
        f"3/4 of it cached: {made.level.seconds(x - x * 3 // 4, x * 3 // 4) * 1e3:9.1f} ms"
        for x in sorted({256, 1024, made.longest_prompt})
        if x <= made.longest_prompt
    ]
    lines += [f"note: {note}" for note in made.notes]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    known = Arguments.parser()
    args = known.parse_args(arguments)
    if (args.url is None) == (args.model_path is None):
        known.error("one of --url and --model-path is needed")
    try:
        given = Arguments.from_cli_args(args)
        with ExitStack() as stack:
            url = given.url
            if given.model_path is not None:
                url = stack.enter_context(
                    started(given.model_path, given.server_args, given.start_timeout_secs)
                )
            shown = stack.enter_context(_Shown(quiet=given.quiet))
            if given.scale_profile is None:
                made = run(given, str(url), shown.progress)
            else:
                made = scale(given, str(url), given.scale_profile, shown.progress)
        path = profile.save(made, given.profile or given.scale_profile)
    except SglangExtError as error:
        sys.stderr.write(f"sglang-ext calibrate: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("sglang-ext calibrate: interrupted, nothing was written\n")
        return 130
    sys.stdout.write(report(made, path) + "\n")
    return 0


class _Shown:
    """A progress bar per kind of measurement, on standard error."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bars = Progress(console=Console(stderr=True), disable=quiet)
        self._tasks: dict[str, object] = {}

    def progress(self, what: str, done: int, of: int) -> None:
        """As ``measure.Progress``."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=of)
        self._bars.update(self._tasks[what], completed=done)  # type: ignore[arg-type]

    def __enter__(self) -> _Shown:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


if __name__ == "__main__":
    raise SystemExit(main())
