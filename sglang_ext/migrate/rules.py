"""Rules: for each flag of another product, the flag of this package that replaces it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_ext.errors import UserError

MANY: Final = -1
"""Values up to the next flag."""
NO: Final = frozenset({"", "0", "false", "no", "none", "null", "off"})
"""How a setting is written that is off."""

Words = list[str]


class NoEqualError(UserError):
    """A flag asks for a feature that this package lacks; the message is the reason and the way out."""


@dataclass(frozen=True)
class Rule:
    """Conversion of one flag.

    convert: from its values to flags and values of ours, none where nothing is needed; raises NoEqualError.
    new: this package's flag, as shown in the table. note: the reason, or a remark. values: how many words
        follow the flag. setting: a key that is off by such values as false, where nothing is needed either.
        others: why other values have no equal.
    """

    convert: Callable[[Words], Words]
    new: str
    note: str = ""
    values: int = 1
    setting: bool = False
    others: str = ""

    def apply(self, values: Words) -> Words:
        """Flags and values of ours.

        Raises:
            NoEqualError: there are none.
        """
        if self.setting and (values[0].lower() if values else "") in NO:
            return []
        return self.convert(values)


def to(
    new: str,
    note: str = "",
    *,
    values: int = 1,
    convert: Callable[[str], str] | None = None,
    setting: bool = False,
) -> Rule:
    """A flag of ours with the same values, or with converted ones."""

    def converted(given: Words) -> Words:
        return [new, *(given if convert is None else map(convert, given))]

    return Rule(converted, f"`{new}`", note, values, setting)


def choice(new: str, names: Mapping[str, str], others: str, note: str = "") -> Rule:
    """A flag of ours whose choices have other names; an empty name needs no flag. others: why those that are
    not among them have no equal."""

    def converted(given: Words) -> Words:
        name = names.get(given[0] if given else "")
        if name is None:
            raise NoEqualError(others)
        return [new, name] if name else []

    shown = ", ".join(f"{theirs} → {ours or 'nothing'}" for theirs, ours in names.items())
    return Rule(converted, f"`{new}`: {shown}" if new else shown, note, others=others)


def nothing(note: str, *, values: int = 1) -> Rule:
    """Nothing is needed: it is always so here, or the mechanism that it tunes does not exist."""
    return Rule(lambda _: [], "nothing", note, values)


def no_equal(note: str, *, values: int = 1, setting: bool = False) -> Rule:
    """There is nothing like it."""

    def refuse(_: Words) -> Words:
        raise NoEqualError(note)

    return Rule(refuse, "no equal", note, values, setting)


def each(names: Sequence[str], rule: Rule) -> dict[str, Rule]:
    """The same rule for several flags."""
    return dict.fromkeys(names, rule)
