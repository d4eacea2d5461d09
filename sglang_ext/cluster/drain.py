"""``sglang-ext drain``: let an instance finish its requests, and leave."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.cluster.router_client import RouterAddress, RouterClient, quoted
from sglang_ext.errors import SglangExtError
from sglang_ext.flags import REQUIRED, SECONDS, flag
from sglang_ext.protocol.cluster import Drain, InstanceView, instance_path

PROG = "sglang-ext drain"
POLL_S = 0.5
NOT_FINISHED = 3
"""Exit status when requests were still running at the deadline."""


@dataclass(frozen=True, kw_only=True)
class Arguments(RouterAddress):
    """Flags of ``sglang-ext drain``."""

    prog = PROG
    description = (
        "Give an instance no new requests, and wait until it has finished those that it has. It can then be "
        "stopped without losing a request. It comes back when it is started anew, or by --cancel."
    )

    instance: str = flag(
        REQUIRED, "Its id or its URL, as sglang-ext cluster-status shows them.", positional=True
    )
    deadline_secs: float = flag(600.0, "Wait no longer; running requests are not cut.", SECONDS)
    cancel: bool = flag(False, "Take a drain back.")
    no_wait: bool = flag(False, "Do not wait for the end.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Drain. Returns the exit status: 0, 1 when it cannot be asked for, 3 when time was over."""
    try:
        given = Arguments.parse(
            arguments,
            epilog=f"Exit status: 0, 1 when it cannot be asked for, {NOT_FINISHED} when requests were still "
            "running at the deadline.",
        )
        return drain(given.client(), given)
    except SglangExtError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1


def drain(router: RouterClient, given: Arguments) -> int:
    """Ask for it and wait. Returns the exit status."""
    wish = Drain(deadline_s=given.deadline_secs, cancel=given.cancel)
    name = quoted(given.instance)
    view = router.call("POST", instance_path(name, "drain"), InstanceView, wish)
    shown = ""
    while not (given.no_wait or given.cancel or is_over(view)):
        text = f"{view.instance}: {running(view)} requests running"
        if text != shown:
            sys.stderr.write(text + "\n")
        shown = text
        time.sleep(POLL_S)
        view = router.call("GET", instance_path(name), InstanceView)
    sys.stdout.write(f"{view.instance} is {view.state}: {view.why}\n")
    return NOT_FINISHED if is_over(view) and running(view) and not given.cancel else 0


def is_over(view: InstanceView) -> bool:
    """Whether no router sends it anything or waits for it."""
    return all(state == "left" for state in (view.state, *(other.state for other in view.elsewhere)))


def running(view: InstanceView) -> int:
    """Requests of all routers that it has."""
    return view.in_flight + sum(other.in_flight for other in view.elsewhere)


if __name__ == "__main__":
    raise SystemExit(main())
