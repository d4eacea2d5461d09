"""Puts a server's own tokens of an answer into the prompt of the next turn. Pure functions.

A client sends an answer back as text. Tokenized again, it may have other tokens than the server generated,
and the KV from the first other token on is not found. Where the text of the next prompt begins with the last
prompt's and the answer's, and the answer ends there, the tokens of both can stand in the place of the tokens
of their text: not a character of the prompt changes by that. Where an answer was edited, or the template
renders it in another way, the texts differ, and the prompt is left as it is.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence

import msgspec

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.clients.divergence import common_tokens

DIGEST_BYTES = 16
_CUT = "\N{REPLACEMENT CHARACTER}"
"""In the text of bytes that are no whole character; other bytes have the same text."""


class Outcome(enum.StrEnum):
    """Whether the tokens of the last answer went into a turn's prompt, and if not, why."""

    SPLICED = "spliced"
    SAME = "same-tokens"
    """The text has the very tokens that were generated."""
    UNKNOWN = "answer-unknown"
    """No answer of the session is known here: its first turn, the server did not tell the ids, or they are
    no text."""
    PROMPT_CHANGED = "prompt-changed"
    """It begins with no known prompt of the session."""
    ANSWER_CHANGED = "answer-changed"
    """The client, or the template, has another text of the answer."""
    JOINED = "joined"
    """The tokenizer joins the end of the answer with the text behind it."""
    NOT_RENDERED = "not-rendered"
    """Its prompt is not plain text that the router renders: pictures, several choices, an answer that is gone
    on with, a history that the server keeps."""
    OTHER_API = "other-api"
    """Its API takes no token ids beside messages."""


class Beginning(msgspec.Struct, frozen=True):
    """A text that others may begin with.

    characters: its length. digest: of its UTF-8.
    """

    characters: int
    digest: bytes

    def begins(self, text: str) -> bool:
        """Whether a text begins with it."""
        return len(text) >= self.characters and _hashed(text[: self.characters]).digest() == self.digest


class KeptAnswer(msgspec.Struct, frozen=True):
    """The tokens of a prompt and of the answer that a server gave to it, and digests of their texts."""

    key: bytes
    """Of both, encoded, without the token that ended the answer."""
    prompt: Beginning
    """The text of the prompt."""
    whole: Beginning
    """The text of both."""


class Turn(msgspec.Struct, frozen=True):
    """A prompt of a session.

    key: its tokens. outcome: whether those of a known answer are among them. characters, hashed: of its text,
    which is not kept itself. saved: tokens of the known prompt and answer that the text's own tokens do not
    begin with.
    """

    key: bytes
    outcome: Outcome
    characters: int
    hashed: hashlib.blake2b
    saved: int = 0


def _hashed(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)


def with_answer(
    text: str, key: bytes, kept: Sequence[KeptAnswer], ends: tuple[str, ...], encode: Callable[[str], bytes]
) -> Turn:
    """A prompt with the tokens of a known answer in it, if there is one.

    Args:
        text, key: the prompt, and the tokens of its text.
        kept: the last answers of its session.
        ends: texts of special tokens, with one of which a template ends an answer.
        encode: from a text to its tokens.
    """
    size, hashed = len(text), _hashed(text)
    outcome = Outcome.PROMPT_CHANGED if kept else Outcome.UNKNOWN
    for known in sorted(kept, key=lambda each: each.whole.characters, reverse=True):
        if not known.prompt.begins(text):
            continue
        if not text.startswith(ends, known.whole.characters) or not known.whole.begins(text):
            outcome = Outcome.ANSWER_CHANGED
            continue
        theirs = encode(text[: known.whole.characters])
        # Else a token of the text stands on both sides of the answer's end, and there is no place to join.
        if not key.startswith(theirs):
            outcome = Outcome.JOINED
            continue
        if theirs == known.key:
            return Turn(key, Outcome.SAME, size, hashed)
        saved = len(known.key) // TOKEN_BYTES - common_tokens(known.key, key)
        return Turn(known.key + key[len(theirs) :], Outcome.SPLICED, size, hashed, saved)
    return Turn(key, outcome, size, hashed)


def kept_answer(turn: Turn, answer: bytes, decode: Callable[[bytes], str]) -> KeptAnswer | None:
    """An answer to be kept; None if it is empty or no text.

    Args:
        turn: its prompt, as the server had it.
        answer: the generated tokens, without the token that ended it.
        decode: from tokens to their text, special tokens included.
    """
    # Some tokenizers leave out the blank in front of a text's first token, so it is not decoded alone.
    last = turn.key[-TOKEN_BYTES:]
    before, both = decode(last), decode(last + answer)
    if not answer or not both.startswith(before) or _CUT in both:
        return None
    text = both[len(before) :]
    whole = turn.hashed.copy()
    whole.update(text.encode("utf-8", "surrogatepass"))
    return KeptAnswer(
        turn.key + answer,
        Beginning(turn.characters, turn.hashed.digest()),
        Beginning(turn.characters + len(text), whole.digest()),
    )
