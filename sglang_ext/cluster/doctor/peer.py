"""``sglang-ext doctor --peer``: facts about the way to another machine and back, and findings from them.

``findings`` is a pure function. The two ends are in ``peer_ends.py``, their tests in ``peer_probe.py``, their
messages in ``peer_wire.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang_ext.cluster.doctor.findings import Finding, Level
from sglang_ext.cluster.doctor.peer_wire import Chosen, End, Took, Trouble, TroubleError

_SHOWN: Final = 8
"""Ranges of ports that are listed one by one."""

_ADVICE: Final[Mapping[Trouble, str]] = {
    Trouble.NAME: "Give an address, or see to the name's entry in DNS or /etc/hosts.",
    Trouble.CLOSED: "Run `sglang-ext doctor --listen` there, with the same port; if it runs, a firewall "
    "refuses the port.",
    Trouble.UNREACHED: "See whether the address is right; a firewall on the way may drop the port.",
    Trouble.NOT_OURS: "Run `sglang-ext doctor --listen` on a free port there, and give that port.",
    Trouble.VERSION: "Install the same release of sglang-ext on both machines.",
    Trouble.KEY: "Copy the file with the key from one machine to the other; every member needs the same.",
    Trouble.NO_KEY: "Give --cluster-key-file, with the same key, to both.",
    Trouble.BUSY: "Try again when that other test has ended.",
    Trouble.ENDED: "See the listener's output; it ends by itself after the time of --listen. Start it again, "
    "and try once more; if it repeats, something on the way cuts connections.",
    Trouble.ADDRESS: "Give --kv-announce-host ADDRESS at the end that says so.",
}
_SUBJECTS: Final = {Trouble.KEY: "cluster key", Trouble.NO_KEY: "cluster key", Trouble.ADDRESS: "address"}


@dataclass
class Seen:
    """Facts about a peer; None for steps that were not reached.

    target: the called address. keyed: whether this end has a cluster key. rtt: seconds, the least of a few.
    ahead: seconds by which the peer's clock is ahead. failed_there, failed_here: why ports were not reached,
    by port: the peer's from here, ours from there. unreached_here, unreached_there: why addresses of `reach`
    were not reached, by address. there, here: bytes and seconds of a stream, as received at the peer and
    here. reads_theirs, reads_ours: the transport by which this end, and the peer, reads the other's memory.
    trouble: the error that ended the session, while it was `doing`.
    """

    target: str
    keyed: bool
    doing: str = "the handshake"
    rtt: float | None = None
    ahead: float | None = None
    ours: End | None = None
    theirs: End | None = None
    failed_there: Mapping[int, str] | None = None
    failed_here: Mapping[int, str] | None = None
    reach: Sequence[str] = ()
    unreached_here: Mapping[str, str] | None = None
    unreached_there: Mapping[str, str] | None = None
    there: Took | None = None
    here: Took | None = None
    reads_theirs: Chosen | None = None
    reads_ours: Chosen | None = None
    trouble: TroubleError | None = None


def findings(seen: Seen) -> list[Finding]:
    """Findings that follow from the facts, in the order in which servers would meet them."""
    return [*_greeting(seen), *_addresses(seen), *_reached(seen), *_moving(seen), *_trouble(seen)]


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


def _addresses(seen: Seen) -> Iterator[Finding]:
    ends = (
        ("there", "the peer", "from here", seen.theirs, seen.ours, seen.failed_there),
        ("here", "this machine", "from the peer", seen.ours, seen.theirs, seen.failed_here),
    )
    for place, whose, whence, end, other, failed in ends:
        if end is None or other is None or failed is None:
            continue
        yield from _services(place, whence, end, failed)
        failed = {port: why for port, why in failed.items() if port not in end.services}
        if not end.ports:
            text = f"all ports of {end.asked} {place} are in use, so none was tried"
            yield Finding(Level.WARNING, f"ports {place}", text, f"Stop the servers {place}, and test again.")
            continue
        seen_as = "" if other.sees == end.announced else f"; its connections come from {other.sees}"
        announces = f"servers of {whose} announce {end.announced}"
        if len(failed) == len(end.ports):
            what = "all of " if len(failed) > 1 else ""
            text = f"{announces}; not reached there {whence}: {what}{_named(end)} ({_why(failed)}){seen_as}"
            advice = f"Open {end.asked or 'all ports'} {place} for the other machine" + (
                "; or, since something in between changes addresses, give --kv-announce-host ADDRESS "
                f"{place}, one by which that end is reached."
                if seen_as
                else f", or give --kv-announce-host ADDRESS {place} if it is reached by another."
            )
            yield Finding(Level.PROBLEM, f"address {place}", text, advice)
            continue
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
        in_use = [port for port in reached if not end.services[port]]
        note = f" (in use: {ranges(in_use)})" if in_use else ""
        yield Finding(Level.OK, f"services {place}", f"{ranges(reached)}: reached {whence}{note}")
    if closed:
        text = f"{ranges(list(closed))} not reached {whence}: {_why(closed)}"
        advice = f"Open them {place} for the other machine."
        yield Finding(Level.PROBLEM, f"services {place}", text, advice)


def _reached(seen: Seen) -> Iterator[Finding]:
    """Addresses that both ends need."""
    for whence, failed in (("from here", seen.unreached_here), ("from the peer", seen.unreached_there)):
        if failed is None:
            continue
        if reached := [address for address in seen.reach if address not in failed]:
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


def _moving(seen: Seen) -> Iterator[Finding]:
    if seen.there is not None and seen.here is not None:
        text = f"{_speed(seen.there)} to the peer, {_speed(seen.here)} from it, over one connection"
        yield Finding(Level.OK, "bandwidth", text)
    for whence, chosen in (("from the peer", seen.reads_theirs), ("to the peer", seen.reads_ours)):
        if chosen is None:
            continue
        # Transports begin their reasons with their names.
        why = "; ".join(
            f"not {name}: {reason.removeprefix(f'{name}: ')}" for name, reason in chosen.reasons.items()
        )
        if chosen.name:
            text = f"KV {whence} would travel over {chosen.name}{f' ({why})' if why else ''}"
            yield Finding(Level.OK, "transport", text)
        else:
            advice = (
                "Open the ports of --kv-ports for tcp; without a transport each server serves for itself."
            )
            yield Finding(Level.PROBLEM, "transport", f"no KV would travel {whence}: {why}", advice)


def _speed(took: Took) -> str:
    return f"{took.nbytes / took.seconds / 1e9:.3g} GB/s"


def _trouble(seen: Seen) -> Iterator[Finding]:
    if seen.trouble is not None:
        kind, text = seen.trouble.kind, seen.trouble.message
        when = f"during {seen.doing}: " if kind is Trouble.ENDED else ""
        subject = _SUBJECTS.get(kind, "connection")
        yield Finding(Level.PROBLEM, subject, f"{seen.target}: {when}{text}", _ADVICE[kind])


def as_json(seen: Seen) -> dict[str, Any]:
    """The figures as plain data. Tickets and answers are left out: they are expired."""

    def end(one: End | None, failed: Mapping[int, str] | None) -> dict[str, Any] | None:
        return (
            one
            if one is None
            else {
                "host": one.host,
                "announced": one.announced,
                "ports": one.ports,
                "ports_in_use": one.taken,
                "services": list(one.services),
                "not_reached": failed,
            }
        )

    def speed(took: Took | None) -> float | None:
        return None if took is None else took.nbytes / took.seconds

    def chosen(one: Chosen | None) -> dict[str, Any] | None:
        return None if one is None else {"name": one.name or None, "not": dict(one.reasons)}

    return {
        "target": seen.target,
        "round_trip_seconds": seen.rtt,
        "clock_ahead_seconds": seen.ahead,
        "here": end(seen.ours, seen.failed_here),
        "there": end(seen.theirs, seen.failed_there),
        "reach": {"from_here": seen.unreached_here, "from_there": seen.unreached_there},
        "bytes_per_second": {"to": speed(seen.there), "from": speed(seen.here)},
        "transport": {"to": chosen(seen.reads_ours), "from": chosen(seen.reads_theirs)},
    }
