"""``sglang-ext role``: have an instance prefill instead of decode, or the other way round."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.cluster.router_client import RouterAddress, RouterClient, quoted
from sglang_ext.errors import SglangExtError
from sglang_ext.flags import REQUIRED, flag
from sglang_ext.protocol.cluster import ChangeRole, InstanceView, RoleName, instance_path

PROG = "sglang-ext role"
TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Arguments(RouterAddress):
    """Flags of ``sglang-ext role``."""

    prog = PROG
    description = (
        "Have an instance prefill instead of decode, or the other way round. It finishes its requests, or "
        "hands them to others, keeps its cache, and serves in its new role. Servers of sglang-ext cluster "
        "can, others must have been started with --enable-pd-role-switch and a "
        "--disaggregation-bootstrap-port of their own."
    )

    instance: str = flag(
        REQUIRED, "Its id or its URL, as sglang-ext cluster-status shows them.", positional=True
    )
    role: RoleName = flag(REQUIRED, "The new role.", positional=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Change a role. Returns the exit status: 0, or 1 when the instance does not serve in it."""
    try:
        given = Arguments.parse(arguments)
        return change(given.client(), given.instance, given.role)
    except SglangExtError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1


def change(router: RouterClient, instance: str, role: RoleName) -> int:
    """Ask for it and wait. Returns the exit status."""
    path = instance_path(quoted(instance), "role")
    view = router.call("POST", path, InstanceView, ChangeRole(role=role), timeout_s=TIMEOUT_S)
    sys.stdout.write(f"{view.instance} is {view.role}, {view.state}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
