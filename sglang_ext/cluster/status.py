"""``sglang-ext cluster-status``: the instances of a cluster, as a router sees them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_ext.cluster.router_client import RouterAddress
from sglang_ext.errors import SglangExtError
from sglang_ext.flags import flag
from sglang_ext.protocol.cluster import Cluster, InstanceView, RolesView

PROG = "sglang-ext cluster-status"
AWAITED = "awaited"
"""Shown for an instance that takes requests before its snapshot has arrived."""
STYLES: Mapping[str, str] = {
    "ready": "green",
    AWAITED: "yellow",
    "suspect": "yellow",
    "draining": "yellow",
    "down": "bold red",
    "unfit": "red",
}
WIDE = 250
NOBODY_SERVES = 3
"""Exit status when no request can be served now."""
SOME_AWAITED = 4
"""Exit status when requests are served, but some instance's snapshot has not arrived: it is not ready."""


@dataclass(frozen=True, kw_only=True)
class Arguments(RouterAddress):
    """Flags of ``sglang-ext cluster-status``."""

    prog = PROG
    description = "Show the instances of a cluster as one of its routers sees them."

    json: bool = flag(False, "Print everything as one JSON object.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Show it. Returns the exit status: 0, 1 when the router cannot be reached, 3 when no request can be
    served, 4 while the snapshot of some instance is awaited."""
    try:
        given = Arguments.parse(
            arguments,
            epilog=f"Exit status: 0, 1 when the router cannot be asked, {NOBODY_SERVES} when no request can "
            f"be served now, {SOME_AWAITED} while it is not known yet what some instance holds.",
        )
        seen = given.client().call("GET", "/cluster", Cluster)
    except SglangExtError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    if given.json:
        sys.stdout.write(msgspec.json.encode(seen).decode() + "\n")
    else:
        # In a file or a pipe nothing is cut off.
        show(seen, Console(width=None if sys.stdout.isatty() else WIDE))
    if seen.unusable:
        return NOBODY_SERVES
    return SOME_AWAITED if any(view.awaited for view in seen.instances) else 0


def styled_state(view: InstanceView) -> str:
    """An instance's state, as markup of `rich`."""
    state = AWAITED if view.awaited and view.state == "ready" else view.state
    style = STYLES.get(state, "dim")
    return f"[{style}]{escape(state)}[/{style}]"


def show(seen: Cluster, console: Console) -> None:
    """Print it for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("instance", "role", "state", "running", "waiting tokens", "cached tokens", "heard", "url"):
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for view in seen.instances:
        table.add_row(
            escape(view.instance),
            view.role,
            styled_state(view),
            str(view.in_flight),
            str(view.queued_tokens),
            str(view.cached_tokens) if view.trusted else f"{view.cached_tokens}?",
            "never" if view.last_seen_s is None else f"{view.last_seen_s:.1f} s ago",
            escape(view.url),
        )
    console.print(table)
    for line in notes(seen):
        console.print(escape(line))


_NUMBERS = frozenset({"running", "waiting tokens", "cached tokens", "heard"})


def notes(seen: Cluster) -> list[str]:
    """Remarks that the table has no column for."""
    lines = [f"{view.instance}: {view.why}" for view in seen.instances if view.state not in ("ready", "left")]
    lines += [
        f"{view.instance}: takes requests; its snapshot is not in yet, so only part of its blocks is known"
        for view in seen.instances
        if view.awaited
    ]
    lines += [_drain_note(view) for view in seen.instances if view.draining and view.state == "draining"]
    lines += [each.why for each in seen.incompatible]
    if seen.roles is not None:
        lines += _role_notes(seen.roles)
    if seen.store.kind != "embedded":
        state = "shared through" if seen.store.connected else f"cut off for {seen.store.since_s:.0f} s from"
        why = f" ({seen.store.error})" if seen.store.error else ""
        lines.append(f"membership is {state} {seen.store.address}{why}, {len(seen.routers)} routers")
    if seen.unusable:
        lines.append(f"no request can be served: {seen.unusable}")
    return lines


def _role_notes(roles: RolesView) -> list[str]:
    expected = ", ".join(f"{split} {seconds:.2f} s" for split, seconds in roles.expected_s.items())
    line = f"role controller ({roles.mode}): "
    if roles.wish:
        line += f"wishes one more {roles.wish}, in {roles.due_s or 0.0:.0f} s: {roles.why}"
    else:
        line += roles.why
    lines = [line + (f" (expected: {expected})" if expected else "")]
    if why := roles.said or roles.idle:
        lines.append(f"role controller: changes nothing: {why}")
    for change in roles.changes:
        text = f": {change.text}" if change.text else ""
        lines.append(
            f"{change.ago_s:.0f} s ago: {change.instance} to {change.role} ({change.why}), {change.outcome} "
            f"after {change.took_s:.1f} s{text}"
        )
    return lines


def _drain_note(view: InstanceView) -> str:
    running = view.in_flight + sum(other.in_flight for other in view.elsewhere)
    left = view.draining.deadline_s if view.draining else 0.0
    return f"{view.instance} goes when {running} requests have ended, in {left:.0f} s at the latest"


if __name__ == "__main__":
    raise SystemExit(main())
