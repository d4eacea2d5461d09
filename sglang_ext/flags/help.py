"""``--help`` and the reference of flags: the common ones first, the others on request, by level or group."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from sglang_ext.flags.field import Flag

COMMON, ADVANCED, ALL = "common", "advanced", "all"
LEVELS = (COMMON, ADVANCED, ALL)


def group_word(group: str) -> str:
    """The word that stands for a group behind ``--help``: the first of its heading."""
    return group.split()[0].lower() if group else ""


def help_words(options: Sequence[Flag]) -> tuple[str, ...]:
    """The words that ``--help`` takes: levels, then groups."""
    groups = dict.fromkeys(group_word(one.group) for one in options if one.group and not one.internal)
    return *LEVELS, *groups


def chosen(options: Sequence[Flag], word: str) -> Callable[[Flag], bool]:
    """Whether ``--help WORD`` shows a flag. Without common flags, all are."""
    leveled = any(one.common for one in options)

    def shown(one: Flag) -> bool:
        if one.internal:
            return False
        if word == COMMON:
            return one.common or one.is_required or not leveled
        if word in LEVELS:
            return word == ALL or not one.common
        return group_word(one.group) == word

    return shown


def more_help(options: Sequence[Flag], word: str) -> str:
    """The last line of ``--help``: how to see the other flags; empty where there are none."""
    visible = [one for one in options if not one.internal]
    hidden = sum(not chosen(options, word)(one) for one in visible)
    if not hidden:
        return ""
    groups = help_words(options)[len(LEVELS) :]
    behind = f", --help GROUP for one group: {', '.join(groups)}" if groups else ""
    return (
        f"{hidden} more flags: --help all for every flag, --help advanced for the less common ones{behind}."
    )


class Help(argparse.Action):
    """``--help [WORD]``: prints the flags of a level or group, and ends the program."""

    def __init__(self, *, show: Callable[[str], str], groups: Sequence[str], **about: Any) -> None:
        text = "show the common flags, or those of WORD (all, advanced, or a group), and exit"
        if len(groups) == len(LEVELS):
            text = "show this help message and exit"
        super().__init__(
            **{**about, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "nargs": "?"},
            help=text,
            metavar="WORD",
        )
        self._show = show
        self._groups = groups

    def __call__(
        self, parser: argparse.ArgumentParser, _args: Any, value: Any, option_string: str | None = None
    ) -> NoReturn:
        word = COMMON if value is None else str(value)
        if word not in self._groups:
            parser.error(f"argument {option_string}: {word!r} is not one of {', '.join(self._groups)}")
        sys.stdout.write(self._show(word))
        parser.exit()


class Removed(argparse.Action):
    """A flag of an earlier version: refused, naming its replacement."""

    def __init__(self, *, instead: str, **about: Any) -> None:
        kept = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "nargs": "?"}
        super().__init__(**{**about, **kept}, help=argparse.SUPPRESS)
        self._instead = instead

    def __call__(
        self, parser: argparse.ArgumentParser, _args: Any, _value: Any, option_string: str | None = None
    ) -> NoReturn:
        parser.error(f"there is no flag {option_string} any more; use {self._instead}")


def _row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    written = (" ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return f"| {' | '.join(written)} |"


def _default(one: Flag) -> str:
    if one.is_required:
        return "required"
    return f"`{one.default_text}`" if one.default_text else ""


def _rows(one: Flag, columns: Mapping[str, bool]) -> list[str]:
    """The rows of a flag: its own, that of its file, and one for each setting."""

    def row(name: str, variable: str | None, default: str, text: str) -> str:
        level = "common" if one.common else "advanced"
        cells = {"flag": name, "level": level, "environment": f"`{variable}`" if variable else ""}
        cells |= {"default": default, "meaning": text}
        return _row([cell for column, cell in cells.items() if columns[column]])

    form = one.form.replace("[", "\\[")  # "[:N][,NAME...]" would be a link
    value = "" if one.is_switch or one.form == one.name.upper() else f" {form}"
    found = [row(f"`{one.name}`{value}", one.variable, _default(one), one.help)]
    if one.file:
        text = f"The file (mode 0600) with the value of `{one.name}`."
        found.append(row(f"`{one.name}-file` FILE", None, "", text))
    for each in one.settings:
        found.append(row(f"`{one.name}` `{each.key}=`{each.form}", None, _default(each), each.help))
    return found


def markdown(options: Sequence[Flag], variables: Sequence[Flag]) -> str:
    """The reference: a table of flags per group, then the settings that are environment variables alone."""
    visible = [one for one in options if not one.internal]
    leveled = any(one.common for one in visible)
    columns = {"flag": True, "level": leveled, "environment": any(one.variable for one in visible)}
    columns |= {"default": True, "meaning": True}
    head = [column for column, there in columns.items() if there]
    lines: list[str] = []
    if leveled:
        lines += ["`--help` shows the common flags, `--help all` the advanced ones too."]
    group = None
    for one in sorted(visible, key=_order(visible)):
        if one.group != group:
            group = one.group
            lines += ["", *((f"## {group}", "") if group else ()), _row(head), _row(["---"] * len(head))]
        lines += _rows(one, columns)
    if variables:
        head = ["environment", "default", "meaning"]
        lines += ["", "## Environment variables without a flag", "", _row(head), _row(["---"] * len(head))]
        lines += [_row((f"`{one.variable}`", _default(one), one.help)) for one in variables]
    return "\n".join(lines).lstrip("\n") + "\n"


def _order(options: Sequence[Flag]) -> Callable[[Flag], int]:
    """The groups in the order of their first flags."""
    places = {group: at for at, group in enumerate(dict.fromkeys(one.group for one in options))}
    return lambda one: places[one.group]
