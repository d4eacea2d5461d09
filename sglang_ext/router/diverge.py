"""``sglang-ext diverge``: the turns in a log that left the tokens of their session's last turn, and why."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import orjson

from sglang_ext.errors import SglangExtError
from sglang_ext.flags import REQUIRED, Flagged, flag
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.job import PromptInput
from sglang_ext.router.clients.divergence import Divergence, Turn, common_tokens, find_divergence
from sglang_ext.router.clients.repairs import repair
from sglang_ext.router.clients.request_logs import LoggedBody, read_requests
from sglang_ext.router.clients.rules import ClientRules, Rule, shipped
from sglang_ext.router.clients.sessions import session_of
from sglang_ext.router.estimate.prompts import LIMITS, Reader, Tokens, Units, lines_of
from sglang_ext.router.hints.session_memory import SessionMemory
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tokens.chat_template import CannotRender
from sglang_ext.router.tokens.tools import tool_names

PROG = "sglang-ext diverge"
FAILED = 2
BLOCK_SIZE = 16
SHOWN = 10
"""Differences that are shown, of each run those that cost most."""
_SPACE = ("tokens", None, None, None)
_MOST_CONVERSATIONS = 64
"""Conversations without a name that a request is compared with."""


@dataclass(frozen=True, kw_only=True)
class Arguments(Flagged):
    """Flags of the command."""

    prog = PROG
    description = (
        "Read requests from a log, and say how much turns have in common with the last of their session, "
        "where they leave it, why, and which rule of --client-rules repairs that. The log has a JSON object "
        "in each line: bodies of OpenAI's or Anthropic's API, OpenAI's batches, LiteLLM's payloads, or what "
        "an SGLang server writes with --log-requests --log-requests-level 3 --log-requests-format json."
    )

    file: str = flag(REQUIRED, "The log; - for standard input.", positional=True)
    model_path: str | None = flag(
        None,
        "A folder with the model's tokenizer and chat template. Without it, lengths are in units of 4 bytes.",
        metavar="PATH",
        common=True,
    )


@dataclass
class Found:
    """The sums over a log, before or after repairs."""

    requests: int = 0
    prompt_tokens: int = 0
    shared: int = 0
    """Tokens that turns had in common with the last one of their session, in whole blocks."""
    lost: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(Cause, rule) -> tokens."""
    worst: list[tuple[str, Divergence]] = field(default_factory=list)
    """(Session, difference), those that cost most."""

    def add(self, turn: Turn, last: Turn | None, session: str, found: Divergence | None) -> None:
        """Count a turn."""
        self.requests += 1
        self.prompt_tokens += turn.prompt_tokens
        if last is not None:
            common = min(common_tokens(last.key, turn.key), turn.prompt_tokens - 1)
            self.shared += max(0, common) // BLOCK_SIZE * BLOCK_SIZE
        if found is not None:
            self.lost[found.cause.value, found.rule] += found.lost
            self.worst.append((session, found))
            self.worst.sort(key=lambda each: -each[1].lost)
            del self.worst[SHOWN:]


class Comparison:
    """Compares the turns of a log.

    Args:
        rules: the table.
        applied: repairs that are made first.
    """

    def __init__(self, reader: Reader, rules: ClientRules, applied: Sequence[Rule]) -> None:
        self._reader = reader
        self._rules = rules
        self._applied = applied
        self._sessions = SessionMemory(1 << 30)
        self._unnamed: list[str] = []
        self._pins: dict[tuple[str, str, int], str] = {}
        self.found = Found()
        self.skipped: Counter[str] = Counter()
        """Why requests were passed over."""

    def add(self, logged: LoggedBody) -> None:
        """Take the next request."""
        dialect = DIALECTS.get(logged.path)
        if dialect is None:
            self.skipped[f"no API here has the path {logged.path[:80]}"] += 1
            return
        body = orjson.loads(orjson.dumps(logged.body))
        named = session_of(logged.headers, body, self._rules.sessions) or logged.session
        repair(dialect, body, self._applied, lambda rule, at, text: self._pin(named, rule, at, text))
        try:
            turn = self._turn(dialect, body, logged.answer)
        except RequestRefused as refused:
            self.skipped[refused.message[:120]] += 1
            return
        except CannotRender as error:
            self.skipped[str(error)[:120]] += 1
            return
        if turn is None:
            self.skipped["several prompts in one request, or pictures"] += 1
            return
        session = named or _first_words(body) or self._find_unnamed(turn)
        last = self._sessions.last_turn(session, _SPACE, turn)
        found = None
        if last is not None:
            found = find_divergence(last, turn, self._rules.rules, BLOCK_SIZE, self._reader.decode)
        self.found.add(turn, last, session, found)
        self._sessions.learn(session, _SPACE, turn)

    def _turn(self, dialect: Dialect, body: dict[str, object], answer: str) -> Turn | None:
        prompts = dialect.parse(body, LIMITS).prompts
        if len(prompts) != 1 or prompts[0].media:
            return None
        key = self._reader.encode(prompts[0])
        tools = tool_names(prompts[0].chat)
        tail = self._reader.encode(PromptInput(text=answer)) if answer and prompts[0].chat is None else b""
        return Turn(key + tail, len(key) // TOKEN_BYTES, tools)

    def _find_unnamed(self, turn: Turn) -> str:
        """The conversation without a name that the turn goes on with, or a new one."""
        best, most = "", 0
        for name in self._unnamed:
            last = self._sessions.last_turn(name, _SPACE, turn)
            common = 0 if last is None else common_tokens(last.key, turn.key)
            if last is not None and common > most and 2 * common >= last.prompt_tokens:
                best, most = name, common
        if not best:
            best = f"conversation {len(self._sessions) + 1}"
            self._unnamed = [*self._unnamed[1 - _MOST_CONVERSATIONS :], best]
        return best

    def _pin(self, session: str, rule: str, at: int, text: str) -> str:
        return self._pins.setdefault((session, rule, at), text) if session else text


def compare(
    requests: Iterable[LoggedBody], reader: Reader, rules: ClientRules
) -> tuple[Comparison, Comparison]:
    """The turns as they were sent, and as the rules that are on repair them."""
    sent = Comparison(reader, rules, ())
    repaired = Comparison(reader, rules, [rule for rule in rules.rules if rule.on])
    for request in requests:
        sent.add(request)
        repaired.add(request)
    return sent, repaired


def report(sent: Comparison, repaired: Comparison, unit: str) -> Iterator[str]:
    """The lines for people. unit: the name of the lengths."""
    one, other = sent.found, repaired.found
    yield f"{one.requests:,} requests, {one.prompt_tokens:,} {unit} of prompts"
    for name, found in (("as sent", one), ("with the rules that are on", other)):
        share = 100 * found.shared / found.prompt_tokens if found.prompt_tokens else 0.0
        yield f"  in common with the last turn, {name}: {found.shared:,} {unit} ({share:.0f} %)"
    for name, found in (("as sent", one), ("with the rules that are on", other)):
        if found.lost:
            yield f"lost by differences, {name}:"
        for (cause, rule), tokens in found.lost.most_common():
            way_out = f", repaired by rule {rule}" if rule else ""
            yield f"  {tokens:,} {unit}: {cause}{way_out}"
    if one.worst:
        yield "the differences that cost most, as sent:"
    for session, difference in one.worst:
        yield f"  {session}: {difference.sentence()}"
    for why, count in sent.skipped.most_common():
        yield f"passed over {count:,}: {why}"


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Print the report. Returns the exit status."""
    try:
        given = Arguments.parse(arguments, epilog=f"Exit status: 0, or {FAILED} when the log cannot be read.")
        reader = Units() if given.model_path is None else Tokens(given.model_path)
        sent, repaired = compare(read_requests(lines_of(given.file)), reader, shipped())
    except SglangExtError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return FAILED
    unit = "units of 4 bytes" if given.model_path is None else "tokens"
    for line in report(sent, repaired, unit):
        out.write(line + "\n")
    return 0


def _first_words(body: dict[str, Any]) -> str:
    """A name for a conversation without one, by the first message of its user; empty without messages."""
    messages = body.get("messages") or body.get("input")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            return "conversation " + hashlib.sha256(orjson.dumps(message.get("content"))).hexdigest()[:8]
    return ""
