"""Namespaces and block keys: how a piece of KV is named everywhere.

A *block* is a fixed run of tokens with all its planes. Its *key* is a hash chained over
(namespace, parent key, the block's tokens), so that equal keys mean equal prefixes under
equal weights, dtype and layout; KV never crosses a namespace.

An encoded prompt has one word of 4 bytes for each token. A text token is its own word. In place of the tokens
of a picture, a video or a sound, SGLang puts hashes of the content: *wide* ids, of up to 63 bits. An aligned
group of four tokens with a wide id among them becomes four words of a digest of its four ids: 124 bits, and
the highest bit of each word set, which no text token has. So two prompts that differ in any bit of a wide id
have different encodings, and block size, offsets and protocol do not depend on the content of a prompt.
The first tokens of a prompt encode to the first words of the prompt's encoding wherever a group ends. The
block size of a server that takes pictures is therefore a multiple of `GROUP_TOKENS`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
"""Bytes of one token in an encoded prompt (little-endian int32)."""

MAX_TOKEN = 2**31 - 1
"""The largest id that is its own word. Those above are wide."""
MAX_WIDE_ID = 2**63 - 1
GROUP_TOKENS = 4
"""Tokens that are encoded together where one of them has a wide id."""

BLOCK_KEY_BYTES = 16

SALT_HEADER = "x-sglang-ext-cache-salt"
"""Header in which a router sends a tenant's salt with requests whose bodies have no field for it."""
KEEP_HEADER = "x-sglang-ext-keep"
"""Header in which a router sends the places of a prompt, in tokens and with commas between them, where the
client says that others begin alike: a model with recurrent states keeps a state there."""
MOST_KEPT = 4
"""Places that it may name: of the breakpoints that Anthropic's API takes."""

_ENCODED = np.dtype("<i4")
_UNSIGNED = np.dtype(np.uint64)
_LITTLE = np.dtype("<u8")
_WORD = np.dtype("<u4")
_WIDE_WORD = np.uint32(1 << 31)
"""Set in each word of a group with a wide id."""
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
    """Encode token ids as words of 4 bytes, the form in which prompts are compared (see the module).

    Args:
        tokens: of any integer type; bytes are taken to be encoded already and returned as they are.
        count: encode the first so many only; for an array of int64 that spares a copy.

    Raises:
        ValueError: a token id is below 0, does not fit into 63 bits, or is not an integer.
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
    most = np.maximum.reduce(wide)
    if most <= MAX_TOKEN:
        return wide.astype(_ENCODED).tobytes()
    if most > MAX_WIDE_ID:
        raise ValueError(f"token ids must lie in [0, {MAX_WIDE_ID}]")
    return _with_wide_ids(wide)


def _with_wide_ids(ids: npt.NDArray[np.uint64]) -> bytes:
    """As ``encode_tokens``, where an id is wide. An incomplete last group is filled up with zeros."""
    groups = np.zeros((-(-len(ids) // GROUP_TOKENS), GROUP_TOKENS), _LITTLE)
    groups.reshape(-1)[: len(ids)] = ids
    words = groups.astype(_WORD)
    at = np.flatnonzero((groups > MAX_TOKEN).any(axis=1))
    wide = groups[at]
    # The ids of a picture repeat: of equal groups in a row, the first is hashed.
    first = np.ones(len(at), bool)
    first[1:] = (wide[1:] != wide[:-1]).any(axis=1)
    digests = b"".join(
        hashlib.blake2b(
            group.tobytes(), digest_size=GROUP_TOKENS * TOKEN_BYTES, person=b"kv-wide-ids"
        ).digest()
        for group in wide[first]
    )
    rows = np.frombuffer(digests, _WORD).reshape(-1, GROUP_TOKENS) | _WIDE_WORD
    words[at] = rows[np.cumsum(first) - 1]
    return words.tobytes()[: len(ids) * TOKEN_BYTES]


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
    """The token ids of an encoded prompt, shape (tokens,), without a copy.

    Negative where a group has a wide id: those tokens cannot be had back.
    """
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


def page_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """The hash with which SGLang begins those of the pages of a tenant's prompt; empty without a tenant."""
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            text = part.encode()
            digest.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


def page_hashes(prior: bytes, key: bytes, page_tokens: int, *, pairs: bool = False) -> Iterator[bytes]:
    """SGLang's hashes of the whole pages of an encoded prompt, 32 bytes each, as far as its tokens are text.

    Args:
        prior: hash of the page before; at the start of a prompt, ``page_seed``.
        key: the encoded prompt, or the part of it that follows the page before.
        page_tokens: tokens per page.
        pairs: with EAGLE, SGLang hashes each token together with the next one.
    """
    step = page_tokens * TOKEN_BYTES
    words = decode_tokens(key)
    wide = words < 0
    end = int(wide.argmax()) * TOKEN_BYTES if wide.any() else len(key)
    if pairs:
        words = words[: end // TOKEN_BYTES]
        key = np.stack([words[:-1], words[1:]], axis=1).tobytes()
        step, end = 2 * step, len(key)
    for start in range(0, end - step + 1, step):
        prior = hashlib.sha256(prior + key[start : start + step]).digest()
        yield prior


def part_name(name: bytes, number: int) -> bytes:
    """The name that stands, among names of pages, for a page's part of a component.

    Args:
        name: of the page, ``BLOCK_KEY_BYTES``.
        number: of the component, up to 255; 0 is the KV of every token, which has the name of the page.
    """
    return name[:-1] + bytes((name[-1] ^ number,))
