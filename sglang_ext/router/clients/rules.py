"""The table of clients: rows that name sessions and rules that repair prompts, read from TOML.

``client_rules.toml`` ships with the router and documents the form; a file of the operator's is put before it.
"""

from __future__ import annotations

import enum
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from sglang_ext.errors import ConfigError

FLAG = "--client-rules"
AUTO, OFF = "auto", "off"
MAX_FILE_BYTES = 1 << 20
MAX_PATTERN_CHARACTERS = 500

Word = TypeVar("Word", bound=enum.StrEnum)


class Action(enum.StrEnum):
    """The treatment of the part of a prompt that a rule matches."""

    DROP = "drop"
    REPLACE = "replace"
    PIN = "pin"
    LAST = "last"
    SORT = "sort"


class Where(enum.StrEnum):
    """The part of a request that a rule looks at."""

    SYSTEM = "system"
    USER = "user"
    TOOLS = "tools"


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A place in which clients name their sessions: one of ``header``, ``field`` and ``cookie``."""

    header: str = ""
    """In lower case."""
    field: tuple[str, ...] = ()
    """Keys that lead to a value of the body."""
    cookie: str = ""
    agent: str = ""
    """A header with the name of a sub-agent, in lower case."""
    match: re.Pattern[str] | None = None
    """Its group is the name."""
    client: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A repair of prompts."""

    name: str
    why: str
    action: Action
    where: Where
    on: bool
    contains: bytes = b""
    match: re.Pattern[str] | None = None
    """None for ``SORT`` only."""
    at_start: bool = False
    replacement: str = ""
    tenants: frozenset[str] | None = None
    """None for all requests."""


@dataclass(frozen=True, slots=True)
class ClientRules:
    """The table."""

    sessions: tuple[SessionRow, ...]
    rules: tuple[Rule, ...]

    def with_rules_off(self) -> ClientRules:
        """The same sessions, and no rule."""
        return replace(self, rules=())


@cache
def shipped() -> ClientRules:
    """The table that comes with the router."""
    text = resources.files(__package__).joinpath("client_rules.toml").read_text(encoding="utf-8")
    return parse_rules(tomllib.loads(text))


def rules_of(value: str) -> ClientRules:
    """The table by ``--client-rules``: ``auto``, ``off``, or a file that is put before the shipped one.

    Raises:
        ConfigError: the file cannot be read, or a row is wrong; names the row.
    """
    if value == AUTO:
        return shipped()
    if value == OFF:
        return shipped().with_rules_off()
    try:
        with Path(value).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{value} is larger than {MAX_FILE_BYTES} bytes", field=FLAG)
        table = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(
            f"cannot read {value}: {error.strerror or error}",
            field=FLAG,
            hint="Give auto, off or a TOML file",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{value} is not TOML: {error}", field=FLAG) from error
    return parse_rules(table, before=shipped())


def parse_rules(table: Mapping[str, Any], before: ClientRules | None = None) -> ClientRules:
    """The table in parsed TOML.

    Args:
        before: the table that this one adds to. Sessions of ``table`` come first; its rules come last, or in
            the place of the rule that has their name.

    Raises:
        ConfigError: a row is wrong; names the row and the key.
    """
    _check_keys(table, {"session", "rule"}, "the file")
    rows = [_session(row, f"session[{at}]") for at, row in _rows(table, "session")]
    rules = {} if before is None else {rule.name: rule for rule in before.rules}
    for at, row in _rows(table, "rule"):
        rule = _rule(row, f"rule[{at}]", rules)
        rules[rule.name] = rule
    return ClientRules(
        sessions=(*rows, *(() if before is None else before.sessions)), rules=tuple(rules.values())
    )


def _rows(table: Mapping[str, Any], name: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    rows = table.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _wrong(name, f"write its rows as [[{name}]]")
    return enumerate(rows)


def _session(row: Mapping[str, Any], where: str) -> SessionRow:
    _check_keys(row, {"header", "field", "cookie", "agent", "match", "client"}, where)
    header, field, cookie = (_text(row, key, where) for key in ("header", "field", "cookie"))
    if sum(bool(value) for value in (header, field, cookie)) != 1:
        raise _wrong(where, "needs one of header, field and cookie")
    pattern = _pattern(row, where)
    if pattern is not None and pattern.groups != 1:
        raise _wrong(f"{where}.match", f"needs one group, which is the session's name, not {pattern.groups}")
    return SessionRow(
        header=header.lower(),
        field=tuple(field.split(".")) if field else (),
        cookie=cookie,
        agent=_text(row, "agent", where).lower(),
        match=pattern,
        client=_text(row, "client", where),
    )


def _rule(row: Mapping[str, Any], where: str, known: Mapping[str, Rule]) -> Rule:
    keys = {"name", "why", "on", "where", "at", "contains", "match", "action", "with", "tenants"}
    _check_keys(row, keys, where)
    name = _text(row, "name", where)
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", name):
        raise _wrong(f"{where}.name", "must be of small letters, digits and hyphens, at most 64")
    on = row.get("on", True)
    if not isinstance(on, bool):
        raise _wrong(f"{where}.on", "must be true or false")
    tenants = _tenants(row, where)
    if name in known and row.keys() <= {"name", "on", "tenants"}:
        return replace(known[name], on=on, tenants=tenants)
    action = _word(Action, row, "action", where)
    place = _word(Where, row, "where", where)
    pattern = _pattern(row, where)
    if (action is Action.SORT) != (place is Where.TOOLS):
        raise _wrong(where, 'has to have action = "sort" and where = "tools" together')
    if (pattern is None) != (action is Action.SORT):
        raise _wrong(f"{where}.match", "is needed by every action but sort")
    start = _text(row, "at", where)
    if start not in ("", "start"):
        raise _wrong(f"{where}.at", 'can only be "start"')
    contains = _text(row, "contains", where)
    if not contains.isascii() or not set(contains).isdisjoint('"<>&\\/'):
        raise _wrong(f"{where}.contains", "must be ASCII without quotes, slashes and angle brackets")
    replacement = _text(row, "with", where)
    if pattern is not None and action is Action.REPLACE:
        _check_replacement(pattern, replacement, where)
    return Rule(
        name=name,
        why=_text(row, "why", where),
        action=action,
        where=place,
        on=on,
        contains=contains.encode(),
        match=pattern,
        at_start=start == "start",
        replacement=replacement,
        tenants=tenants,
    )


def _tenants(row: Mapping[str, Any], where: str) -> frozenset[str] | None:
    names = row.get("tenants")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(f"{where}.tenants", "must be an array of names")
    return frozenset(names)


def _word(kind: type[Word], row: Mapping[str, Any], key: str, where: str) -> Word:
    try:
        return kind(row.get(key, ""))
    except ValueError:
        raise _wrong(f"{where}.{key}", f"must be one of {', '.join(kind)}") from None


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str):
        raise _wrong(f"{where}.{key}", "must be a string")
    return value


def _pattern(row: Mapping[str, Any], where: str) -> re.Pattern[str] | None:
    text = _text(row, "match", where)
    if not text:
        return None
    if len(text) > MAX_PATTERN_CHARACTERS:
        raise _wrong(f"{where}.match", f"is longer than {MAX_PATTERN_CHARACTERS} characters")
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise _wrong(f"{where}.match", f"is not a regular expression: {error}") from None
    if pattern.match("") is not None:
        raise _wrong(f"{where}.match", "matches an empty text")
    return pattern


def _check_replacement(pattern: re.Pattern[str], replacement: str, where: str) -> None:
    groups = [int(number) for number in re.findall(r"\\(\d+)", replacement)]
    if any(number > pattern.groups for number in groups) or "\\g" in replacement:
        raise _wrong(f"{where}.with", f"may name the groups \\1 to \\{pattern.groups} of match")


def _check_keys(row: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    names: Sequence[str] = sorted(known)
    for key in row:
        if key not in names:
            raise _wrong(where, f"has no key {key!r}; it has {', '.join(names)}")


def _wrong(where: str, why: str) -> ConfigError:
    return ConfigError(f"{where} {why}", field=FLAG)
