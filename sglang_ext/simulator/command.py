"""``sglang-ext simulate``: a fleet in virtual time, by its router's and its engines' own code."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from sglang_ext.clock import SystemClock
from sglang_ext.cost_model import CostModel, load
from sglang_ext.cost_model.profile import parse
from sglang_ext.errors import ConfigError, SglangExtError
from sglang_ext.flags import COUNT, Flagged, flag
from sglang_ext.router.policies import policy_named
from sglang_ext.simulator.crowd import alone, goodput, median_s
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.report import page, print_table
from sglang_ext.simulator.run import simulate
from sglang_ext.simulator.settings import (
    NOT_OF_A_CROWD,
    NOT_RECORDED,
    OF_A_CROWD,
    OF_A_RECORDING,
    OF_THE_MIX,
    Settings,
    changed,
    named_in,
    same_fleet,
)
from sglang_ext.simulator.trace import Trace, read_trace

PROG = "sglang-ext simulate"
AS_GIVEN = "as given"
"""The title of the fleet without a change."""
FAILED = 2
SURE = 0.8
"""Share of the capacity above which queues grow so fast that small errors in costs decide everything."""
MARGIN = 0.1
"""By which the load is changed for the interval that is printed then."""
MARGIN_REQUESTS = 20_000
REPORT_S = 10.0
"""From one line about the progress to the next."""


class Reports:
    """Writes how far a long simulation is.

    Args:
        title: of the simulation. requests: that will be sent.
        write: takes a line. seconds: of the machine's time.
    """

    def __init__(
        self,
        title: str,
        requests: int,
        write: Callable[[str], object] = sys.stderr.write,
        seconds: Callable[[], float] = SystemClock.monotonic,
    ) -> None:
        self._title, self._requests, self._write, self._seconds = title, requests, write, seconds
        self._began = self._last = seconds()

    def __call__(self, ended: int, virtual_s: float) -> None:
        """So many requests have ended."""
        now = self._seconds()
        if now - self._last < REPORT_S:
            return
        self._last, took = now, now - self._began
        left = took * (self._requests - ended) / ended
        self._write(
            f"{self._title}: {ended:,} of {self._requests:,} requests, {virtual_s:,.0f} s of virtual time "
            f"in {took:,.0f} s, about {left:,.0f} s left\n"
        )


@dataclass(frozen=True, kw_only=True)
class Arguments(Flagged):
    """Flags of the command."""

    prog = PROG
    description = (
        "Simulate a fleet and its load in virtual time, without a GPU or a model: the router's and the "
        "engine's own code decides, and the cost model says how long passes, copies and transfers take. "
        "Prints what requests waited and reused, and what an oracle would have reused."
    )

    trace: Path | None = flag(
        None,
        "A recorded load in the place of the built-in mix: a router's recording (--record), or a Mooncake "
        "trace. A recording gives the fleet and its policy too, and the times that its requests took, which "
        "are used as long as no fleet is changed.",
        metavar="FILE",
        common=True,
    )
    instances: int | None = flag(
        None, "Instances of the fleet: 4, or those of the recording.", COUNT.positive(), common=True
    )
    requests: int | None = flag(
        None, "Requests to send: 1,000, or all of the trace.", COUNT.positive(), common=True
    )
    policy: str | None = flag(None, "The router's policy: auto, or that of the recording.", common=True)
    seed: int = flag(0, "Of the load, and of all names. One seed gives the same output.", COUNT)
    settings: str = flag(
        "",
        "The rest of the fleet and of its load, as NAME=VALUE,…: rate (requests/s of an instance; 2x of a "
        "trace), hbm and dram (blocks), disk (blocks), disk_read and disk_write (bytes/s), prefill and "
        "decode (instances), pd_caching, role_controller, role_dwell_secs, role_switch_s, chunk, running, "
        "ignore_eos, network (of an instance, bytes/s), "
        "lag_ms, fetch, for_others and spill_blocks (blocks), spill_above, hints, most_running, failures (an "
        "hour), restart_s, layers; of a recording: observed, closed; of policies: queue_weight, exec_weight, "
        "cache_threshold, balance_abs, balance_rel, balance_cache; of tenants, by the fields of a key file, "
        "each a number for all or one for each (2/50): requests_per_second, burst, concurrent, "
        "tokens_per_minute, priority; tenants, greedy (sessions of the first, in times another's), "
        "bytes_per_minute; of the router: max_concurrent_requests, queue_size, queue_timeout_secs, "
        "queue_policy, program_share; for agents in a closed loop: crowd (times what HBM holds), seconds, "
        "pause_s, pause_spread, learnt_hints.",
        metavar="LIST",
    )
    what_if: tuple[str, ...] = flag(
        (),
        "A changed fleet beside it, such as 'instances=12, dram=2x, policy=cost'. May be repeated.",
        metavar="LIST",
        several="append",
        common=True,
    )
    cost_profile: Path | None = flag(
        None,
        "Measured costs of the instances: those that the recording's router expected, or the defaults.",
        metavar="FILE",
    )
    json: bool = flag(False, "Print JSON.")
    report: Path | None = flag(None, "Write a page of HTML with plots here.", metavar="FILE")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    given = Arguments.parse(list(arguments))
    try:
        return run(given)
    except SglangExtError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return FAILED


def run(given: Arguments) -> int:
    """Simulate the fleet, and each changed one.

    Raises:
        ConfigError: a setting or a file cannot be used.
    """
    for name in ("sglang_ext", "router"):
        logging.getLogger(name).setLevel(logging.ERROR)
    trace = None if given.trace is None else _read(given.trace)
    base = changed(settings_of(given, trace), given.settings)
    model = model_of(given, trace)
    runs = {AS_GIVEN: base} | {text: changed(base, text) for text in given.what_if}
    _check_used(given, runs, trace)
    recorded: Settings | None = None
    if trace is not None:
        recorded = _recorded(trace, base)
        runs = _timed(given, runs, recorded, trace)
    for settings in runs.values():
        policy_named(settings.policy)
    outcomes = {
        title: simulate(settings, model, _sped(trace, settings), progress=Reports(title, settings.requests))
        for title, settings in runs.items()
    }
    columns = {
        title: {"times": _times(runs[title], model, trace)} | outcome.as_json()
        for title, outcome in outcomes.items()
    }
    for title, settings in runs.items():
        outcome, column = outcomes[title], columns[title]
        column["warnings"] = []
        if settings.crowd:
            unloaded_s = median_s(simulate(alone(settings), model).served)
            column["agents"] = goodput(outcome.served, unloaded_s, settings.seconds)
            continue
        replayed = trace is not None and settings.observed
        if outcome.capacity_used > SURE and not replayed:
            column["interval"] = _interval(settings, model, trace)
            column["warnings"].append(_warning(title, outcome, column["interval"]))
        if replayed and recorded is not None and not same_fleet(settings, recorded):
            column["warnings"].append(_foreign(title))
    if given.json:
        text = {"settings": {t: dataclasses.asdict(s) for t, s in runs.items()}, "outcomes": columns}
        sys.stdout.write(json.dumps(text, indent=1) + "\n")
    else:
        print_table(Console(soft_wrap=True), columns)
    if given.report is not None:
        _write(given.report, page(outcomes, columns, f"{base}; {model!r}"))
    return 0


def settings_of(given: Arguments, trace: Trace | None) -> Settings:
    """The fleet of the flags; values that they leave out are those of the recording, or the defaults."""
    settings = Settings(seed=given.seed)
    if trace is not None:
        sizes = {name: size for name, size in trace.tiers.items() if size}
        settings = dataclasses.replace(
            settings,
            instances=len(trace.instances) or settings.instances,
            requests=len(trace.sessions),
            rate=1.0,
            policy=trace.policy or settings.policy,
            fetch=bool(trace.kinds) or not trace.instances,
            tenants=1 + max((each.tenant for each in trace.sessions), default=0),
            hbm=sizes.get("hbm", settings.hbm),
            dram=sizes.get("dram", 1 if sizes else settings.dram),
            disk=sizes.get("disk", settings.disk),
            **trace.settings,
        )
    named: dict[str, Any] = {
        name: value
        for name in ("instances", "requests", "policy")
        if (value := getattr(given, name)) is not None
    }
    return dataclasses.replace(settings, **named)


def model_of(given: Arguments, trace: Trace | None) -> CostModel:
    """The costs that are named, else those of the recording's router, else the defaults.

    Raises:
        ConfigError: they cannot be used.
    """
    if given.cost_profile:
        return CostModel(load(given.cost_profile))
    if trace is None or not trace.costs:
        return CostModel()
    try:
        return CostModel(parse(msgspec.json.encode(trace.costs), "the costs of the recording"))
    except ConfigError as error:
        hint = "Name a profile with --cost-profile"
        raise ConfigError(error.message, field="--trace", hint=hint) from error


def _check_used(given: Arguments, runs: dict[str, Settings], trace: Trace | None) -> None:
    """Refuse settings that would change nothing.

    Raises:
        ConfigError: there is one.
    """
    if given.instances not in (None, runs[AS_GIVEN].instances) and "instances" not in named_in(
        given.settings
    ):
        raise ConfigError(
            f"instances are prefill and decode together, {runs[AS_GIVEN].instances} here; change those by "
            "--settings prefill=N,decode=M",
            field="--instances",
        )
    for title, settings in runs.items():
        field, text = ("--settings", given.settings) if title == AS_GIVEN else ("--what-if", title)
        named = named_in(text)
        if wrong := [name for name in named if name in (OF_A_RECORDING if trace is None else OF_THE_MIX)]:
            load = "a recorded load: name it with --trace" if trace is None else (
                "the built-in load, and --trace gives another one: leave it out"
            )  # fmt: skip
            raise ConfigError(f"{wrong[0]} is of {load}", field=field)
        fleets = list(runs.values()) if title == AS_GIVEN else [settings]
        _check_crowd(named, fleets, field)
        if trace is None:
            continue
        if not named.get("rate", "1x").endswith("x"):
            raise ConfigError(
                f"rate={named['rate']}: the rate of a recorded load can only be multiplied, such as rate=2x",
                field=field,
            )
        if settings.requests > len(trace.sessions):
            raise ConfigError(
                f"{settings.requests:,} requests cannot be sent: there are {len(trace.sessions):,} in the "
                "trace. rate=2x has them come in half the time",
                field=field if "requests" in named else "--requests",
            )
        if "observed" in named and settings.observed and not trace.timed:
            raise ConfigError("the trace has no times of its requests: leave observed=on out", field=field)
        if settings.closed and len({each.name for each in trace.sessions}) == len(trace.sessions):
            raise ConfigError(
                "the trace does not say which requests are of one session: leave closed=on out", field=field
            )


def _check_crowd(named: Mapping[str, str], fleets: Sequence[Settings], field: str) -> None:
    """Refuse settings of a crowd where no fleet has one, and those of other loads where each has one."""
    crowds = sum(settings.crowd > 0 for settings in fleets)
    for name in named:
        if name in OF_A_CROWD and not crowds:
            raise ConfigError(f"{name} is of a crowd of agents: name crowd too, or leave it out", field=field)
        if name in NOT_OF_A_CROWD and crowds == len(fleets):
            raise ConfigError(f"{name} would change nothing for a crowd of agents: leave it out", field=field)


def _sped(trace: Trace | None, settings: Settings) -> Trace | None:
    """A recorded load at the rate that is asked for."""
    return trace if trace is None or settings.rate == 1.0 else trace.at_rate(settings.rate)


def _recorded(trace: Trace, base: Settings) -> Settings:
    """The recorded fleet, with the command's settings that a recording does not have."""
    described = {name: getattr(base, name) for name in NOT_RECORDED}
    return dataclasses.replace(settings_of(Arguments(), trace), **described)


def _timed(
    given: Arguments, runs: dict[str, Settings], recorded: Settings, trace: Trace
) -> dict[str, Settings]:
    """The fleets, each with or without the observed times.

    A changed fleet would not have had them, and columns with observed and with modelled times cannot be
    compared. So they are used where all fleets are the recorded one, and where ``observed`` is named.
    """
    same = trace.timed > 0 and all(same_fleet(settings, recorded) for settings in runs.values())
    named = {title: "observed" in named_in(title) for title in given.what_if}
    named[AS_GIVEN] = "observed" in named_in(given.settings)
    return {
        title: settings if named[title] or named[AS_GIVEN] else dataclasses.replace(settings, observed=same)
        for title, settings in runs.items()
    }


def _times(settings: Settings, model: CostModel, trace: Trace | None) -> str:
    """The origin of a column's times, in one line."""
    modelled = f"by the cost model ({model.basis})"
    if trace is None or not settings.observed or not trace.timed:
        return modelled
    if trace.timed == len(trace.sessions):
        return "as recorded"
    return f"as recorded in {trace.timed:,} of {len(trace.sessions):,} requests, else {modelled}"


def _foreign(title: str) -> str:
    return (
        f"{title}: the fleet is not the recorded one, and its times are those that were recorded, because "
        "observed=on says so. Leave it out for times by the cost model."
    )


def _read(path: Path) -> Trace:
    try:
        with path.open("rb") as file:
            return read_trace(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", field="--trace") from error


def _interval(settings: Settings, model: CostModel, trace: Trace | None) -> dict[str, list[float]]:
    """Mean times at a load that is a tenth smaller, and a tenth larger."""
    requests = min(settings.requests, MARGIN_REQUESTS)
    found = []
    for factor in (1 - MARGIN, 1 + MARGIN):
        around = dataclasses.replace(settings, rate=settings.rate * factor, requests=requests)
        reports = Reports(f"with {factor:.0%} of the load", requests)
        found.append(simulate(around, model, _sped(trace, around), progress=reports).as_json())
    return {name: [figures[name]["mean"] for figures in found] for name in ("ttft_s", "jct_s")}


def _warning(title: str, outcome: Outcome, interval: dict[str, Any]) -> str:
    low, high = interval["ttft_s"]
    return (
        f"{title}: {outcome.capacity_used:.0%} of the capacity is used. Above {SURE:.0%}, waits depend on "
        f"small errors of the costs: mean TTFT is {low * 1e3:,.0f} to {high * 1e3:,.0f} ms at {MARGIN:.0%} "
        "less and more load."
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}", field="--report") from error
