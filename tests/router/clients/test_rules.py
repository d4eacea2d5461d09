"""The table of clients: the shipped one, files of operators, and errors that name the row."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.router.clients.rules import Action, ClientRules, parse_rules, rules_of, shipped

RULE = """
[[rule]]
name = "stamp"
where = "system"
match = 'stamp \\d+'
action = "drop"
"""


def parsed(text: str, before: ClientRules | None = None) -> ClientRules:
    return parse_rules(tomllib.loads(text), before)


def test_rules_that_ship_say_why_and_change_no_meaning_unasked() -> None:
    rules = shipped().rules
    assert all(rule.why for rule in rules)
    assert {rule.name for rule in rules if rule.on} == {"claude-code-billing", "claude-code-version"}


def test_a_file_goes_before_the_table(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[session]]\nheader = "X-Talk"\n' + RULE, encoding="utf-8")
    table = rules_of(str(file))
    assert [row.header for row in table.sessions][:2] == ["x-talk", "x-session-id"]
    assert table.rules[:-1] == shipped().rules
    assert (table.rules[-1].name, table.rules[-1].action, table.rules[-1].on) == ("stamp", Action.DROP, True)


def test_off_leaves_the_sessions() -> None:
    assert rules_of("off").rules == ()
    assert rules_of("off").sessions == shipped().sessions
    assert rules_of("auto") is shipped()


def test_a_rule_is_switched_by_its_name() -> None:
    table = parsed('[[rule]]\nname = "date"\non = true\ntenants = ["a"]', shipped())
    before = next(rule for rule in shipped().rules if rule.name == "date")
    after = next(rule for rule in table.rules if rule.name == "date")
    assert (after.on, after.tenants, after.match) == (True, frozenset("a"), before.match)
    assert [rule.name for rule in table.rules] == [rule.name for rule in shipped().rules], "in its place"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("sessions = 3", "the file has no key 'sessions'"),
        ("session = 3", r"session write its rows as \[\[session\]\]"),
        ("[[session]]", r"session\[0\] needs one of header, field and cookie"),
        ('[[session]]\nheader = "a"\ncookie = "b"', r"session\[0\] needs one of"),
        ("[[session]]\nheader = 3", r"session\[0\].header must be a string"),
        ('[[session]]\nfield = "a"\nmatch = "b"', r"session\[0\].match needs one group"),
        ('[[session]]\nfield = "a"\nmatch = "("', r"session\[0\].match is not a regular expression"),
        (RULE + RULE.replace("stamp", "Stamp", 1), r"rule\[1\].name must be of small letters"),
        (RULE + "on = 1", r"rule\[0\].on must be true or false"),
        (RULE + 'at = "end"', r'rule\[0\].at can only be "start"'),
        (RULE + 'tenants = "a"', r"rule\[0\].tenants must be an array"),
        (RULE + "contains = '<a>'", r"rule\[0\].contains must be ASCII without quotes"),
        (RULE + "wher = 1", r"rule\[0\] has no key 'wher'; it has action, at"),
        (RULE.replace("drop", "delete"), r"rule\[0\].action must be one of drop, replace"),
        (RULE.replace("system", "tools"), r'rule\[0\] has to have action = "sort" and where = "tools"'),
        (RULE.replace("stamp \\d+", ".*"), r"rule\[0\].match matches an empty text"),
        (RULE.replace("stamp \\d+", "a" * 501), r"rule\[0\].match is longer than 500"),
        (RULE.replace("match", "why"), r"rule\[0\].match is needed"),
        (RULE.replace('"drop"', '"replace"\nwith = "\\\\1"'), r"rule\[0\].with may name the groups"),
    ],
)
def test_errors_name_the_row_and_the_key(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parsed(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.toml: No such file"):
        rules_of(str(tmp_path / "nowhere.toml"))
    (tmp_path / "bad.toml").write_text("[[session]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        rules_of(str(tmp_path / "bad.toml"))
