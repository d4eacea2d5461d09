"""Tiers, namespaces and block keys: how a piece of KV is named everywhere.

A *block* is a fixed run of tokens with all its planes. Its *key* is a hash chained over
(namespace, parent key, the block's tokens), so that equal keys mean equal prefixes under
equal weights, dtype and layout; KV never crosses a namespace.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
"""Bytes of one token in an encoded prompt (little-endian int32)."""

BLOCK_KEY_BYTES = 16

TokenIds: TypeAlias = "Sequence[int] | array[int] | npt.NDArray[np.integer]"


class Tier(enum.IntEnum):
    """Where a copy of a block lies, nearest to the model first."""

    HBM = 0
    """The engine's own KV pool (on a CPU host, the same pool in RAM)."""
    DRAM = 1
    """The arena in host memory."""
    DISK = 2
    """Segments on a local disk."""


@dataclasses.dataclass(frozen=True)
class Namespace:
    """Everything two blocks must have in common before their KV may be exchanged."""

    model: str
    weights_version: str
    dtype: str
    geometry: str
    """Digest of planes, row sizes and block size."""
    shard: str = "tp0/1,pp0/1"
    salt: str = ""
    """The tenant's salt; KV of one tenant is never another's."""

    def digest(self) -> bytes:
        """16 bytes that differ whenever any field differs."""
        h = hashlib.blake2b(digest_size=BLOCK_KEY_BYTES, person=b"kv-namespace")
        for field in dataclasses.fields(self):
            value = str(getattr(self, field.name)).encode()
            h.update(len(value).to_bytes(4, "little"))
            h.update(value)
        return h.digest()


def encode_tokens(tokens: TokenIds | bytes) -> bytes:
    """Encode token ids as little-endian int32, the form in which prompts are compared.

    Raises:
        ValueError: a token id does not fit into 31 bits.
    """
    if isinstance(tokens, bytes):
        return tokens
    if isinstance(tokens, array):
        wide: npt.NDArray[np.integer] = np.frombuffer(tokens, dtype=tokens.typecode)
    else:
        wide = np.asarray(tokens, dtype=np.int64) if not isinstance(tokens, np.ndarray) else tokens
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) > 0x7FFFFFFF):
        raise ValueError("token ids must lie in [0, 2**31)")
    return wide.astype("<i4").tobytes()


def decode_tokens(key: bytes) -> npt.NDArray[np.int32]:
    """The token ids of an encoded prompt, shape (tokens,), without a copy."""
    return np.frombuffer(key, dtype="<i4")


def block_keys(namespace: bytes, key: bytes, block_tokens: int, parent: bytes = b"") -> list[bytes]:
    """Chained keys of the whole blocks of an encoded prompt; a tail shorter than a block has none.

    Args:
        namespace: ``Namespace.digest()``.
        key: the encoded prompt, or the part of it that follows ``parent``.
        block_tokens: tokens per block.
        parent: key of the block before, empty at the start of a prompt.
    """
    size = block_tokens * TOKEN_BYTES
    keys: list[bytes] = []
    for start in range(0, len(key) - size + 1, size):
        h = hashlib.blake2b(key[start : start + size], digest_size=BLOCK_KEY_BYTES, key=namespace)
        h.update(parent)
        parent = h.digest()
        keys.append(parent)
    return keys
