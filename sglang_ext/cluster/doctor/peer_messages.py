"""Messages of ``sglang-ext doctor --peer``, on the control plane of a server's endpoint, beside transfers'.

The caller asks, the listener answers, and keeps nothing about callers between two requests.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from sglang_ext.disagg import messages as transfers
from sglang_ext.disagg.transfer.control import Messages
from sglang_ext.wire import Codec, Count, Epoch, Message, Name

VERSION: Final = 3
MOST_PORTS: Final = 256
"""Ports of one end's ``--kv-ports`` that are tried."""
MOST_NAMED: Final = 16
"""Other ports of one end, and addresses that both ends have to reach."""
MOST_BLOCKS: Final = 64
"""Blocks that are read at a time."""

Port = Annotated[int, msgspec.Meta(ge=1, lt=65536)]
Ports = Annotated[tuple[Port, ...], msgspec.Meta(max_length=MOST_PORTS)]
Reasons = Annotated[dict[Name, Name], msgspec.Meta(max_length=MOST_NAMED)]


class Hail(Message, frozen=True, tag="doctor-hail"):
    """The first request; its fields are the same in every version. Answered with the listener's End.

    release: of this package. source: the caller's address on its way to the listener.
    """

    version: int
    release: Name
    source: Name


class End(Message, frozen=True, tag="doctor-end"):
    """Description of one end.

    host: its name. source: its address on the way to the other end. announced: the address that its servers
    would announce. control: its endpoint there, as HOST:PORT. epoch: of that endpoint. wall: its time, in
    seconds since the epoch. asked: its range of ports; empty for any. ports: those of the range that take
    connections. taken: how many of the range are in use. left_out: how many are not tried. services: its
    other ports. in_use: those of them that were in use.
    """

    host: Name
    source: Name
    announced: Name
    control: Name
    epoch: Epoch
    wall: float
    asked: Name
    ports: Ports
    taken: Count
    left_out: Count
    services: Ports
    in_use: Ports


class Examine(Message, frozen=True, tag="doctor-examine"):
    """Asks the listener to examine the way to the caller's end, and to addresses, ``HOST:PORT``."""

    end: End
    addresses: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_NAMED)]


class Examined(Message, frozen=True, tag="doctor-examined"):
    """Facts that one end has found about the way to the other.

    failed, unreached: the reasons of those ports and addresses that were not reached. speeds: bytes per
    second of reads from there, by transport, in order of preference. reasons: why not by the others.
    """

    failed: Annotated[dict[Port, Name], msgspec.Meta(max_length=MOST_PORTS + MOST_NAMED)]
    unreached: Reasons
    speeds: Annotated[dict[Name, float], msgspec.Meta(max_length=MOST_NAMED)]
    reasons: Reasons


class Publish(Message, frozen=True, tag="doctor-publish"):
    """Asks an endpoint to publish its first blocks for a request of this name."""

    request: Name
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCKS)]


class Published(Message, frozen=True, tag="doctor-published"):
    """sums: CRC32 of each block."""

    offer: transfers.Offer
    sums: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_BLOCKS)]


MESSAGES: Final = Messages(
    Codec(transfers.Request | Hail | Examine | Publish), Codec(transfers.Reply | End | Examined | Published)
)
