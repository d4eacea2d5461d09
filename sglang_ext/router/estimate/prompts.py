"""Prompts of logged requests as keys: in a model's tokens, or in units of 4 bytes of text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final, Protocol

import orjson

from sglang_ext.errors import ConfigError
from sglang_ext.keys import TOKEN_BYTES, encode_tokens
from sglang_ext.router.api.job import PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.fleet.facts import InstanceFacts, ModelFacts
from sglang_ext.router.tokens.prompt_tokenizer import PromptTokenizer, load_tokenizer
from sglang_ext.router.tokens.segments import TokenCache

LIMITS: Final = Limits(vocab_size=1 << 31, context_length=1 << 31)
"""Of a log, whose server has checked its requests."""


class Reader(Protocol):
    """From prompts to keys, and back for people."""

    def encode(self, prompt: PromptInput) -> bytes:
        """The key of a prompt.

        Raises:
            CannotRender: it has none here.
        """

    def decode(self, key: bytes) -> str:
        """The text of a part of a key."""


class Units:
    """Units of 4 bytes of text in the place of tokens. A ``Reader``."""

    def encode(self, prompt: PromptInput) -> bytes:
        """The texts in the order in which templates have them: tools, then messages."""
        if prompt.ids is not None:
            return encode_tokens(prompt.ids)
        if prompt.chat is None:
            text = (prompt.text or "").encode()
        else:
            payload = prompt.chat.payload
            parts = [payload.get("tools") or [], *payload["messages"]]
            text = b"\n".join(orjson.dumps(part) for part in parts)
        return text[: len(text) // TOKEN_BYTES * TOKEN_BYTES]

    def decode(self, key: bytes) -> str:
        """The text."""
        return key.decode(errors="replace")


class Tokens:
    """A model's tokens. A ``Reader``."""

    def __init__(self, path: str) -> None:
        facts = InstanceFacts(ModelFacts(path, "", 1 << 31, 1 << 31), "", "", "", path)
        self._tokenizer = PromptTokenizer(
            load_tokenizer(path, trust_remote_code=False), facts, TokenCache(64 << 20)
        )

    def encode(self, prompt: PromptInput) -> bytes:
        """As the router has them."""
        if prompt.ids is not None:
            return encode_tokens(prompt.ids)
        if prompt.chat is not None:
            return self._tokenizer.encode_chat(prompt.chat)
        return self._tokenizer.encode_text(prompt.text or "")

    def decode(self, key: bytes) -> str:
        """The text of a few tokens."""
        return self._tokenizer.decode(key)


def lines_of(name: str) -> Iterator[bytes]:
    """The lines of a file; of standard input where its name is ``-``.

    Raises:
        ConfigError: it cannot be read.
    """
    if name == "-":
        yield from sys.stdin.buffer
        return
    try:
        with open(name, "rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}", field="FILE") from error
