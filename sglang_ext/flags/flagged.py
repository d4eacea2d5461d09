"""Dataclasses whose fields are flags."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Self

from sglang_ext.errors import ConfigError, InternalError
from sglang_ext.flags.field import Flag
from sglang_ext.flags.help import COMMON, Help, Removed, chosen, help_words, markdown, more_help
from sglang_ext.flags.values import BY_TYPE, one_of


def _type_of(hint: Any) -> tuple[type, tuple[str, ...]]:
    """The class of a field's values, None left out, and the words of a ``Literal``."""
    if typing.get_origin(hint) in (typing.Union, UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not NoneType)
    if typing.get_origin(hint) is typing.Literal:
        return str, typing.get_args(hint)
    return typing.get_origin(hint) or hint, ()


class Flagged:
    """Base of dataclasses whose fields are flags; a field that is not made by :func:`flag` is none.

    Raises:
        ConfigError: from the constructor, when a value cannot work; names the flag.
    """

    prog: ClassVar[str] = ""
    description: ClassVar[str] = ""
    flag_prefix: ClassVar[str] = "--"
    variable_prefix: ClassVar[str] = ""
    """Of the variables of all fields; where it is empty, only flags that name theirs have one."""
    lists: ClassVar[tuple[Flag, ...]] = ()
    """Flags without a value of their own, for fields ``within`` them."""
    removed: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Flags and variables of earlier versions, with their replacements; they are refused by name."""

    def __post_init__(self) -> None:
        for one in self.flags():
            object.__setattr__(self, one.field, one.checked(getattr(self, one.field)))

    @classmethod
    @functools.cache
    def flags(cls) -> tuple[Flag, ...]:
        """Every flag, in the order of ``--help``."""
        hints = typing.get_type_hints(cls)
        found: list[Flag] = []
        for field in dataclasses.fields(typing.cast(Any, cls)):
            one: Flag | None = field.metadata.get("flag")
            if one is None:
                continue
            kind, words = _type_of(hints[field.name])
            dest = cls.flag_prefix.lstrip("-").replace("-", "_") + field.name
            variable = f"{cls.variable_prefix}{field.name.upper()}" if cls.variable_prefix else one.variable
            name = one.name or (dest if one.positional else "--" + dest.replace("_", "-"))
            key = one.key or field.name.replace("_", "-")
            if one.within:
                variable, name = None, f"{one.within} {key}"
            found.append(
                dataclasses.replace(
                    one,
                    field=field.name,
                    type=kind,
                    dest=dest,
                    name=variable or name if one.variable_only else name,
                    key=key if one.within else "",
                    variable=variable,
                    parser=one.parser or (one_of(*words) if words else BY_TYPE.get(kind)),
                    group=one.group or (found[-1].group if found else ""),
                )
            )
        return tuple(found)

    @classmethod
    @functools.cache
    def options(cls) -> tuple[Flag, ...]:
        """The flags of the command line in the order of ``--help``, each with its settings."""
        by_flag: dict[str, list[Flag]] = {}
        for one in cls.flags():
            if one.within:
                by_flag.setdefault(one.within, []).append(one)
        found: list[Flag] = []
        for one in cls.flags():
            if not one.within and not one.variable_only:
                found.append(dataclasses.replace(one, settings=tuple(by_flag.pop(one.name, ()))))
        for one in cls.lists:
            settings = tuple(by_flag.pop(one.name))
            dest = one.name.lstrip("-").replace("-", "_")
            group = one.group or settings[0].group
            last = max((at for at, each in enumerate(found) if each.group == group), default=len(found) - 1)
            word = one.name.removeprefix(cls.flag_prefix).replace("-", "_").upper()
            variable = f"{cls.variable_prefix}{word}" if cls.variable_prefix else None
            made = dataclasses.replace(one, dest=dest, variable=variable, group=group, settings=settings)
            found.insert(last + 1, made)
        if by_flag:
            raise InternalError(f"{cls.__name__} has no flag {', '.join(by_flag)}")
        return tuple(found)

    @classmethod
    def add_cli_args(
        cls,
        parser: argparse.ArgumentParser | argparse._ArgumentGroup,
        shown: Callable[[Flag], bool] = lambda one: not one.internal,
    ) -> None:
        """Add every flag to ``parser``, and those of earlier versions, which it refuses.

        Args:
            shown: ``--help`` shows the flag.
        """
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        for one in cls.options():
            if one.group not in groups:
                flat = isinstance(parser, argparse._ArgumentGroup)
                groups[one.group] = parser if flat else parser.add_argument_group(one.group)
            one.add_to(groups[one.group], shown=shown(one))
        for name, instead in cls.removed.items():
            if name.startswith("-"):
                parser.add_argument(name, action=Removed, instead=instead)

    @classmethod
    def parser(cls, word: str = COMMON, **about: Any) -> argparse.ArgumentParser:
        """The command line.

        Args:
            word: the flags that its help shows: ``common``, ``advanced``, ``all``, or a group.
            about: arguments of ``ArgumentParser``.
        """
        options = cls.options()
        made = argparse.ArgumentParser(
            **{
                "prog": cls.prog,
                "description": cls.description,
                **about,
                "add_help": False,
                "epilog": " ".join(filter(None, (about.get("epilog"), more_help(options, word)))),
            }
        )
        made.add_argument(
            *("-h", "--help"),
            action=Help,
            show=lambda asked: cls.parser(asked, **{**about, "prog": made.prog}).format_help(),
            groups=help_words(options),
        )
        cls.add_cli_args(made, chosen(options, word))
        return made

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None, **about: Any) -> Self:
        """The settings on a command line; ends the program with status 2 when argparse refuses it.

        Raises:
            ConfigError: a value cannot work; the message names the flag.
        """
        return cls.from_cli_args(cls.parser(**about).parse_args(arguments))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The settings that parsed flags and the environment make; other attributes of ``args`` are ignored.

        Raises:
            ConfigError: a value cannot work; the message names the flag.
        """
        return cls.from_user(cls.given(args), os.environ)

    @classmethod
    def given(cls, args: argparse.Namespace) -> dict[str, Any]:
        """The values given on the command line, by field.

        Raises:
            ConfigError: a file that is named cannot be used.
        """
        return {name: value for one in cls.options() for name, value in one.values_in(args).items()}

    @classmethod
    def environment_values(cls, environment: Mapping[str, str]) -> dict[str, Any]:
        """The settings in the environment, by field name.

        Raises:
            ConfigError: a value cannot work, or a variable with our prefix is unknown; names the variable.
        """
        alone = [one for one in cls.flags() if one.variable_only]
        by_variable = {one.variable: one for one in (*cls.options(), *alone) if one.variable}
        for variable in environment:
            if variable in cls.removed:
                raise ConfigError(
                    "is no variable any more", field=variable, hint=f"Use {cls.removed[variable]}"
                )
            if cls.variable_prefix and variable.startswith(cls.variable_prefix):
                if variable in by_variable:
                    continue
                known = ", ".join(sorted(by_variable))
                raise ConfigError(f"unknown variable {variable}", field=variable, hint=f"There are {known}")
        values: dict[str, Any] = {}
        for variable, one in by_variable.items():
            text = environment.get(variable)
            if text is None or (one.secret and not text):
                continue
            try:
                if one.settings:
                    values |= one.parse_settings(text)
                    continue
                parts = [one.parse(part) for part in text.split(",")] if one.several else []
                values[one.field] = one.collect(parts) if one.several else one.parse(text)
            except ValueError as error:
                raise ConfigError(str(error), field=variable) from None
        return values

    @classmethod
    def from_user(cls, given: Mapping[str, Any], environment: Mapping[str, str]) -> Self:
        """Settings from flags the user gave (by field name) over those in the environment.

        Raises:
            ConfigError: a value cannot work, or a variable with our prefix is unknown.
        """
        return cls.from_values({**cls.environment_values(environment), **given})

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Settings from field names and values; those that are missing keep their defaults.

        Raises:
            ConfigError: a name is unknown or a value cannot work.
        """
        known = {field.name for field in dataclasses.fields(typing.cast(Any, cls))}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting {', '.join(map(repr, unknown))}",
                hint=f"There are {', '.join(sorted(known))}",
            )
        return cls(**values)

    def values(self) -> dict[str, Any]:
        """The settings as a plain dictionary, for :meth:`from_values` in another process."""
        return dataclasses.asdict(typing.cast(Any, self))

    @classmethod
    def markdown(cls) -> str:
        """The reference: a table of flags per group."""
        return markdown(cls.options(), [one for one in cls.flags() if one.variable_only])
