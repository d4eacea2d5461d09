"""MemServe's `transfer` and, with tokens to insert under, `transfer_with_insert` (section 4.3).

Three steps: allocate at the receiver, by the type that the sender names; transmit by the fastest path;
insert at the receiver. The receiver's part is an `owner.Receiver`, given to its `Endpoint.start`. The
insertion travels with the last message, so that it costs no round trip:

    pull (default), one round trip:  TAKE ─> allocate, read one-sidedly, verify, COMPLETE, insert ─> PLACED
    push, two round trips:  RESERVE ─> allocate ─> RESERVED; write one-sidedly; WRITTEN ─> insert ─> PLACED

Pull is the default because a late read does no harm, and so needs no grant that has to be fenced when it
fails (KVDirect, section 4.3, argues for it too); push is for by-layer hand-over, and to compare.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.disagg.errors import PeerProtocolError
from sglang_ext.disagg.messages import Offer, Placed, Take
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.link import Link
from sglang_ext.wire import WireError, pack_ids, unpack_ids


class TransferFlag(enum.IntFlag):
    """How to transfer; bits from USER on are the caller's and reach the receiver unchanged."""

    PULL = 0
    PUSH = 1
    ALLOCATE = 2
    """Nothing is sent: blocks are set aside at the receiver, for the owner that is named."""
    FREE = 4
    """Nothing is sent: the receiver's blocks that are named are free again."""
    USER = 1 << 16


@dataclass(frozen=True)
class Placement:
    """Where a transfer ended. blocks: of the receiver's pool. inserted: whether its index has them."""

    blocks: Ids
    inserted: bool


async def transfer(
    endpoint: Endpoint,
    receiver: Instance,
    request: str,
    pool: str,
    blocks: Ids,
    remote_pool: str,
    *,
    seconds: float,
    destination: Ids | None = None,
    flags: TransferFlag = TransferFlag.PULL,
    private: bytes = b"",
    tokens: bytes | None = None,
    others: Sequence[Offer] = (),
    control: Sequence[str] = (),
) -> Placement:
    """Transfer sealed blocks of our `pool` to `remote_pool` of a connected instance.

    destination: blocks that the receiver's engine has set aside; None lets the receiver allocate.
    private: the caller's data, handed to the receiver's `allocate` and `insert`.
    tokens: insert under these (encoded as `keys.encode_tokens` does); None does not.
    others, control: pulling from an instance of several ranks: the offers of the other ranks, and the control
        addresses of all, in rank order.

    Raises:
        RefusedError: the receiver has no room, takes no transfers, or read stale blocks.
        TransferDeadlineError, PeerGoneError. Nothing was inserted then.
    """
    if flags & TransferFlag.PUSH:
        placed, inserted = await receiver.push(
            request,
            pool,
            blocks,
            remote_pool,
            seconds=seconds,
            destination=destination,
            tokens=tokens,
            flags=int(flags),
            private=private,
        )
        return Placement(placed, inserted)
    offers = [
        endpoint.publish(pool, f"{request}#{i}", blocks, reader=link.who.epoch)
        for i, link in enumerate(receiver.links)
    ]
    addresses = tuple(control) or (endpoint.address,)
    try:
        answers = await asyncio.gather(
            *(
                _ask(
                    link,
                    Take(
                        link.session,
                        offer.request,
                        tuple(sorted([offer, *others], key=lambda o: o.rank)),
                        addresses,
                        remote_pool,
                        int(seconds * 1000),
                        pack_ids(destination) if destination is not None else b"",
                        tokens is not None,
                        tokens or b"",
                        int(flags),
                        private,
                    ),
                    seconds,
                )
                for link, offer in zip(receiver.links, offers, strict=True)
            )
        )
        return Placement(unpack_ids(answers[0].blocks), all(a.inserted for a in answers))
    except WireError as error:
        raise PeerProtocolError(str(error)) from None
    finally:
        for offer in offers:
            endpoint.withdraw(pool, offer.lease)


async def _ask(link: Link, message: Take, seconds: float) -> Placed:
    answer = await link.ask(message, seconds)
    if not isinstance(answer, Placed):
        raise PeerProtocolError(f"expected a placement, got {type(answer).__name__}")
    return answer
