"""``sglang-ext top``: a cluster in a terminal, live, as one of its routers sees it.

`view` renders two readings of ``/cluster`` and ``/metrics``, and is a pure function; rates are differences
between the two.
"""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sglang_ext.cluster.router_client import RouterAddress, RouterClient
from sglang_ext.cluster.status import WIDE, notes, styled_state
from sglang_ext.errors import PeerError, SglangExtError
from sglang_ext.flags import SECONDS, flag
from sglang_ext.flags.removed import ROUTER_ADDRESS, TOP
from sglang_ext.protocol.cluster import Cluster, InstanceView, TierFill
from sglang_ext.protocol.metrics import metric_name

PROG = "sglang-ext top"
BAR = 10
"""Characters of a tier's bar."""
MOST_PAIRS = 12
"""Pairs of instances whose transfers are shown, the busiest first."""

Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True)
class Seen:
    """One reading of a router. at: seconds, monotonic. samples: of its metrics, by name."""

    at: float
    cluster: Cluster
    samples: Mapping[str, Sequence[Sample]]

    def total(self, name: str, **labels: str) -> float:
        """The sum over a router's metric's samples with these labels; 0 where there is none."""
        return sum(
            value
            for has, value in self.samples.get(metric_name("router", name), ())
            if labels.items() <= has.items()
        )

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums by the values of some labels."""
        found: dict[tuple[str, ...], float] = {}
        for has, value in self.samples.get(metric_name("router", name), ()):
            key = tuple(has.get(label, "") for label in labels)
            found[key] = found.get(key, 0.0) + value
        return found


def read_metrics(text: str) -> dict[str, list[Sample]]:
    """The samples of a page of metrics, by name.

    Raises:
        PeerError: it is none.
    """
    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise PeerError(f"/metrics is not a page of metrics: {error}") from None
    return found


def look(router: RouterClient, now: Callable[[], float] = time.monotonic) -> Seen:
    """Read a router.

    Raises:
        UserError: it refuses; the key is wrong, say.
        PeerError: it cannot be reached, or is no router.
    """
    cluster = router.call("GET", "/cluster", Cluster)
    return Seen(now(), cluster, read_metrics(router.read("GET", "/metrics").decode("utf-8", "replace")))


# -- rendering ------------------------------------------------------------------------------------------


def view(seen: Seen, before: Seen | None = None) -> RenderableType:
    """The rendered page. before: an earlier reading; without one, counts are since the router's start."""
    parts: list[RenderableType] = [Text.from_markup(_headline(seen, before)), "", _instances(seen), ""]
    parts += [Text.from_markup(line) for line in (_hits(seen, before), _hints(seen))]
    transfers = _transfers(seen, before)
    if transfers is not None:
        parts += ["", transfers]
    lines = notes(seen.cluster)
    if lines:
        parts += ["", *(Text(line, style="yellow") for line in lines)]
    return Group(*parts)


def _rate(seen: Seen, before: Seen | None, name: str, **labels: str) -> str:
    """How fast a count grows, or how far it is; a router that was started anew counts from 0 again."""
    count = seen.total(name, **labels)
    if before is None or count < before.total(name, **labels):
        return f"{count:,.0f} in all"
    return f"{(count - before.total(name, **labels)) / max(seen.at - before.at, 1e-6):,.1f}/s"


def _headline(seen: Seen, before: Seen | None) -> str:
    ready = sum(each.usable for each in seen.cluster.instances)
    return (
        f"[bold]{escape(seen.cluster.router)}[/]  {ready} of {len(seen.cluster.instances)} instances usable"
        f"  requests {_rate(seen, before, 'decisions_total')}"
        f"  in flight {sum(each.in_flight for each in seen.cluster.instances)}"
        f"  queue {seen.total('queue_waiting'):.0f}"
    )


def _instances(seen: Seen) -> Table:
    tiers = list(dict.fromkeys(tier for each in seen.cluster.instances for tier in each.tiers))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("instance", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in tiers:
        table.add_column(name, no_wrap=True)
    for each in seen.cluster.instances:
        table.add_row(
            escape(each.instance),
            each.role,
            styled_state(each),
            str(each.in_flight),
            str(each.queued_tokens),
            *(_bar(each, tier) for tier in tiers),
        )
    return table


def _bar(each: InstanceView, tier: str) -> str:
    fill = each.tiers.get(tier, TierFill(used=0, size=0))
    if not fill.size:
        return "[dim]-[/]"
    share = min(1.0, fill.used / fill.size)
    full = round(share * BAR)
    return f"[cyan]{'█' * full}[/][dim]{'░' * (BAR - full)}[/] {share:4.0%}"


def _hits(seen: Seen, before: Seen | None) -> str:
    """The share of prompt tokens that each tier had, between the two readings, or since the start."""
    asked = _grown(seen, before, "prompt_tokens_total")
    if not asked:
        return "hits: no prompt in this time"
    cached = _grown(seen, before, "cached_tokens_total") / asked
    tiers = [
        f"{escape(tier)} {_grown(seen, before, 'tier_tokens_total', tier=tier) / asked:.0%}"
        for (tier,) in seen.by("tier_tokens_total", "tier")
    ]
    since = "" if before is not None else " since the router's start"
    by_tier = ", ".join(tiers) or "tiers not reported"
    return f"hits: [bold]{cached:.0%}[/] of {asked:,.0f} prompt tokens{since} ({by_tier})"


def _grown(seen: Seen, before: Seen | None, name: str, **labels: str) -> float:
    now, then = seen.total(name, **labels), before.total(name, **labels) if before else 0.0
    return now - then if now >= then else now


def _hints(seen: Seen) -> str:
    when = {key[0]: count for key, count in seen.by("hints_used_total", "when").items()}
    return (
        f"hints: {seen.total('hints_total'):,.0f} in all; kept {when.get('ready', 0):,.0f} in time and "
        f"{when.get('early', 0):,.0f} before all was moved, missed {when.get('never', 0):,.0f}"
    )


def _transfers(seen: Seen, before: Seen | None) -> Table | None:
    """Tokens whose KV went from one instance to another."""
    now = seen.by("transferred_tokens_total", "source", "target")
    then = before.by("transferred_tokens_total", "source", "target") if before else {}
    if not now:
        return None
    names = {each.url: each.instance for each in seen.cluster.instances}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("KV from", "to"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "tokens/s"):
        table.add_column(name, justify="right")
    for (source, target), tokens in sorted(now.items(), key=lambda item: -item[1])[:MOST_PAIRS]:
        grown = max(0.0, tokens - then.get((source, target), 0.0))
        rate = f"{grown / max(seen.at - before.at, 1e-6):,.0f}" if before else ""
        shown = (escape(names.get(url, url)) for url in (source, target))
        table.add_row(*shown, f"{tokens:,.0f}", rate)
    return table


# -- the command ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arguments(RouterAddress):
    """Flags of ``sglang-ext top``."""

    prog = PROG
    description = (
        "Watch a cluster as one of its routers sees it: instances, how full their tiers are, hits, hints and "
        "transfers. q ends it. Where the output is no terminal that can be redrawn, it is shown once."
    )

    removed = {**ROUTER_ADDRESS, **TOP}

    interval: float = flag(1.0, "The time between two readings; 0 shows one and ends.", SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch. Returns the exit status: 0, or 1 when the router cannot be reached, or no longer."""
    try:
        given = Arguments.parse(arguments)
        router = given.client()
        seen = look(router)
        # In a file or a pipe nothing is cut off.
        console = Console(width=None if sys.stdout.isatty() else WIDE)
        # rich draws nothing anew on a terminal that cannot move its cursor (TERM=dumb).
        if given.interval == 0 or not console.is_terminal or console.is_dumb_terminal:
            console.print(view(seen))
        else:
            _watch(console, router, seen, given.interval)
    except SglangExtError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _watch(console: Console, router: RouterClient, seen: Seen, interval: float) -> None:
    """Show the cluster until the user types q."""
    with _keys() as typed, Live(view(seen), console=console, screen=True, auto_refresh=False) as live:
        while typed(interval) not in ("q", "Q"):
            before, seen = seen, look(router)
            live.update(view(seen, before), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys as they are typed: waits for a key for so many seconds at most; without a terminal, as long."""
    if not sys.stdin.isatty():
        yield _nobody_types
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield lambda seconds: sys.stdin.read(1) if select.select([keyboard], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _nobody_types(seconds: float) -> str:
    time.sleep(seconds)
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
