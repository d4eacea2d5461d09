"""Settings of a local cluster: one frozen dataclass, whose fields are the flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_ext.errors import ConfigError
from sglang_ext.flags import PORT, REQUIRED, SECONDS, WORDS, Flagged, flag, list_flag, parse_words
from sglang_ext.flags.removed import CLUSTER

OURS = ("--model-path", "--model", "--host", "--port", "--api-key")
"""Flags of a server that the cluster sets itself, and the key that others would see."""
ROUTERS = (
    *("--worker-urls", "--host", "--port", "--policy"),
    *("--listen-fds", "--member-port", "--standby-fd"),
)
"""Flags of the router that the cluster sets itself."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Flagged):
    """A cluster of SGLang servers on this machine, with its router.

    Raises:
        ConfigError: from the constructor, when a value cannot work; names the flag.
    """

    prog = "sglang-ext cluster"
    description = (
        "Run SGLang servers and the router on this machine; Ctrl-C ends all of it. The SGLang flags after -- "
        "are for every server; --radix-cache-backend global is set unless you choose another cache."
    )

    lists = (list_flag("--time-limits", "How long parts of the cluster may take."),)
    removed = CLUSTER

    model_path: str = flag(
        REQUIRED,
        "The model, as for python -m sglang.launch_server.",
        aliases=("--model",),
        metavar="MODEL",
        common=True,
    )
    colocated: int = flag(
        1, "Servers that both prefill and decode.", shown="1, without --prefill and --decode", common=True
    )
    prefill: int = flag(0, "Servers that only prefill; needs --decode.", common=True)
    decode: int = flag(0, "Servers that only decode; their KV comes from those that prefill.", common=True)
    fixed_roles: bool = flag(
        False,
        "Start servers that cannot change between prefill and decode. They can otherwise, unless a flag of "
        "SGLang's does not go with that.",
    )
    host: str = flag(
        "127.0.0.1",
        "The address of the router; beyond loopback it needs --router-args '--api-key-file F'.",
        common=True,
    )
    port: int = flag(
        30000,
        "The port of the router, 0 for a free one. The servers take free ports after it, on loopback.",
        PORT,
        common=True,
    )
    routers: int = flag(
        1,
        "Routers on that port, each on a core of its own. With --restart, the others go on while a dead one "
        "starts again.",
        common=True,
    )
    policy: str = flag("auto", "How the router chooses a server; see sglang-ext router --help.", common=True)
    ray: str | None = flag(
        None,
        "Place servers and routers on the Ray cluster at this address (HOST:PORT, or auto) instead of this "
        "machine; needs pip install 'ray>=2.40' on every node.",
        metavar="ADDRESS",
    )
    server_args: tuple[str, ...] = ()
    """SGLang flags for every server."""
    instance_args: Mapping[int, tuple[str, ...]] = flag(
        None,
        "SGLang flags for server I alone, counted from 0, such as '1: --max-total-tokens 2000'; they win "
        "over those for every server. May be repeated.",
        metavar="I:FLAGS",
        several="append",
        collect=lambda given: parse_instance_args(given),
        factory=lambda: MappingProxyType({}),
    )
    router_args: tuple[str, ...] = flag((), "More flags for the router, in one argument.", WORDS, common=True)
    log_dir: Path | None = flag(
        None, "The folder for the logs; by default a temporary folder, removed on a clean end.", common=True
    )
    restart: int | None = flag(
        None,
        "Times that a part which died is started again before the cluster gives up; a second router stands "
        "by to take over at once. By default a router that has served is started again, 5 times, and none "
        "stands by.",
        common=True,
    )
    start_timeout_secs: float = flag(
        600.0,
        "The time that a part may take to become ready.",
        SECONDS.positive(),
        within="--time-limits",
        key="start",
    )
    stop_timeout_secs: float = flag(
        15.0,
        "The time that a part may take to end before it is killed.",
        SECONDS.positive(),
        within="--time-limits",
        key="stop",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_path:
            raise ConfigError("is empty", field="--model-path", hint="Give the folder of a model")
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError(
                "neither serves without the other",
                field="--prefill, --decode",
                hint="Give both, or --colocated",
            )
        if self.servers < 1:
            raise ConfigError(
                f"{self.servers} servers make no cluster", field="--colocated", hint="Give 1 or more"
            )
        if self.routers < 1:
            raise ConfigError(
                f"{self.routers} routers serve no client", field="--routers", hint="Give 1 or more"
            )
        for index in self.instance_args:
            if not 0 <= index < self.servers:
                raise ConfigError(
                    f"there is no server {index}",
                    field="--instance-args",
                    hint=f"There are {self.servers}: 0 to {self.servers - 1}",
                )
        for where, arguments in [("after --", self.server_args)] + [
            (f"in --instance-args {index}:", given) for index, given in self.instance_args.items()
        ]:
            _refuse(arguments, OURS, where)
        _refuse(self.router_args, ROUTERS, "in --router-args")

    @classmethod
    def given(cls, args: argparse.Namespace) -> dict[str, Any]:
        """As of every flag; servers that only prefill or decode replace the default server of both roles."""
        found = super().given(args)
        if found.get("prefill") or found.get("decode"):
            found.setdefault("colocated", 0)
        return found

    @property
    def servers(self) -> int:
        """How many there are: first those that do both, then those that prefill, then those that decode."""
        return self.colocated + self.prefill + self.decode

    @property
    def ports(self) -> int:
        """Ports that are chosen for the servers: one each, one more for each that prefills or decodes, and
        one each at which its ranks meet."""
        return 2 * self.servers + self.prefill + self.decode

    def role_of(self, index: int) -> tuple[str, int]:
        """The role of server ``index`` (colocated, prefill or decode), and its number within the role."""
        for role in ("colocated", "prefill"):
            if index < getattr(self, role):
                return role, index
            index -= getattr(self, role)
        return "decode", index

    def flags_of(self, index: int) -> tuple[str, ...]:
        """The SGLang flags of server ``index``, those that win last."""
        return (*self.server_args, *self.instance_args.get(index, ()))


def _refuse(arguments: Sequence[str], taken: Sequence[str], where: str) -> None:
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in taken:
            raise ConfigError(
                f"{name} cannot be given {where}",
                field=name,
                hint="Others would see it: give --api-key-file FILE, which its router reads too"
                if name == "--api-key"
                else "The cluster sets it: see sglang-ext cluster --help",
            )


def flag_value(arguments: Sequence[str], *names: str) -> str | None:
    """The last value given for a flag under any of its names, or None; a switch has the value ""."""
    found = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            after = arguments[position + 1] if position + 1 < len(arguments) else "--"
            found = value if equals else ("" if after.startswith("--") else after)
    return found


def parse_instance_args(given: Sequence[str]) -> Mapping[int, tuple[str, ...]]:
    """``I:FLAGS`` entries by server number; entries of one server add up.

    Raises:
        ConfigError: an entry has no number before a colon.
    """
    found: dict[int, tuple[str, ...]] = {}
    for text in given:
        number, colon, flags = text.partition(":")
        if not colon or not number.strip().isdecimal():
            raise ConfigError(
                f"{text!r} does not start with a server's number and a colon",
                field="--instance-args",
                hint="Write it like '1: --max-total-tokens 2000'; the servers count from 0",
            )
        index = int(number)
        try:
            found[index] = (*found.get(index, ()), *parse_words(flags))
        except ValueError as error:
            raise ConfigError(str(error), field="--instance-args") from None
    return MappingProxyType(found)
