"""Diagnoses of caches: answers state where their request left an earlier one, if the client asks for that.

The APIs' documentation: Anthropic's "Cache diagnostics", OpenAI's "Prompt cache diagnostics".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.api.dialect import AnswerEdit, Diagnosis, DiagnosisAsked, Part
from sglang_ext.router.api.job import Chat
from sglang_ext.router.api.validation import Json
from sglang_ext.router.clients.divergence import common_tokens
from sglang_ext.router.tenancy.admitted import Admitted
from sglang_ext.router.tenancy.bounded import Bounded, size_of
from sglang_ext.router.tokens.encoded import Encoded

_DIGEST_BYTES = 8
_OPTIONS = ("tool_choice", "chat_template_kwargs")
"""Fields of a chat, beside its parts, that templates may render."""


class Fingerprint(msgspec.Struct, frozen=True):
    """The prompt of a request, and digests of the parts that it was made of."""

    namespace: tuple[str | None, ...]
    key: bytes
    system: bytes
    tools: bytes
    messages: bytes | None
    """Of each message, one after another; None where they are not compared."""
    effort: bytes
    options: bytes


class Diagnosed:
    """The part of one request in diagnoses.

    Args:
        edit: states the difference in the answer; None where the client did not ask.
        remember: called with the answer's id.
    """

    __slots__ = ("edit", "remember")

    def __init__(self, edit: AnswerEdit | None, remember: Callable[[str], None]) -> None:
        self.edit = edit
        self.remember = remember


class Diagnoses:
    """Compares requests with earlier ones, by the ids of their answers.

    Args:
        max_bytes: of the fingerprints that are kept; the oldest are forgotten.
        block_size: tokens of a block, the unit in which KV is reused.
    """

    def __init__(self, max_bytes: int, block_size: int) -> None:
        self._kept: Bounded[tuple[str, str], Fingerprint] = Bounded(max_bytes, _size)
        self._block_size = block_size

    def begin(self, asked: DiagnosisAsked, admitted: Admitted, prompt: Encoded, scope: str) -> Diagnosed:
        """A request is on its way.

        Args:
            prompt: its only one.
            scope: of its client; requests of other scopes are not found.
        """
        job, now = admitted.job, None
        chat = job.prompts[0].chat
        if chat is not None and job.pinned_to is None:  # else the server puts the earlier turns before it
            now = fingerprint(chat, prompt.known, by_message=asked.by_message)
        edit = None
        if asked.answered:
            edit = _Statement(admitted.dialect.diagnosis(self._compare(asked.answer_id, scope, now)))

        def remember(answer_id: str) -> None:
            if now is not None:
                self._kept.put((scope, answer_id), now)

        return Diagnosed(edit, remember)

    def _compare(self, answer_id: str | None, scope: str, now: Fingerprint | None) -> Diagnosis | None:
        if answer_id is None:
            return None
        last = self._kept.use((scope, answer_id))
        if last is None:
            return Diagnosis(known=False)
        return Diagnosis(part=Part.UNKNOWN) if now is None else compare(last, now, self._block_size)

    @property
    def size_bytes(self) -> int:
        """Memory of all fingerprints."""
        return self._kept.size_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"Diagnoses({self._kept})"


class _Statement(AnswerEdit):
    """Puts fields into the answer."""

    def __init__(self, fields: Json) -> None:
        super().__init__(b'"id"')
        self._fields = fields

    def edit(self, answer: Json) -> bool:
        if not isinstance(answer.get("id"), str):
            return False
        answer.update(self._fields)
        return True


def fingerprint(chat: Chat, prompt: Encoded, *, by_message: bool) -> Fingerprint:
    """The fingerprint of a request.

    Args:
        prompt: as far as its tokens are known.
    """
    payload = chat.payload
    messages = payload["messages"]
    begin = 0
    while begin < len(messages) and messages[begin].get("role") == "system":
        begin += 1
    return Fingerprint(
        prompt.namespace,
        prompt.key,
        system=_digest(messages[:begin]),
        tools=_digest(payload.get("tools")),
        messages=b"".join(map(_digest, messages[begin:])) if by_message else None,
        effort=_digest(payload.get("reasoning_effort")),
        options=_digest([payload.get(name) for name in _OPTIONS]),
    )


def compare(last: Fingerprint, now: Fingerprint, block_size: int) -> Diagnosis:
    """The first difference between two requests, as far as whole blocks of the earlier one's KV are lost."""
    reusable = len(last.key) // TOKEN_BYTES
    if last.namespace[1:2] != now.namespace[1:2]:
        return Diagnosis(part=Part.MODEL, missed=reusable, reusable=reusable)
    if last.namespace[1:] != now.namespace[1:]:
        return Diagnosis(part=Part.UNKNOWN, reusable=reusable)
    # Tokens of one prompt and the text of another cannot be compared.
    at = common_tokens(last.key, now.key) if last.namespace == now.namespace else 0
    # The last token of a prompt is always computed.
    could = min(reusable, len(now.key) // TOKEN_BYTES - 1) // block_size * block_size
    missed = could - at // block_size * block_size
    if missed <= 0:
        return Diagnosis(reusable=reusable)
    return Diagnosis(part=_first_part(last, now), missed=missed, reusable=reusable)


def _first_part(last: Fingerprint, now: Fingerprint) -> Part:
    if last.system != now.system:
        return Part.SYSTEM
    if last.tools != now.tools:
        return Part.TOOLS
    if last.messages is not None and not (now.messages or b"").startswith(last.messages):
        return Part.MESSAGES
    if last.effort != now.effort:
        return Part.EFFORT
    if last.options != now.options or last.messages is not None or last.namespace != now.namespace:
        return Part.UNKNOWN
    return Part.MESSAGES


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(orjson.dumps(value), digest_size=_DIGEST_BYTES).digest()


def _size(key: tuple[str, str], kept: Fingerprint) -> int:
    digests = size_of(kept.system, kept.tools, kept.messages or b"", kept.effort, kept.options)
    return size_of(*key, *kept.namespace, kept.key) + digests
