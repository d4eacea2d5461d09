"""Tokenizing in segments, so that the tokens of what was seen before need not be computed again.

A tokenizer cuts its input at special tokens before it does anything else, so the tokens between two of
them do not depend on what is around. A chat prompt is therefore tokenized message by message, and each
message once: when a conversation goes on, or starts with a system prompt seen before, only what is new
costs time. Not every tokenizer keeps to that (some treat white space around special tokens, or the start
of the input, in their own way), so ``Segmenter`` tries it on awkward inputs first.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

ENTRY_BYTES = 200
"""Memory of an entry of the cache besides its tokens."""

_AWKWARD = (
    "",
    "a",
    " a",
    "a ",
    "\n",
    " \n\n ",
    "Hello, world",
    " don't",
    "\u00e9\u4f60",
    "\u2581x",
    "1 2",
    "<",
    "</s",
)
"""Texts that a tokenizer might treat otherwise at the start, or beside a special token."""


class TooMuchNew(Exception):
    """Tokenizing would take longer than the caller has time for."""


class TokenCache:
    """Segment -> tokens, bounded in bytes; the least recently used go first. For many threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, digest: bytes) -> bytes | None:
        with self._lock:
            tokens = self._entries.get(digest)
            if tokens is None:
                self.misses += 1
            else:
                self.hits += 1
                self._entries.move_to_end(digest)
            return tokens

    def put(self, digest: bytes, tokens: bytes) -> None:
        with self._lock:
            if digest in self._entries:
                return
            self._entries[digest] = tokens
            self.size_bytes += len(tokens) + ENTRY_BYTES
            while self.size_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.size_bytes -= len(oldest) + ENTRY_BYTES

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        asked = self.hits + self.misses
        return f"TokenCache(entries={len(self)}, bytes={self.size_bytes}, hits={self.hits}/{asked})"


class Segmenter:
    """Tokenizes through a cache.

    Args:
        encode: texts -> token ids of each, without special tokens added around. Called in any thread.
        special: the texts of the tokens that the tokenizer cuts its input at.
        cache: shared by whoever likes.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
        special: Sequence[str],
        cache: TokenCache,
    ) -> None:
        self._encode = encode
        self._cache = cache
        self._borders: re.Pattern[str] | None = None
        if special:
            # Longest first: where two special tokens start alike, a tokenizer takes the longer one.
            ordered = sorted(special, key=len, reverse=True)
            self._borders = re.compile("|".join(re.escape(token) for token in ordered))
            if not self._independent(ordered):
                self._borders = None

    @property
    def by_segment(self) -> bool:
        """Whether parts of a text are cached, rather than whole texts only."""
        return self._borders is not None

    def encode(self, text: str, most_new: int | None = None) -> bytes:
        """The tokens of ``text`` as ``keys.encode_tokens`` writes them.

        Args:
            most_new: characters that may have to be tokenized; by default any number.

        Raises:
            TooMuchNew: there are more.
        """
        segments = self._cut(text)
        digests = [xxhash.xxh3_128_digest(segment.encode("utf-8", "surrogatepass")) for segment in segments]
        # The first segment may be treated as the start of a text, and no other is.
        digests[0] = b"^" + digests[0]
        known = [self._cache.get(digest) for digest in digests]
        missing = [index for index, tokens in enumerate(known) if tokens is None]
        if missing:
            if most_new is not None and sum(len(segments[index]) for index in missing) > most_new:
                raise TooMuchNew
            for index, ids in zip(missing, self._encode([segments[i] for i in missing]), strict=True):
                known[index] = np.asarray(ids, dtype="<i4").tobytes()
                self._cache.put(digests[index], known[index] or b"")
        return b"".join(tokens or b"" for tokens in known)

    def _cut(self, text: str) -> list[str]:
        """``text`` in pieces that start with a special token, but for the first."""
        if self._borders is None:
            return [text]
        starts = [match.start() for match in self._borders.finditer(text)]
        if not starts or starts[0] != 0:
            starts.insert(0, 0)
        return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]

    def _independent(self, special: Sequence[str]) -> bool:
        """Whether tokens of pieces, put together, are the tokens of the whole, on awkward inputs."""
        sample = [special[0], special[-1], *special[1:-1]][:4]
        whole: list[str] = []
        parts: list[list[str]] = []
        for token in sample:
            for before in _AWKWARD:
                for after in _AWKWARD:
                    pieces = [piece for piece in (before, token + after, sample[0] + before) if piece]
                    whole.append("".join(pieces))
                    parts.append(pieces)
        encoded = self._encode(whole)
        flat = self._encode([piece for pieces in parts for piece in pieces])
        position = 0
        for ids, pieces in zip(encoded, parts, strict=True):
            joined: list[int] = []
            for piece_ids in flat[position : position + len(pieces)]:
                joined.extend(piece_ids)
            position += len(pieces)
            if joined != list(ids):
                return False
        return True
