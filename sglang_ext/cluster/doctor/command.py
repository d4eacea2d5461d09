"""The command line of ``sglang-ext doctor``, which chooses between machine, disk, peer and model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_ext.addresses import bracketed, is_loopback, listen_host, split_port
from sglang_ext.cluster.doctor.findings import Finding, Level, as_json, problems, show
from sglang_ext.cluster.doctor.peer_messages import MOST_NAMED
from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.config import parse_host, parse_ports
from sglang_ext.errors import ConfigError
from sglang_ext.flags import PATH, SECONDS, Flagged, Parser, flag, one_of
from sglang_ext.flags.removed import DOCTOR

PROG = "sglang-ext doctor"
MODEL = "--model-path"
HELP = frozenset({"-h", "--help"})
PORT = 30900
"""Port on which a doctor listens for another."""


def parse_address(text: str) -> str:
    """HOST, HOST:PORT or :PORT, with the port filled in.

    Raises:
        ValueError: when it is none.
    """
    host, port = split_port(text)
    port = port or str(PORT)
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} has no port of 1 to 65535")
    return f"{bracketed(parse_host(host)) if host else ''}:{port}"


def parse_port_list(text: str) -> tuple[int, ...]:
    """Ports with commas between them.

    Raises:
        ValueError: one is none, or they are too many.
    """
    ports = text.split(",")
    if len(ports) > MOST_NAMED or not all(port.isdecimal() and 0 < int(port) < 65536 for port in ports):
        raise ValueError(f"{text!r} is not of the form 30000,8998, with {MOST_NAMED} ports at most")
    return tuple(dict.fromkeys(map(int, ports)))


def parse_reach(text: str) -> tuple[str, ...]:
    """Addresses, ``HOST:PORT``, with commas between them.

    Raises:
        ValueError: one is none, or they are too many.
    """
    places = [split_port(address) for address in text.split(",")]
    good = all(host and port.isdecimal() and 0 < int(port) < 65536 for host, port in places)
    if len(places) > MOST_NAMED or not good:
        raise ValueError(f"{text!r} is not of the form redis:6379,router:30000, with {MOST_NAMED} at most")
    return tuple(f"{bracketed(parse_host(host))}:{port}" for host, port in places)


@dataclass(frozen=True, kw_only=True)
class Arguments(Flagged):
    """Flags of ``sglang-ext doctor``."""

    prog = PROG
    description = (
        "Check this machine and installation, or with --kv-disk-path the directory of a disk tier, or with "
        "--peer the way to another machine, or with --model-path whether a server of a model can start, and "
        "say what is wrong and what to do. The exit status is 0 when all is well, 1 when there are problems."
    )

    removed = DOCTOR

    model_path: str | None = flag(
        None,
        "Say instead whether a server of this model with these flags starts, and which features it has, "
        "by its config.json alone. All other flags, --json aside, are those of sglang-ext serve.",
        Parser(str, "MODEL"),
    )
    kv_disk_path: Path | None = flag(
        None,
        "Look at this directory instead: room, speed (writes up to 256 MiB and removes them), and whether "
        "index and segments fit together.",
    )
    verify: str = flag(
        "index",
        "How thoroughly the directory is checked: index (quickly), deep (everything is read and every "
        "checksum verified; takes as long as reading all of it), or repair (as deep, and the index is "
        "rebuilt from the segments if something is wrong; only while no server uses the directory).",
        one_of("index", "deep", "repair"),
    )
    peer: str | None = flag(
        None,
        "Test the way to another machine and back, on which a doctor listens: address, ports, cluster key, "
        "clocks, bandwidth, and the transport by which KV would travel.",
        Parser(parse_address, f"HOST[:{PORT}]").where(lambda at: not at.startswith(":"), "names no host"),
    )
    listen: str | None = flag(
        None,
        "Listen for a doctor with --peer, on every address with --cluster-key-file, else on loopback.",
        Parser(parse_address, f"HOST:{PORT}"),
        bare=f":{PORT}",
    )
    listen_secs: float = flag(
        600.0,
        "For how long to listen.",
        SECONDS.where(lambda s: 0 < s <= 86400, "is not within a day"),
        within="--listen",
        key="for",
    )
    kv_ports: str | None = flag(
        None,
        "With --peer or --listen: the ports of servers here. Each free one is tried. By default, any "
        "free port.",
        Parser(parse_ports, "FIRST-LAST"),
    )
    service_ports: tuple[int, ...] = flag(
        (),
        "With --peer or --listen: other ports here that the other machine has to reach: --port (HTTP), "
        "--disaggregation-bootstrap-port. For a port in use, the doctor tests whether it takes a connection.",
        Parser(parse_port_list, "PORT,..."),
    )
    reach: tuple[str, ...] = flag(
        (),
        "With --peer: addresses to which both machines have to connect, such as Redis and routers.",
        Parser(parse_reach, "HOST:PORT,..."),
    )
    kv_announce_host: str | None = flag(
        None,
        "With --peer or --listen: the address that servers here announce. By default, the address that they "
        "would find with --host 0.0.0.0.",
        Parser(parse_host, "HOST"),
    )
    cluster_key_file: str | None = flag(
        None,
        "With --peer or --listen: the file with the key of the cluster, needed beyond loopback. It does not "
        "travel.",
        PATH,
    )
    json: bool = flag(False, "Print one JSON object instead of text.")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0 when all is well, 1 when there are problems, 2 for a wrong flag."""
    known = Arguments.parser(
        allow_abbrev=False, epilog="example: sglang-ext doctor --kv-disk-path /data/kv --verify repair"
    )
    if not HELP.intersection(arguments) and any(word.split("=")[0] == MODEL for word in arguments):
        from sglang_ext.patches import model_check

        answer = model_check.findings([word for word in arguments if word != "--json"])
        found = [Finding(Level(level), *rest) for level, *rest in answer]
        args = Arguments(json="--json" in arguments)
        return _report(args, found, {}, "would stop this server", "This server can start.")
    args = Arguments.from_cli_args(known.parse_args(arguments))
    if args.peer is not None or args.listen is not None:
        if args.kv_disk_path is not None or None not in (args.peer, args.listen):
            known.error("--kv-disk-path, --peer and --listen exclude each other")
        try:
            return _meet(args)
        except ConfigError as error:
            known.error(str(error))
    if args.kv_disk_path is None:
        if args.verify != "index":
            known.error("--verify needs --kv-disk-path")
        from sglang_ext.cluster.doctor.machine import findings, gather

        return _report(args, findings(gather()), {}, "would stop a start", "Servers can start here.")
    from sglang_ext.cluster.doctor import disk

    console = Console(stderr=True)
    facts = disk.gather(
        args.kv_disk_path,
        repair=args.verify == "repair",
        deep=args.verify == "deep",
        doing=lambda text: console.status(f"{text} ..."),
    )
    found = disk.findings(facts)
    figures = {"disk": disk.as_json(facts)}
    return _report(args, found, figures, "with this directory", "The directory can be used.")


def _meet(args: Arguments) -> int:
    from sglang_ext.cluster.doctor import peer, peer_ends
    from sglang_ext.cluster.doctor.peer_station import Own

    keyed = args.cluster_key_file is not None
    if args.kv_announce_host is not None and not keyed and not is_loopback(args.kv_announce_host):
        raise ConfigError(
            f"without a key, no peer is answered at {args.kv_announce_host}",
            field="--kv-announce-host",
            hint="Give --cluster-key-file",
        )
    key = read_cluster_key(args.cluster_key_file) if args.cluster_key_file is not None else None
    own = Own(
        key=key,
        kv_ports=args.kv_ports,
        announce=args.kv_announce_host,
        services=args.service_ports,
        reach=args.reach,
    )
    host, port = split_port(args.peer or args.listen or "")
    if args.peer is not None:
        seen = peer_ends.call(host, int(port), own)
        return _report(
            args,
            peer.findings(seen),
            {"peer": peer.as_json(seen)},
            f"between here and {args.peer}",
            f"Servers here and at {host} can work together.",
        )
    if host and not is_loopback(host) and not keyed:
        raise ConfigError(
            f"will not listen on {host} without a key", field="--listen", hint="Give --cluster-key-file"
        )
    console = Console(stderr=True)
    peer_ends.listen(
        listen_host(host, keyed=keyed),
        int(port),
        own,
        args.listen_secs,
        lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    return 0


def _report(args: Arguments, found: Sequence[Finding], figures: dict[str, Any], wrong: str, well: str) -> int:
    count = problems(found)
    if args.json:
        sys.stdout.write(
            json.dumps({"problems": count, "findings": as_json(found), **figures}, indent=2, default=str)
            + "\n"
        )
    else:
        console = Console()
        show(found, console)
        console.print(f"{count} problems {wrong}." if count else well)
    return 1 if count else 0
