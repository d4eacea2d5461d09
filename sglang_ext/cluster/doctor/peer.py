"""``sglang-ext doctor --peer``: facts about the way to another machine and back, and findings from them.

``findings`` is a pure function. Caller and listener are in ``peer_ends.py``, an end's part of a server in
``peer_station.py``, its ports in ``peer_ports.py``, messages in ``peer_messages.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang_ext.cluster.doctor.findings import Finding, Level
from sglang_ext.cluster.doctor.peer_messages import End, Examined
from sglang_ext.disagg.transports import TRIED, TransportName
from sglang_ext.errors import PeerError

_SHOWN: Final = 8
"""Ranges of ports that are listed one by one."""


class Trouble(enum.Enum):
    """Kinds of errors that end a session, each with the subject of its finding and the way out."""

    NAME = "connection", "Give an address, or see to the name's entry in DNS or /etc/hosts."
    CLOSED = (
        "connection",
        "Run `sglang-ext doctor --listen` there, with the same port. If it runs, a firewall refuses this.",
    )
    UNREACHED = "connection", "See whether the address is right; a firewall on the way may drop the port."
    NOT_OURS = "connection", "Run `sglang-ext doctor --listen` on a free port there, and give that port."
    VERSION = "version", "Install the same release of sglang-ext on both machines."
    KEY = (
        "cluster key",
        "Copy the file with the key from one machine to the other; every member needs the same.",
    )
    NO_KEY = "cluster key", "Give --cluster-key-file, with the same key, to both."
    ADDRESS = "address", "Give --kv-announce-host ADDRESS at the end that says so."
    ENDED = (
        "connection",
        "See the listener's output; it ends by itself after the time of --listen. Start it again, and try "
        "once more; if it repeats, something on the way cuts connections.",
    )


class TroubleError(PeerError):
    """Ends a session."""

    def __init__(self, kind: Trouble, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Seen:
    """Facts about a peer; None for steps that were not reached.

    target: the called address. keyed: whether this end has a cluster key. rtt: seconds, the least of a few.
    ahead: seconds by which the peer's clock is ahead. ours, theirs: the two ends. here, there: findings of
    this end, and of the peer, about the way to the other. reach: addresses that both examined. trouble: the
    error that ended the session, while it was `doing`.
    """

    target: str
    keyed: bool
    doing: str = "the handshake"
    rtt: float | None = None
    ahead: float | None = None
    ours: End | None = None
    theirs: End | None = None
    here: Examined | None = None
    there: Examined | None = None
    reach: Sequence[str] = ()
    trouble: TroubleError | None = None


def findings(seen: Seen) -> list[Finding]:
    """Findings that follow from the facts, in the order in which servers would meet them."""
    addresses, moving = list[Finding](), list[Finding]()
    for place, whence, way, end, examined in (
        ("there", "from here", "from the peer", seen.theirs, seen.here),
        ("here", "from the peer", "to the peer", seen.ours, seen.there),
    ):
        if end is not None and examined is not None:
            addresses += _services(place, whence, end, examined.failed)
            addresses += _ports(place, whence, end, examined.failed)
            addresses += _reached(whence, seen.reach, examined.unreached)
            moving.append(_moving(way, examined))
    return [*_greeting(seen), *addresses, *moving, *_trouble(seen)]


def _greeting(seen: Seen) -> Iterator[Finding]:
    if seen.rtt is None:
        return
    yield Finding(Level.OK, "connection", f"{seen.target} answers in {seen.rtt * 1e3:.1f} ms")
    same = "both ends have the same" if seen.keyed else "neither end has one, which is for loopback only"
    yield Finding(Level.OK, "cluster key", same)
    if seen.ahead is not None:
        # The share of the outward way in the round trip is unknown.
        exact = seen.rtt / 2
        off = abs(seen.ahead)
        text = f"the peer's is {off:.3f} s {'ahead' if seen.ahead > 0 else 'behind'}; members allow for that"
        if off <= exact:
            text = f"alike within {exact * 1e3:.1f} ms"
        yield Finding(Level.OK, "clocks", text)


def _ports(place: str, whence: str, end: End, failed: Mapping[int, str]) -> Iterator[Finding]:
    """The announced address, and the ports of ``--kv-ports``."""
    failed = {port: why for port, why in failed.items() if port not in end.services}
    if not end.ports:
        text = f"all ports of {end.asked} {place} are in use, so none was tried"
        yield Finding(Level.WARNING, f"ports {place}", text, f"Stop the servers {place}, and test again.")
        return
    seen_as = "" if end.source == end.announced else f"; its connections come from {end.source}"
    announces = f"servers {'of the peer' if place == 'there' else 'of this machine'} announce {end.announced}"
    if len(failed) == len(end.ports):
        all_of = "all of " if len(failed) > 1 else ""
        text = f"{announces}; not reached there {whence}: {all_of}{_named(end)} ({_why(failed)}){seen_as}"
        advice = (
            f"Open {end.asked or 'all ports'} {place} for the other machine, or give --kv-announce-host "
            f"ADDRESS {place} if it is reached by another, or if something in between changes addresses."
        )
        yield Finding(Level.PROBLEM, f"address {place}", text, advice)
        return
    yield Finding(Level.OK, f"address {place}", f"{announces}, which is reached {whence}{seen_as}")
    if failed:
        text = f"{ranges(tuple(failed))} of {_named(end)} are not reached {whence}: {_why(failed)}"
        advice = f"Open them {place}, or give servers {place} another range by --kv-ports."
        yield Finding(Level.PROBLEM, f"ports {place}", text, advice)
    else:
        yield Finding(Level.OK, f"ports {place}", f"{_named(end)}: reached {whence}")


def _services(place: str, whence: str, end: End, failed: Mapping[int, str]) -> Iterator[Finding]:
    """Ports beside those of ``--kv-ports``."""
    closed = {port: failed[port] for port in end.services if port in failed}
    if reached := [port for port in end.services if port not in failed]:
        in_use = [port for port in reached if port in end.in_use]
        note = f" (in use: {ranges(in_use)})" if in_use else ""
        yield Finding(Level.OK, f"services {place}", f"{ranges(reached)}: reached {whence}{note}")
    if closed:
        text = f"{ranges(list(closed))} not reached {whence}: {_why(closed)}"
        advice = f"Open them {place} for the other machine."
        yield Finding(Level.PROBLEM, f"services {place}", text, advice)


def _reached(whence: str, addresses: Sequence[str], failed: Mapping[str, str]) -> Iterator[Finding]:
    """Addresses that both ends need."""
    if reached := [address for address in addresses if address not in failed]:
        yield Finding(Level.OK, "reach", f"{', '.join(reached)}: reached {whence}")
    for address, why in failed.items():
        advice = "See whether it runs, listens at that address, and is let through to this machine."
        if whence != "from here":
            advice = "See whether a firewall keeps the peer from it, and whether its name is known there."
        yield Finding(Level.PROBLEM, "reach", f"{address} is not reached {whence}: {why}", advice)


def _named(end: End) -> str:
    if not end.asked:
        return f"port {end.ports[0]} (any; --kv-ports was not given)"
    rest = [f"{end.taken} in use"] if end.taken else []
    rest += [f"{end.left_out} not tried"] if end.left_out else []
    return f"{len(end.ports)} ports of {end.asked}" + (f" ({', '.join(rest)})" if rest else "")


def _why(failed: Mapping[int, str]) -> str:
    return "; ".join(sorted(set(failed.values()))[:3])


def ranges(ports: Sequence[int]) -> str:
    """Ports as people write them: ``31000-31004, 31009``."""
    found: list[list[int]] = []
    for port in sorted(ports):
        if found and port == found[-1][1] + 1:
            found[-1][1] = port
        else:
            found.append([port, port])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in found[:_SHOWN]]
    return ", ".join(shown + (["..."] if len(found) > _SHOWN else []))


def _moving(way: str, examined: Examined) -> Finding:
    """The transport that servers would choose: the first one by which bytes were read."""
    # Transports begin their reasons with their names.
    why = [f"{name}: {reason.removeprefix(f'{name}: ')}" for name, reason in examined.reasons.items()]
    if not examined.speeds:
        advice = "Open the ports of --kv-ports for tcp; without a transport each server serves for itself."
        return Finding(Level.PROBLEM, "transport", f"no KV would travel {way}: {'; '.join(why)}", advice)
    (chosen, speed), *others = examined.speeds.items()
    notes = [f"{name} {_speed(other)}" for name, other in others]
    notes += [f"not {reason}" for reason in why if reason.partition(":")[0] in _better(chosen)]
    text = f"KV {way} would travel over {chosen}, {_speed(speed)}"
    return Finding(Level.OK, "transport", f"{text} ({'; '.join(notes)})" if notes else text)


def _better(chosen: str) -> list[str]:
    """Transports of host memory that are preferred to one."""
    names = [str(name) for name in TRIED if name is not TransportName.CUDA_IPC]
    return names[: names.index(chosen)] if chosen in names else names


def _speed(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s"


def _trouble(seen: Seen) -> Iterator[Finding]:
    if seen.trouble is not None:
        subject, advice = seen.trouble.kind.value
        when = f"during {seen.doing}: " if seen.trouble.kind is Trouble.ENDED else ""
        yield Finding(Level.PROBLEM, subject, f"{seen.target}: {when}{seen.trouble.message}", advice)


def as_json(seen: Seen) -> dict[str, Any]:
    """The figures as plain data."""

    def end(one: End | None, examined: Examined | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {
            "host": one.host,
            "announced": one.announced,
            "ports": one.ports,
            "ports_in_use": one.taken,
            "services": one.services,
            "not_reached": None if examined is None else examined.failed,
        }

    def transport(examined: Examined | None) -> dict[str, Any] | None:
        if examined is None:
            return None
        name = next(iter(examined.speeds), None)
        return {"name": name, "bytes_per_second": examined.speeds, "not": examined.reasons}

    reached = {"from_here": seen.here, "from_there": seen.there}
    return {
        "target": seen.target,
        "round_trip_seconds": seen.rtt,
        "clock_ahead_seconds": seen.ahead,
        "here": end(seen.ours, seen.there),
        "there": end(seen.theirs, seen.here),
        "reach": {way: None if one is None else one.unreached for way, one in reached.items()},
        "transport": {"to": transport(seen.there), "from": transport(seen.here)},
    }
