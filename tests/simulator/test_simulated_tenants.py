"""Limits of tenants in a simulation: the router's own meters and line refuse requests; others gain by it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sglang_ext.cost_model import CostModel
from sglang_ext.errors import ConfigError
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tenancy.tenants import Caller, KeyEntry, Meter
from sglang_ext.simulator import command
from sglang_ext.simulator.control.tenants import Tenants
from sglang_ext.simulator.outcome import Outcome, percentile
from sglang_ext.simulator.run import Simulation
from sglang_ext.simulator.settings import Settings, changed
from sglang_ext.simulator.virtual_time import VirtualLoop
from sglang_ext.simulator.workload import mixed
from sglang_ext.testing.fakes import FakeClock

FLEET = "instances=2,requests=260,rate=5,hbm=1200,dram=2000,policy=cost,tenants=2,greedy=8"
LIMITS = "requests_per_second=0.7/0,burst=3/0,concurrent=6/0,tokens_per_minute=120000/0"


@dataclass
class Watched:
    """The calls of a tenant's meter, in order: (moment, "begin" | "end" | "charge", request or tokens)."""

    events: list[tuple[float, str, int]] = field(default_factory=list)


def simulated(text: str) -> tuple[Outcome, dict[str, Watched]]:
    """The outcome, and the calls of each tenant's meter."""
    settings = changed(Settings(), text)
    loop = VirtualLoop()
    watched: dict[str, Watched] = {}
    try:
        run = Simulation(settings, CostModel(), loop, mixed(settings))
        _watch(run.router.tenants, loop, watched)
        loop.run_until_complete(run.run())
        run.check()
        return run.outcome, watched
    finally:
        loop.close()


def _watch(tenants: Tenants, loop: VirtualLoop, watched: dict[str, Watched]) -> None:
    """Note each arrival and each end at the tenants, and the tokens that are charged in between."""
    request = tenants.request
    numbers: Counter[str] = Counter()

    @contextmanager
    def noted(caller: Caller, body_bytes: int) -> Iterator[None]:
        assert caller.tenant is not None
        mine = watched.setdefault(caller.tenant, Watched()).events
        number = numbers[caller.tenant]
        numbers[caller.tenant] += 1
        mine.append((loop.time(), "begin", number))
        try:
            with request(caller, body_bytes):
                yield
        finally:
            mine.append((loop.time(), "end", number))

    tenants.request = noted  # type: ignore[method-assign]
    made = tenants._made

    def charging(number: int) -> Caller:
        caller = made(number)
        meter = caller.meter
        if meter is None:
            return caller
        charge = meter.charge

        def charged(tokens: int) -> None:
            watched[str(caller.tenant)].events.append((loop.time(), "charge", tokens))
            charge(tokens)

        meter.charge = charged  # type: ignore[method-assign]
        return caller

    tenants._made = charging  # type: ignore[method-assign]


def refused_by(entry: KeyEntry, events: list[tuple[float, str, int]]) -> Counter[str]:
    """The refusals of a meter of the router that has these arrivals, ends and charges."""
    clock = FakeClock()
    zero = clock.monotonic()
    meter, running, found = Meter(entry, clock), dict[int, ExitStack](), Counter[str]()
    for moment, what, number in events:
        clock.advance(zero + moment - clock.monotonic())
        if what == "charge":
            meter.charge(number)
        elif what == "end":
            if number in running:
                running.pop(number).close()
        else:
            with ExitStack() as stack:
                try:
                    stack.enter_context(meter.request())
                except RequestRefused as refused:
                    found[str(refused.code)] += 1
                else:
                    running[number] = stack.pop_all()
    assert not running
    return found


def test_limits_of_a_greedy_tenant_keep_the_others_times() -> None:
    """The other one alone, beside the greedy one, and beside the greedy one with limits."""
    (free, _), (limited, _) = simulated(f"{FLEET},priority=0"), simulated(f"{FLEET},{LIMITS}")
    times = [percentile(found.tenants["tenant-1"].ttft, 99) for found in (free, limited)]
    assert times[1] < 0.6 * times[0], times
    assert percentile(limited.tenants["tenant-1"].ttft, 50) <= percentile(free.tenants["tenant-1"].ttft, 50)
    assert free.failed.total() == 0
    assert limited.tenants["tenant-1"].failed.total() == 0
    refused = limited.tenants["tenant-0"].failed
    assert refused == limited.failed
    assert refused["requests_limit_exceeded"] > 10


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ("requests_per_second=0.7/0,burst=3/0", "requests_limit_exceeded"),
        ("concurrent=3/0", "concurrency_limit_exceeded"),
        ("tokens_per_minute=60000/0", "tokens_limit_exceeded"),
        (LIMITS, "requests_limit_exceeded"),
    ],
)
def test_as_many_are_refused_as_by_a_routers_meter(limits: str, code: str) -> None:
    outcome, watched = simulated(f"{FLEET},{limits}")
    settings = changed(Settings(), f"{FLEET},{limits}")

    def entry(name: str, more: float = 1.0) -> KeyEntry:
        number = int(name.rpartition("-")[2])
        amounts = {
            field: amount * more
            for field in ("requests_per_second", "burst", "concurrent", "tokens_per_minute")
            if (amount := getattr(settings, field)[min(number, len(getattr(settings, field)) - 1)])
        }
        return KeyEntry(tenant=name, digest=b"", **amounts)  # type: ignore[arg-type]

    assert outcome.failed[code] > 10
    assert set(watched) == {"tenant-0", "tenant-1"}
    for name, seen in watched.items():
        assert refused_by(entry(name), seen.events) == outcome.tenants[name].failed
    # The twin: a meter with other limits does not refuse as many of the same arrivals.
    greedy = watched["tenant-0"].events
    assert refused_by(entry("tenant-0", 2.0), greedy) != outcome.tenants["tenant-0"].failed


def test_the_routers_line_refuses_those_beyond_it() -> None:
    text = f"{FLEET},most_running=2,queue_size=3,queue_timeout_secs=2,priority=0/5"
    outcome, _ = simulated(text)
    for name in ("tenant-0", "tenant-1"):
        assert outcome.tenants[name].failed.keys() <= {"queue_full", "queue_timeout"}
    greedy, other = outcome.tenants["tenant-0"], outcome.tenants["tenant-1"]
    assert greedy.failed["queue_full"] > 10
    assert greedy.failed["queue_timeout"] > 0
    assert not other.failed["queue_full"], "its priority is higher, and its requests are never the last"
    shares = [sum(each.failed.values()) / len(each.ttft) for each in (greedy, other)]
    assert shares[1] < shares[0] / 3
    assert outcome.requests + outcome.failed.total() == 260
    patient, _ = simulated(f"{FLEET},most_running=2,queue_timeout_secs=10000,priority=0/5")
    assert patient.failed.total() == 0


def test_the_router_answers_so_many_at_a_time_and_takes_so_many_bytes() -> None:
    outcome, _ = simulated(f"{FLEET},priority=0,max_concurrent_requests=4")
    assert outcome.failed["too_many_requests"] > 10
    assert set(outcome.failed) == {"too_many_requests"}
    outcome, _ = simulated(f"{FLEET},priority=0,bytes_per_minute=300000")
    assert outcome.tenants["tenant-0"].failed["bytes_limit_exceeded"] > 10


def test_refused_requests_are_not_what_an_oracle_would_have_reused() -> None:
    outcome, _ = simulated(f"{FLEET},{LIMITS}")
    figures = outcome.as_json()
    assert figures["failed"]["requests_limit_exceeded"] > 10
    assert figures["reused"] - 0.01 <= figures["regret"]["infinite_reused"] < 1


def test_tenants_are_in_the_table_the_json_and_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    page = tmp_path / "page.html"
    words = ["--requests", "120", "--instances", "2", "--settings", "rate=4,tenants=25,concurrent=1"]
    assert command.main([*words, "--what-if", "concurrent=0", "--report", str(page)]) == 0
    table, written = capsys.readouterr().out, page.read_text()
    assert command.main([*words, "--what-if", "concurrent=0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["outcomes"]
    tenants = found["as given"]["tenants"]
    assert len(tenants) == 25
    refused = sum(each["refused"] for each in tenants.values())
    assert refused == found["as given"]["failed"]["concurrency_limit_exceeded"] > 3
    assert sum(each["requests"] for each in tenants.values()) == found["as given"]["requests"]
    most = max(tenants, key=lambda name: tenants[name]["requests"] + tenants[name]["refused"])
    for text in (table, written):
        assert f"{most}: answered, refused" in text
        assert "5 further tenants: answered, refused" in text


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("tenants=2,concurrent=1/2/3", "3 amounts for 2 tenants"),
        ("tenants=2,burst=1.5", "burst cannot be 1.5"),
        ("requests_per_second=-1", "requests_per_second cannot be -1"),
        ("tokens_per_minute=many", "tokens_per_minute cannot be"),
        ("queue_policy=luck", "luck"),
        ("queue_timeout_secs=0", "queue_timeout_secs"),
        ("greedy=0", "greedy"),
    ],
)
def test_impossible_limits_are_refused(what: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        changed(Settings(), what)


def test_amounts_are_multiplied_one_by_one() -> None:
    found = changed(changed(Settings(), "tenants=2,tokens_per_minute=600/0"), "tokens_per_minute=2x")
    assert found.tokens_per_minute == (1200.0, 0.0)
