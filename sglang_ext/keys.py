"""Namespaces and block keys: how a piece of KV is named everywhere.

A *block* is a fixed run of tokens with all its planes. Its *key* is a hash chained over
(namespace, parent key, the block's tokens), so that equal keys mean equal prefixes under
equal weights, dtype and layout; KV never crosses a namespace.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
"""Bytes of one token in an encoded prompt (little-endian int32)."""

MAX_TOKEN = 2**31 - 1

BLOCK_KEY_BYTES = 16

_ENCODED = np.dtype("<i4")
_UNSIGNED = np.dtype(np.uint64)
_NATIVE = sys.byteorder == "little" and array("i").itemsize == TOKEN_BYTES
"""This machine's integers are encoded ones."""
FEW_TOKENS = 64
"""So many are looked at one by one; to numpy they would be too few."""

TokenIds: TypeAlias = "Sequence[int] | array[int] | npt.NDArray[np.integer]"


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


def tenant_salt(extra_key: str | None, cache_salt: str | None) -> str:
    """The salt of a tenant's namespace: different for every pair."""
    return json.dumps([extra_key, cache_salt])


def encode_tokens(tokens: TokenIds | bytes, count: int | None = None) -> bytes:
    """Encode token ids as little-endian int32, the form in which prompts are compared.

    Args:
        tokens: of any integer type; bytes are taken to be encoded already and returned as they are.
        count: encode the first so many only; for an array of int64 that spares a copy.

    Raises:
        ValueError: a token id does not fit into 31 bits, or is not an integer.
    """
    if isinstance(tokens, bytes):
        return tokens if count is None else tokens[: count * TOKEN_BYTES]
    if len(tokens) == 0 or count == 0:
        return b""
    if isinstance(tokens, list) and _NATIVE and (packed := _packed(tokens, count)) is not None:
        return packed
    if isinstance(tokens, array) and tokens.typecode == "q":
        wide = np.frombuffer(tokens, _UNSIGNED, -1 if count is None else min(count, len(tokens)))
    else:
        if count is not None:
            tokens = tokens[:count]
        wide = _as_integers(tokens).astype(np.int64, copy=False).view(_UNSIGNED)
    # Read as unsigned, a negative id is a huge one, so that one pass finds both ends of the range.
    if np.maximum.reduce(wide) > MAX_TOKEN:
        raise ValueError(f"token ids must lie in [0, {MAX_TOKEN}]")
    return wide.astype(_ENCODED).tobytes()


def _packed(tokens: list[int], count: int | None) -> bytes | None:
    """As ``encode_tokens``, for lists; ``None`` where something is wrong with them.

    An array of C integers is made of a list in a fraction of the time that numpy takes.
    """
    if count is not None:
        tokens = tokens[:count]
    try:
        packed = array("i", tokens)
    except (TypeError, OverflowError):
        return None
    least = min(tokens) if len(packed) <= FEW_TOKENS else np.frombuffer(packed, np.int32).min()
    return None if least < 0 else packed.tobytes()


def _as_integers(tokens: TokenIds) -> npt.NDArray[np.integer]:
    """Shape (tokens,); ids beyond 64 bits, which cannot be valid, become negative."""
    given: npt.NDArray[np.generic]
    if isinstance(tokens, array):
        given = np.frombuffer(tokens, dtype=tokens.typecode)
    else:
        given = np.asarray(tokens)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"token ids must be one row of integers, not {given.dtype} of shape {given.shape}")
    return cast("npt.NDArray[np.integer]", given)


def decode_tokens(key: bytes) -> npt.NDArray[np.int32]:
    """The token ids of an encoded prompt, shape (tokens,), without a copy."""
    return np.frombuffer(key, dtype=_ENCODED)


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
