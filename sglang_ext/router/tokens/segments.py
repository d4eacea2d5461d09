"""Tokenizing in segments, with a cache of the tokens of earlier segments.

A tokenizer first cuts its input at special tokens, so the tokens between two of
them do not depend on the surrounding text. A chat prompt is therefore tokenized message by message, and each
message once: when a conversation continues, or starts with a known system prompt, only new messages
cost time. Most tokenizers also cut between two words, and at the end of a line, before they look for tokens.
So a long text is tokenized in pieces that end there: a beginning that texts share is tokenized once, and all
cores tokenize the pieces of one text. Some tokenizers violate one of these rules (they treat white space
around special tokens, or the start of the input, differently, or have tokens of several words), so
``Segmenter`` tries both rules on awkward inputs first.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise, product

import numpy as np
import xxhash

from sglang_ext.keys import TOKEN_BYTES

ENTRY_BYTES = 200
"""Memory of an entry of the cache besides its tokens."""
MAX_OWNER = 64
"""Bytes of a salt in keys; of a longer one, which is a client's, they have a hash."""
PIECE = 2048
"""Shorter pieces are found again a little more often, and take longer to find."""


@dataclass(frozen=True)
class _Border:
    """A place between words or lines at which tokenizers cut.

    Attributes:
        place: matches the blank with which the text behind such a place begins, or the end of line with which
            the text before it ends. Patterns that begin with a character are searched 5 to 12 times as fast
            as those that only look around.
        spanned: matches vocabulary entries that cross such a place.
        before, after: texts around such a place that a tokenizer might treat differently.
    """

    place: str
    spanned: re.Pattern[str]
    before: Sequence[str]
    after: Sequence[str]


# One blank, and no white space before a line's end, because the tokens of longer white space depend on the
# text behind it. Tokenizers differ in how they cut digits and marks.
_BORDERS = (
    _Border(
        r" (?<=[^\W\d_] )(?=[^\W\d_])",
        re.compile("[^\\W\\d_][ \u2581\u0120][A-Za-z]"),
        ("a", "Word", "it's", "12th", "\u00e9", "\u4f60\u597d", "\u0416", "_a", "  a"),
        (" a", " Word", " I'm", " \u00e9t", " \u4f60", " \u0436", " the 12", " x_1", " a  b"),
    ),
    _Border(
        r"\n(?<=\S\n)(?=[^\W\d_])",
        re.compile("[\n\u010a][A-Za-z]"),
        ("a\n", "x.\n", "1\n", "\u3002\n", "\u4f60\n", "it's\n", "a b\n", "\\\n", ' "\n'),
        ("a", "Word", "I'm", "\u00e9t", "\u4f60", "\u0436", "the 12", "x_1", "a\nb"),
    ),
)

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


SLICE = 1 << 14
"""Characters per call of a tokenizer: its threads serve one call after the other, so texts of other clients
get their turn between two calls. That is about 20 ms of one core, and calls of 2^17 are no faster."""
SEARCHED = 1 << 14
"""Characters of a text that are searched for borders, or a quarter of it. No other thread runs meanwhile: all
of a text of 200,000 characters without borders took 20 ms. Ordinary texts have one every few words."""
LONGEST = 256
"""Assumed characters of the longest token if the vocabulary is unknown."""


class TooMuchNew(Exception):
    """Tokenizing would take longer than the caller has time for."""


class TextTooLong(Exception):
    """A text has more characters than the longest prompt can have.

    Attributes:
        characters, most: that it has, and that it may have.
    """

    def __init__(self, characters: int, most: int) -> None:
        super().__init__(f"{characters} characters, and may have {most}")
        self.characters, self.most = characters, most


class TokenCache:
    """Segment -> tokens, bounded in bytes; the least recently used go first. For many threads.

    Tenants share its memory and no entry: the salt that keeps their KV apart is part of every key. Otherwise
    the time of tokenizing would reveal to one tenant which texts another has sent.

    An entry contains its text, and a lookup compares it. So the hash need not resist clients that search for
    collisions, which takes seconds with XXH3. A resistant hash (keyed BLAKE2b) made a cached request of 32 KB
    take a quarter longer; the comparison takes a hundredth.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        """Key -> (text, tokens)."""
        self._lock = threading.Lock()
        self.size_bytes = 0
        """Memory of texts, tokens and the entries themselves."""
        self.hits = 0
        self.misses = 0

    def get(self, key: bytes, text: bytes) -> bytes | None:
        """The cached tokens of a text under its key (``key_of``); None if absent."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry[0] != text:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return entry[1]

    def put(self, key: bytes, text: bytes, tokens: bytes) -> None:
        """Keep the tokens of a text; of two texts with one key, those of the first."""
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = text, tokens
            self.size_bytes += len(text) + len(tokens) + ENTRY_BYTES
            while self.size_bytes > self._max_bytes:
                _, (oldest, its_tokens) = self._entries.popitem(last=False)
                self.size_bytes -= len(oldest) + len(its_tokens) + ENTRY_BYTES

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        asked = self.hits + self.misses
        return f"TokenCache(entries={len(self)}, bytes={self.size_bytes}, hits={self.hits}/{asked})"


def key_of(text: bytes, owner: bytes) -> bytes:
    """The cache key of a text.

    Args:
        owner: see ``owner_of``.
    """
    return owner + xxhash.xxh3_128_digest(text)


def owner_of(salt: str | None) -> bytes:
    """The part of a cache key that separates tenants.

    Args:
        salt: the tenant's; None of those that share KV.
    """
    if salt is None:
        return b""
    owner = b"s" + salt.encode("utf-8", "surrogatepass")
    return owner if len(owner) <= MAX_OWNER else b"h" + blake2b(owner, digest_size=32).digest()


class Segmenter:
    """Tokenizes through a cache.

    Args:
        encode: texts -> token ids of each, without special tokens added around. Called in any thread.
        special: the texts of the tokens that the tokenizer cuts its input at.
        vocabulary: all entries as the tokenizer writes them; without it, texts are not cut between words.
        cache: may be shared with other segmenters of the same tokenizer.
        piece: characters from which a text is cut at the next border of words.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
        special: Sequence[str],
        vocabulary: Collection[str],
        cache: TokenCache,
        *,
        piece: int = PIECE,
    ) -> None:
        self._encode = encode
        self.longest = max(map(len, vocabulary), default=LONGEST)
        """Characters of the longest token."""
        self._piece = piece
        self._cache = cache
        self._borders: re.Pattern[str] | None = None
        self._firsts = sorted({token[0] for token in special})
        """How they begin: a text without any of these has none, which is seen much sooner."""
        if special:
            # Longest first: where two special tokens start alike, a tokenizer takes the longer one.
            ordered = sorted(special, key=len, reverse=True)
            self._borders = re.compile("|".join(re.escape(token) for token in ordered))
            if not self._independent(_around_special(ordered)):
                self._borders = None
        places = [border.place for border in _BORDERS if self._cuts_at(border, vocabulary)]
        self._places = re.compile("|".join(places)) if places else None

    @property
    def by_segment(self) -> bool:
        """Whether texts are cut at special tokens."""
        return self._borders is not None

    @property
    def by_piece(self) -> bool:
        """Whether long texts are cut between words."""
        return self._places is not None

    @property
    def cached_by(self) -> str:
        """The kinds of segments that the cache can find again, as text for people."""
        units = ["message"] * self.by_segment + ["piece"] * self.by_piece
        return " and ".join(units) or "whole prompt"

    def encode(
        self, text: str, most_new: int | None = None, salt: str | None = None, most: int | None = None
    ) -> bytes:
        """The tokens of ``text`` as ``keys.encode_tokens`` writes them.

        Args:
            most_new: characters that may have to be tokenized; by default any number.
            salt: see ``owner_of``.
            most: tokens that a prompt may have. Of a text with more than twice as many, no more than a part
                is tokenized, and returned.

        Raises:
            TooMuchNew: more than ``most_new`` characters have to be tokenized.
            TextTooLong: the text has too many characters for ``most`` tokens.
        """
        if most is not None and len(text) > most * self.longest:
            raise TextTooLong(len(text), most * self.longest)
        segments = self._cut(text)
        texts = [segment.encode("utf-8", "surrogatepass") for segment in segments]
        owner = owner_of(salt)
        keys = [key_of(each, owner) for each in texts]
        # The first segment may be treated as the start of a text, and no other is.
        keys[0] = b"^" + keys[0]
        known = [self._cache.get(key, each) for key, each in zip(keys, texts, strict=True)]
        missing = [index for index, tokens in enumerate(known) if tokens is None]
        if missing:
            if most_new is not None and sum(len(segments[index]) for index in missing) > most_new:
                raise TooMuchNew
            return self._encode_missing(segments, texts, keys, known, missing, most)
        return b"".join(tokens or b"" for tokens in known)

    def _encode_missing(
        self,
        segments: list[str],
        texts: list[bytes],
        keys: list[bytes],
        known: list[bytes | None],
        missing: list[int],
        most: int | None,
    ) -> bytes:
        found: list[bytes] = []
        size = at = 0
        while at < len(missing):
            end, characters = at, 0
            while end < len(missing) and (end == at or characters + len(segments[missing[end]]) <= SLICE):
                characters += len(segments[missing[end]])
                end += 1
            part = missing[at:end]
            for index, ids in zip(part, self._encode([segments[i] for i in part]), strict=True):
                known[index] = np.asarray(ids, dtype="<i4").tobytes()
                self._cache.put(keys[index], texts[index], known[index] or b"")
            at = end
            upto = missing[at] if at < len(missing) else len(segments)
            further = [tokens or b"" for tokens in known[len(found) : upto]]
            found += further
            size += sum(map(len, further))
            if most is not None and size > 2 * most * TOKEN_BYTES:
                break
        return b"".join(found)

    def _cut(self, text: str) -> list[str]:
        """``text`` in pieces. All but the first start with a special token, or where a long one is cut."""
        starts: list[int] = []
        if self._borders is not None and any(map(text.__contains__, self._firsts)):
            starts = [match.start() for match in self._borders.finditer(text)]
        if not starts or starts[0] != 0:
            starts.insert(0, 0)
        if self._places is not None and len(text) > self._piece:
            starts = _pieces(text, starts, self._piece, self._places)
        return [text[start:end] for start, end in pairwise([*starts, len(text)])]

    def _cuts_at(self, border: _Border, vocabulary: Collection[str]) -> bool:
        if not vocabulary or any(map(border.spanned.search, vocabulary)):
            return False
        return self._independent(map(list, product(border.before, border.after)))

    def _independent(self, samples: Iterable[list[str]]) -> bool:
        """Whether tokens of pieces, put together, are the tokens of the whole, on awkward inputs."""
        parts = list(samples)
        flat = iter(self._encode([piece for pieces in parts for piece in pieces]))
        wholes = self._encode(["".join(pieces) for pieces in parts])
        return all(
            [token for _ in pieces for token in next(flat)] == list(ids)
            for ids, pieces in zip(wholes, parts, strict=True)
        )


def _pieces(text: str, starts: Sequence[int], size: int, places: re.Pattern[str]) -> list[int]:
    """Where the pieces of ``text`` start, which have ``size`` characters and some: at ``starts``, and at
    borders, until too much of the text was searched for these."""
    found: list[int] = []
    left = max(SEARCHED, len(text) // 4)
    for start, end in pairwise([*starts, len(text)]):
        found.append(start)
        while left > 0 and end - start > size:
            first = start + size
            place = places.search(text, first, min(end, first + left))
            if place is None:
                left -= min(end - first, left)
                break
            start = place.start() + (text[place.start()] == "\n")
            left -= start - first
            found.append(start)
    return found


def _around_special(special: Sequence[str]) -> Iterator[list[str]]:
    for token in [special[0], special[-1], *special[1:-1]][:4]:
        for before, after in product(_AWKWARD, _AWKWARD):
            yield [piece for piece in (before, token + after, special[0] + before) if piece]
