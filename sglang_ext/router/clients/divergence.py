"""Where a turn leaves the tokens of its session's last turn, and why. Pure functions.

Keys are token ids of four bytes each (``keys.encode_tokens``). A client that sends its conversation unchanged
plus a new turn diverges nowhere: all KV of the last turn, its answer included, can be reused.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence

import msgspec

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.clients.rules import Rule

_NEAR, _AFTER = 12, 52
"""Tokens before and after the first different one, in which its cause is looked for."""
_FAR = 128
"""Tokens before it, in which the beginning of a rule's match may be."""
_SHOWN_WORDS = 4
_SHOWN_CHARACTERS = 120
_GENERATION_TOKENS = 8
"""Tokens that a template puts in front of an answer, at most, and only there."""
_MOVED_TOKENS = 16
_SAMPLES = 8
_DATE = re.compile(
    r"\d{4}-\d\d|\d{1,2}:\d\d|\d{1,2}/\d{1,2}/\d{2,4}"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d"
)


class Cause(enum.StrEnum):
    """Why a turn left the tokens of the last one."""

    RULE = "rule"
    """A rule of the table repairs it, if it is switched on."""
    DATE = "date"
    TOOLS_REORDERED = "tools-reordered"
    TOOLS_CHANGED = "tools-changed"
    REASONING_STRIPPED = "reasoning-stripped"
    """The template leaves the reasoning of earlier answers out."""
    ANSWER_CHANGED = "answer-changed"
    """The client, or the template, has another form of the answer than the model generated."""
    HISTORY_TRUNCATED = "history-truncated"
    """Turns were left out, and later ones follow in their place."""
    HISTORY_REWRITTEN = "history-rewritten"
    """Such as by a summary."""
    CHANGED_EARLY = "changed-early"
    """Another text at that place, for a reason that cannot be seen."""


class Turn(msgspec.Struct, frozen=True):
    """The last request of a session, as far as the next one is compared with it."""

    key: bytes
    """Of the prompt and its answer."""
    prompt_tokens: int
    tools: tuple[str, ...] = ()
    """Names of the tools, in their order."""


class Divergence(msgspec.Struct, frozen=True):
    """The place at which a turn left the last one."""

    at: int
    """Tokens in common."""
    lost: int
    """Tokens after these that the turn would have had in common, in whole blocks."""
    cause: Cause
    rule: str = ""
    before: str = ""
    after: str = ""
    """The words there, in the last turn and in this one."""

    def sentence(self) -> str:
        """The place in words, for people."""
        words = f": `{self.before}` -> `{self.after}`" if self.before or self.after else f" ({self.cause})"
        saves = f"; rule `{self.rule}` saves {self.lost:,} tokens" if self.rule else ""
        return f"differs from its last turn at token {self.at}{words}{saves}"


def find_divergence(
    last: Turn,
    turn: Turn,
    rules: Sequence[Rule],
    block_size: int,
    decode: Callable[[bytes], str],
) -> Divergence | None:
    """Compare a turn with its session's last one; None if no whole block is lost by a difference, or if it is
    a turn of another conversation.

    Args:
        turn: ``key`` is of its prompt; an answer after that does not matter.
        rules: all of the table, those that are off included.
        decode: from token ids to their text.
    """
    shortest = min(len(last.key), turn.prompt_tokens * TOKEN_BYTES, len(turn.key))
    if last.key[:shortest] == turn.key[:shortest]:
        return None
    at = common_tokens(last.key, turn.key)
    # The last token of a prompt is always computed.
    could = min(len(last.key) // TOKEN_BYTES, turn.prompt_tokens - 1) // block_size * block_size
    lost = could - at // block_size * block_size
    if lost <= 0 or _is_another_conversation(last, turn, at):
        return None
    before, after = (decode(_window(key, at, _FAR)) for key in (last.key, turn.key))
    words = first_difference(before, after)
    if (rule := _repairing(before, after, rules)) is not None:
        return Divergence(at, lost, Cause.RULE, rule.name, *words)
    near = [decode(_window(key, at, _NEAR)) for key in (last.key, turn.key)]
    cause = _cause(last, turn, at, near, words)
    sorting = next((rule.name for rule in rules if rule.match is None), "")
    return Divergence(at, lost, cause, sorting if cause is Cause.TOOLS_REORDERED else "", *words)


def common_tokens(one: bytes, other: bytes) -> int:
    """Tokens that two keys begin with in common."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        begin = low * TOKEN_BYTES
        # The common part is compared once: each step looks at the half that is undecided.
        if one[begin : middle * TOKEN_BYTES] == other[begin : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def first_difference(one: str, other: str) -> tuple[str, str]:
    """The first words that differ, from both texts, each no longer than is shown."""
    ones, others = one.split(), other.split()
    same = 0
    while same < min(len(ones), len(others)) and ones[same] == others[same]:
        same += 1
    count = _SHOWN_WORDS
    for words in range(1, _SHOWN_WORDS):
        if ones[same + words : same + words + 1] == others[same + words : same + words + 1]:
            count = words
            break
    shown = [" ".join(words[same : same + count])[:_SHOWN_CHARACTERS] for words in (ones, others)]
    return shown[0], shown[1]


def _is_another_conversation(last: Turn, turn: Turn, at: int) -> bool:
    """Whether little is in common, and of samples of the last turn's rest none stands in the turn."""
    end = len(last.key) // TOKEN_BYTES
    if 2 * at >= min(end, turn.prompt_tokens):
        return False
    step = max(1, (end - at) // _SAMPLES)
    return all(
        last.key[begin * TOKEN_BYTES : (begin + _MOVED_TOKENS) * TOKEN_BYTES] not in turn.key
        for begin in range(at + step // 2, end - _MOVED_TOKENS + 1, step)
    )


def _window(key: bytes, at: int, before: int) -> bytes:
    return key[max(0, at - before) * TOKEN_BYTES : (at + _AFTER) * TOKEN_BYTES]


def _cause(last: Turn, turn: Turn, at: int, near: Sequence[str], words: tuple[str, str]) -> Cause:
    """The cause of a difference that no rule repairs. near: both texts around it; words: the first others."""
    if last.tools != turn.tools and at < last.prompt_tokens:
        same = sorted(last.tools) == sorted(turn.tools)
        return Cause.TOOLS_REORDERED if same else Cause.TOOLS_CHANGED
    if at >= last.prompt_tokens - _GENERATION_TOKENS:
        stripped = "think>" in near[0] and "think>" not in near[1]
        return Cause.REASONING_STRIPPED if stripped else Cause.ANSWER_CHANGED
    if all(map(_DATE.search, words)):
        return Cause.DATE
    if _comes_later(last.key, turn.key, at):
        return Cause.HISTORY_TRUNCATED
    if 2 * turn.prompt_tokens < len(last.key) // TOKEN_BYTES:
        return Cause.HISTORY_REWRITTEN
    return Cause.CHANGED_EARLY


def _repairing(before: str, after: str, rules: Sequence[Rule]) -> Rule | None:
    """The first rule that matches both texts in different parts."""
    for rule in rules:
        if rule.match is not None:
            found, other = rule.match.search(before), rule.match.search(after)
            if found is not None and other is not None and found.group() != other.group():
                return rule
    return None


def _comes_later(last: bytes, turn: bytes, at: int) -> bool:
    """Whether the tokens of ``turn`` from a place on stand later in ``last``."""
    wanted = turn[at * TOKEN_BYTES : (at + _MOVED_TOKENS) * TOKEN_BYTES]
    if len(wanted) < _MOVED_TOKENS * TOKEN_BYTES:
        return False
    found = last.find(wanted, at * TOKEN_BYTES)
    while found >= 0:
        if found % TOKEN_BYTES == 0:
            return True
        found = last.find(wanted, found + 1)
    return False
