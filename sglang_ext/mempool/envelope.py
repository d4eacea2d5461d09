"""What a transfer between pools carries beside the blocks: owner, namespace, and the caller's private data.

The namespace travels along so that a tenant's blocks are inserted as that tenant's; that model, weights and
dtype are the same has been made sure of by CONNECT.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Hashable
from typing import TYPE_CHECKING

import msgspec

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.errors import UserError
from sglang_ext.keys import Namespace

if TYPE_CHECKING:
    from sglang_ext.mempool.pool import MemPool

_numbers = itertools.count(1)
_REQUEST = re.compile(r"(.*)#t\d+(?:#\d+)?", re.DOTALL)

Part = int | str | None


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What travels in a transfer's private data. private: the caller's.

    salt: the tenant, where namespaces are `keys.Namespace`.
    name: the namespace, where it is a tuple, as SGLang's cache names them.
    """

    private: bytes
    salt: str | None = None
    name: tuple[Part, ...] | None = None


_envelopes = msgspec.msgpack.Decoder(Envelope)


def seal(pool: MemPool, namespace: Hashable, private: bytes) -> bytes:
    """The private data of a transfer.

    Raises:
        UserError: the namespace cannot be named to another instance.
    """
    if isinstance(namespace, Namespace) and isinstance(pool.namespace, Namespace):
        if dataclasses.replace(namespace, salt=pool.namespace.salt) != pool.namespace:
            raise UserError("a transfer stays with one model, weights and layout", field="namespace")
        return msgspec.msgpack.encode(Envelope(private, salt=namespace.salt))
    if isinstance(namespace, tuple) and all(
        part is None or isinstance(part, int | str) for part in namespace
    ):
        return msgspec.msgpack.encode(Envelope(private, name=namespace))
    raise UserError(f"{namespace!r} cannot be named to another instance", field="namespace")


def unseal(pool: MemPool, data: bytes) -> tuple[Hashable, bytes]:
    """The namespace, and the private data, of a transfer that came in.

    Raises:
        RefusedError: no pool has sent it.
    """
    try:
        found = _envelopes.decode(data)
    except (msgspec.MsgspecError, ValueError):
        raise RefusedError("private", "the transfer does not come from a memory pool") from None
    if found.name is not None:
        return found.name, found.private
    if found.salt is not None and isinstance(pool.namespace, Namespace):
        return dataclasses.replace(pool.namespace, salt=found.salt), found.private
    raise RefusedError("namespace", "the pools name namespaces differently")


def request_of(owner: str) -> str:
    """A name for a transfer: `id#t<number>`. `pool_transfer` adds `#<rank>` where it is pulled."""
    return f"{owner}#t{next(_numbers)}"


def owner_of(request: str) -> str:
    """The sender's `id`, from the name of its transfer."""
    found = _REQUEST.fullmatch(request)
    return found[1] if found else request
