"""What the user can set for a local cluster: one frozen dataclass, and the flags that fill it."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_ext.errors import ConfigError

OURS = ("--model-path", "--model", "--host", "--port", "--api-key")
"""Flags of a server that the cluster sets itself, and the key that others would see."""
ROUTERS = (
    *("--worker-urls", "--host", "--port", "--policy"),
    *("--listen-fds", "--member-port", "--standby-fd"),
)
"""Flags of the router that the cluster sets itself."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster of SGLang servers on this machine, with its router. Field names are the flags' names.

    Raises:
        ConfigError: from the constructor, when a value cannot work; names the flag.
    """

    model_path: str
    colocated: int = 1
    """Servers that both prefill and decode."""
    prefill: int = 0
    decode: int = 0
    """Servers that do one of the two; the router sends each request to one of each."""
    host: str = "127.0.0.1"
    port: int = 30000
    """The router's. The servers listen on loopback, on the free ports after it."""
    policy: str = "auto"
    server_args: tuple[str, ...] = ()
    """SGLang flags for every server."""
    instance_args: Mapping[int, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """SGLang flags for single servers, by number from 0; they win over ``server_args``."""
    router_args: tuple[str, ...] = ()
    log_dir: Path | None = None
    restart: int = 0
    """Times that a part which died is started again before the cluster gives up. With it, a second router
    stands by for the first."""
    start_timeout_secs: float = 600.0
    stop_timeout_secs: float = 15.0

    def __post_init__(self) -> None:
        if not self.model_path:
            raise ConfigError("is empty", field="--model-path", hint="Give the folder of a model")
        for name in ("colocated", "prefill", "decode"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{getattr(self, name)} is negative", field=f"--{name}")
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
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"{self.port} is not a port", field="--port", hint="Give 0 (free) to 65535")
        if self.restart < 0:
            raise ConfigError(f"{self.restart} is negative", field="--restart")
        for name in ("start_timeout_secs", "stop_timeout_secs"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{getattr(self, name)} is not greater than 0", field="--" + name.replace("_", "-")
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

    @property
    def servers(self) -> int:
        """How many there are: first those that do both, then those that prefill, then those that decode."""
        return self.colocated + self.prefill + self.decode

    @property
    def ports(self) -> int:
        """Ports that the servers need: one each, one more for each that prefills, and one each for the
        rendezvous of its ranks."""
        return 2 * self.servers + self.prefill

    def role_of(self, index: int) -> tuple[str, int]:
        """What server ``index`` does (colocated, prefill or decode), and its number among those."""
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


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field but ``server_args``."""
    defaults = {f.name: f.default for f in dataclasses.fields(ClusterConfig)}

    def flag(name: str, kind: Any, text: str, **more: Any) -> None:
        default = defaults[name]
        text += f" (default: {default})" if default not in (None, ()) else ""
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, help=text, **more)

    parser.add_argument(
        "--model-path", "--model", required=True, help="the model, as for python -m sglang.launch_server"
    )
    parser.add_argument(
        "--colocated",
        type=int,
        metavar="N",
        help="servers that both prefill and decode (default: 1, without --prefill and --decode)",
    )
    flag("prefill", int, "servers that only prefill; needs --decode", metavar="N")
    flag("decode", int, "servers that only decode; their KV comes from those that prefill", metavar="N")
    flag("host", str, "address of the router; beyond loopback it needs --router-args '--api-key-file F'")
    flag("port", int, "port of the router, 0 for a free one; the servers take free ports after it")
    flag("policy", str, "how the router chooses a server; see python -m sglang_ext.router --help")
    parser.add_argument(
        "--instance-args",
        action="append",
        default=[],
        metavar="I:FLAGS",
        help="SGLang flags for server I alone, counted from 0, such as '1: --max-total-tokens 2000'; "
        "may be repeated",
    )
    parser.add_argument(
        "--router-args", default="", metavar="FLAGS", help="more flags for the router, in one argument"
    )
    flag("log_dir", Path, "folder for the logs; by default a temporary one that a clean end removes")
    flag(
        "restart",
        int,
        "times that a part which died is started again; a second router stands by to take over at once",
        metavar="N",
    )
    flag("start_timeout_secs", float, "seconds that a part may take to become ready", metavar="SECONDS")
    flag(
        "stop_timeout_secs",
        float,
        "seconds that a part may take to end before it is killed",
        metavar="SECONDS",
    )


def from_cli_args(args: argparse.Namespace, server_args: Sequence[str]) -> ClusterConfig:
    """The configuration that parsed flags stand for; other attributes of ``args`` are ignored.

    Args:
        args: parsed by a parser that ``add_cli_args`` was given.
        server_args: SGLang flags for every server.

    Raises:
        ConfigError: a value cannot work; the message names the flag.
    """
    values: dict[str, Any] = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(ClusterConfig)}
    if values["colocated"] is None:
        values["colocated"] = 0 if values["prefill"] or values["decode"] else 1
    values["server_args"] = tuple(server_args)
    values["router_args"] = split_flags(args.router_args, "--router-args")
    values["instance_args"] = parse_instance_args(args.instance_args)
    return ClusterConfig(**values)


def split_flags(text: str, flag: str) -> tuple[str, ...]:
    """Words of a command line, as a shell would split them.

    Raises:
        ConfigError: a quotation mark is open; names ``flag``.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{text!r} cannot be split into flags: {error}", field=flag) from None


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
        found[index] = (*found.get(index, ()), *split_flags(flags, "--instance-args"))
    return MappingProxyType(found)
