"""``sglang-ext drain``: let an instance finish what it has, and go."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from sglang_ext.cluster.router_client import RouterClient, add_router_args, quoted, router_of
from sglang_ext.errors import SglangExtError
from sglang_ext.protocol.cluster import Drain, InstanceView, instance_path

PROG = "sglang-ext drain"
POLL_S = 0.5
NOT_FINISHED = 3
"""Exit status when requests were still running at the deadline."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Drain. Returns the exit status: 0, 1 when it cannot be asked for, 3 when time was over."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Give an instance no new requests, and wait until it has finished those that it has. It "
        "can then be stopped without losing a request. It comes back when it is started anew, or by "
        "--cancel.",
        epilog=f"Exit status: 0, 1 when it cannot be asked for, {NOT_FINISHED} when requests were still "
        "running at the deadline.",
    )
    add_router_args(parser)
    parser.add_argument("instance", help="its id or its URL, as sglang-ext cluster-status shows them")
    parser.add_argument(
        "--deadline-secs",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="wait no longer; running requests are not cut (default: %(default)s)",
    )
    parser.add_argument("--cancel", action="store_true", help="take a drain back")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the end")
    args = parser.parse_args(arguments)
    try:
        return drain(router_of(args), args)
    except SglangExtError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1


def drain(router: RouterClient, args: argparse.Namespace) -> int:
    """Ask for it and wait. Returns the exit status."""
    wish = Drain(deadline_s=args.deadline_secs, cancel=args.cancel)
    name = quoted(args.instance)
    view = router.call("POST", instance_path(name, "drain"), InstanceView, wish)
    shown = ""
    while not (args.no_wait or args.cancel or is_over(view)):
        text = f"{view.instance}: {running(view)} requests running"
        if text != shown:
            sys.stderr.write(text + "\n")
        shown = text
        time.sleep(POLL_S)
        view = router.call("GET", instance_path(name), InstanceView)
    sys.stdout.write(f"{view.instance} is {view.state}: {view.why}\n")
    return NOT_FINISHED if is_over(view) and running(view) and not args.cancel else 0


def is_over(view: InstanceView) -> bool:
    """Whether no router sends it anything or waits for it."""
    return all(state == "left" for state in (view.state, *(other.state for other in view.elsewhere)))


def running(view: InstanceView) -> int:
    """Requests of all routers that it has."""
    return view.in_flight + sum(other.in_flight for other in view.elsewhere)


if __name__ == "__main__":
    raise SystemExit(main())
