"""Flags from dataclasses: one field made by :func:`flag` is one flag, one variable, one row of the reference.

    @dataclass(frozen=True, kw_only=True)
    class Arguments(Flagged):
        size: int = flag(0, "Memory for it.", SIZE)

``Arguments.parse(["--size", "4GiB"])``, ``Arguments(size=4 << 30)`` and, with a ``variable_prefix``, the
environment give the same value and refuse the same ones, by the name that the user wrote. A value on the
command line wins over the environment, which wins over the default.

Several fields can share one flag: a field with ``within="--limits"`` is given as ``--limits size=4GiB``, or
behind the value of a field whose flag is ``--limits``, as in ``--limits auto,size=4GiB``. ``--help`` shows
the common flags, ``--help all`` all of them (``flag_help.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Self

from sglang_ext import flag_help
from sglang_ext.cluster_key import read_secret
from sglang_ext.errors import ConfigError, InternalError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9.]+)\s*(ms|s|min|h)")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def parse_size(text: str) -> int:
    """Bytes in a size such as ``512MB`` (decimal), ``4GiB`` (binary) or ``1048576`` (bytes)."""
    match = _SIZE.fullmatch(text.strip())
    unit = (match[2] or "").lower() if match else ""
    if match is None or ("." in match[1] and not unit):
        raise ValueError(f"{text!r} is not a size; write it like 512MB, 4GB, 4GiB, or as a number of bytes")
    scale = (_UNITS | _BINARY_UNITS)[unit]
    whole, _, fraction = match[1].partition(".")
    return int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)


def show_size(size: int) -> str:
    """A size as a user would write it: ``64MiB``, ``32GB``."""
    for names in (_BINARY_UNITS, _UNITS):
        for name, scale in sorted(names.items(), key=lambda unit: -unit[1]):
            if name and size and size % scale == 0 and size // scale < 10_000:
                return f"{size // scale}{name.upper().replace('I', 'i')}B"
    return str(size)


def parse_seconds(text: str) -> float:
    """Seconds in a duration such as ``30``, ``1.5s``, ``500ms``, ``10min`` or ``2h``."""
    match = _DURATION.fullmatch(text.strip())
    try:
        return float(match[1]) * _SECONDS[match[2]] if match else float(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a duration; write it like 500ms, 10min, 2h, or as a number of seconds"
        ) from None


def parse_count(text: str) -> int:
    """A whole number, not negative."""
    if not (text.isascii() and text.strip().isdecimal()):
        raise ValueError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def parse_number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def parse_switch(text: str) -> bool:
    """On or off, as an environment variable says it: 1 or 0, true or false, yes or no, on or off."""
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(f"{text!r} is neither 1 nor 0")


def parse_path(text: str) -> str:
    """A path, absolute from here on: other processes may start elsewhere."""
    if not text.strip():
        raise ValueError("the path is empty")
    return os.path.abspath(os.path.expanduser(text))


def parse_words(text: str) -> tuple[str, ...]:
    """The words of a command line, as a shell would split them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be split into flags: {error}") from None


@dataclass(frozen=True)
class Parser:
    """Text to value, and what stands for the value in ``--help``.

    ``parse`` raises ``ValueError`` with a sentence that says what is accepted.
    """

    parse: Callable[[str], Any]
    metavar: str | None = None

    def where(self, holds: Callable[[Any], bool], why: str) -> Parser:
        """The same for values for which ``holds`` is true; of others, ``why`` is said behind the value."""

        def parse(text: str) -> Any:
            value = self.parse(text)
            if not holds(value):
                raise ValueError(f"{value} {why}")
            return value

        return Parser(parse, self.metavar)

    def positive(self) -> Parser:
        """More than 0."""
        return self.where(lambda value: value > 0, "must be greater than 0")

    def not_negative(self) -> Parser:
        """0 or more."""
        return self.where(lambda value: value >= 0, "must not be negative")

    def within(self, low: float, high: float) -> Parser:
        """From ``low`` to ``high``, both included."""
        return self.where(lambda value: low <= value <= high, f"is not within {low} to {high}")


SIZE = Parser(parse_size, "SIZE")
SECONDS = Parser(parse_seconds, "SECONDS")
COUNT = Parser(parse_count, "N")
NUMBER = Parser(parse_number, "NUMBER")
PATH = Parser(parse_path, "PATH")
WORDS = Parser(parse_words, "FLAGS")
PORT = Parser(parse_count, "PORT").where(lambda port: port <= 65535, "is not a port: 0 to 65535")
_BY_TYPE: Mapping[type, Parser] = {
    bool: Parser(parse_switch),
    int: COUNT,
    float: NUMBER,
    Path: Parser(lambda text: Path(text), "PATH"),
}


def one_of(*choices: str) -> Parser:
    """One of these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return Parser(parse, f"{{{','.join(choices)}}}")


def several_of(*choices: str) -> Parser:
    """Some of these words with commas between them, or nothing."""

    def parse(text: str) -> str:
        return ",".join(one_of(*choices).parse(word) for word in text.split(",")) if text else text

    return Parser(parse, "NAMES")


REQUIRED = dataclasses.MISSING
"""As a default: the user has to give the flag."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One setting as the user sees it; made by :func:`flag`, completed by :meth:`Flagged.flags`."""

    field: str = ""
    """The name of the field."""
    name: str = ""
    """As on the command line: ``--kv-dram-size``."""
    dest: str = ""
    """As an attribute of the parsed arguments: ``kv_dram_size``."""
    variable: str | None = None
    """As an environment variable: ``SGLANG_EXT_KV_DRAM_SIZE``."""
    default: Any
    type: type = str
    """Of the field, without its None."""
    help: str
    """In sentences, without the default."""
    metavar: str | None = None
    parser: Parser | None = None
    aliases: tuple[str, ...] = ()
    several: str = ""
    """``append``: the flag may be given several times; ``*``: it takes any number of values."""
    collect: Callable[[Sequence[Any]], Any] = tuple
    """What becomes of the values of a flag that takes several."""
    shown: str | None = None
    """Instead of the default, for people."""
    group: str = ""
    """A heading in ``--help`` and reference; holds for the flags after it too."""
    secret: bool = False
    """Not to be shown: an empty one is none."""
    file: bool = False
    """There is a second flag that names a file with the value, ``--api-key-file``."""
    positional: bool = False
    bare: str = ""
    """What the flag says when it is given without a value; empty where it needs one."""
    common: bool = False
    """``--help`` shows it; the others are shown by ``--help all``."""
    internal: bool = False
    """Passed between processes of the project; neither ``--help`` nor the reference shows it."""
    variable_only: bool = False
    """There is no flag: the setting is an environment variable, ``name`` too."""
    within: str = ""
    """The flag that takes the setting as NAME=VALUE."""
    key: str = ""
    """NAME there; by default the name of the field."""
    settings: tuple[Flag, ...] = ()
    """Settings that the flag takes as NAME=VALUE; it takes no value of its own where ``field`` is empty."""

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.type is bool

    @property
    def is_required(self) -> bool:
        """Whether the user has to give it."""
        return self.default is REQUIRED

    @property
    def default_text(self) -> str:
        """The default for people; empty where there is none to tell."""
        if self.shown is not None:
            return self.shown
        if isinstance(self.default, tuple):
            return " ".join(map(str, self.default))
        if self.parser is not None and self.parser.metavar == "SIZE" and isinstance(self.default, int):
            return show_size(self.default)
        none = self.default in (None, REQUIRED) or isinstance(self.default, bool)
        return "" if none else str(self.default)

    @property
    def form(self) -> str:
        """The placeholder for the value in ``--help``."""
        own = self.metavar or (self.parser and self.parser.metavar) or (self.key or self.dest).upper()
        if not self.settings:
            return own
        return f"{own}[,NAME=VALUE...]" if self.field else "NAME=VALUE,..."

    @property
    def full_help(self) -> str:
        """The help with the default, and with every setting that the flag takes."""
        default = f" Default: {self.default_text}." if self.default_text else ""
        if not self.settings:
            return self.help + default
        lines = [f"{one.key}={one.form}: {one.full_help}" for one in self.settings]
        return f"{self.help}{default} Settings: {' '.join(lines)}"

    def parse(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            ValueError: it stands for none.
        """
        return (self.parser or Parser(str)).parse(text)

    def checked(self, value: Any) -> Any:
        """A value as the constructor was given it, in its normal form.

        Raises:
            ConfigError: it cannot work.
        """
        if value is None and self.default is None:
            return None
        if self.several and self.type is tuple:
            return tuple(self._parsed(str(one)) for one in value)
        if self.type not in (str, *_BY_TYPE):
            return value
        accepted = (int, float) if self.type is float else self.type
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.type is not bool):
            raise ConfigError(f"{value!r} is not of type {self.type.__name__}", field=self.name)
        return value if self.type is bool else self._parsed(str(value))

    def _parsed(self, text: str) -> Any:
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(str(error), field=self.name) from None

    def add_to(self, parser: argparse._ActionsContainer, *, shown: bool = True) -> None:
        """Add it to a command line. A flag that is not given is None there; the environment then counts.

        Args:
            shown: ``--help`` shows it.
        """
        about: dict[str, Any] = {"help": self.full_help.replace("%", "%%") if shown else argparse.SUPPRESS}
        if self.settings:
            about |= {"type": self._argument, "metavar": self.form, "action": "append"}
        elif self.is_switch:
            about |= {"action": "store_const", "const": not self.default}
        else:
            about |= {"type": self._argument, "metavar": self.form}
        if self.several:
            about |= {"action": "append"} if self.several == "append" else {"nargs": self.several}
        if self.bare:
            about |= {"nargs": "?", "const": self.bare}
        if not self.positional:
            about |= {"dest": self.dest, "required": self.default is REQUIRED}
        parser.add_argument(self.name, *self.aliases, **about)
        if self.file:
            text = f"The file (mode 0600) with the value of {self.name}." if shown else argparse.SUPPRESS
            parser.add_argument(f"{self.name}-file", metavar="FILE", help=text)

    def parse_settings(self, text: str) -> dict[str, Any]:
        """The values in ``VALUE,NAME=VALUE,...``, by field. The first VALUE is that of the flag itself.

        Raises:
            ValueError: a name is unknown or a value cannot be parsed; the message names it.
        """
        found: dict[str, Any] = {}
        by_key = {one.key: one for one in self.settings}
        for position, word in enumerate(text.split(",")):
            name, equals, value = (part.strip() for part in word.partition("="))
            if not equals and not position and self.field:
                found[self.field] = self.parse(name)
                continue
            one = by_key.get(name)
            if one is None:
                raise ValueError(f"there is no setting {name!r}; there are {', '.join(by_key)}")
            if not equals:
                raise ValueError(f"{name} has no value; write {name}={one.form}")
            try:
                found[one.field] = one.parse(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if self.bare:
            found.setdefault(self.field, self.parse(self.bare))
        return found

    def _argument(self, text: str) -> Any:
        try:
            return self.parse_settings(text) if self.settings else self.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def values_in(self, args: argparse.Namespace) -> dict[str, Any]:
        """The values in parsed arguments, by field; of a setting given twice, the last.

        Raises:
            ConfigError: it is given twice, or its file cannot be used.
        """
        if not self.settings:
            value = self.given(args)
            return {} if value is None else {self.field: value}
        return {name: value for part in getattr(args, self.dest, None) or () for name, value in part.items()}

    def given(self, args: argparse.Namespace) -> Any:
        """The value in parsed arguments; None for none.

        Raises:
            ConfigError: it is given twice, or its file cannot be used.
        """
        value = getattr(args, self.dest, None)
        path = getattr(args, f"{self.dest}_file", None) if self.file else None
        if path is not None:
            if value:
                raise ConfigError("is given twice", field=self.name, hint=f"Give {self.name}-file alone")
            return read_secret(path, field=f"{self.name}-file").decode("utf-8", "replace")
        if value is None or (self.secret and not value):
            return None
        return self.collect(value) if self.several else value


def flag(
    default: Any,
    help: str,
    parser: Parser | None = None,
    metavar: str | None = None,
    *,
    factory: Callable[[], Any] | None = None,
    **about: Any,
) -> Any:
    """A field of a :class:`Flagged` dataclass that is a flag.

    Args:
        default: the default, or ``REQUIRED``.
        help: in sentences, without the default.
        parser: text to value; by the field's type where it is None.
        metavar: what stands for the value, unless the parser knows.
        factory: makes the default where it can be changed.
        about: more attributes of :class:`Flag`.
    """
    found = Flag(default=default, help=help, parser=parser, metavar=metavar, **about)
    repr_ = not found.secret
    if factory is not None:
        return dataclasses.field(default_factory=factory, repr=repr_, metadata={"flag": found})
    return dataclasses.field(default=default, repr=repr_, metadata={"flag": found})


def list_flag(name: str, help: str, *, common: bool = False) -> Flag:
    """A flag of fields ``within`` it, without a value of its own; for :attr:`Flagged.lists`."""
    return Flag(name=name, default=None, help=help, common=common)


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
                    parser=one.parser or (one_of(*words) if words else _BY_TYPE.get(kind)),
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
                parser.add_argument(name, action=flag_help.Removed, instead=instead)

    @classmethod
    def parser(cls, word: str = flag_help.COMMON, **about: Any) -> argparse.ArgumentParser:
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
                "epilog": " ".join(filter(None, (about.get("epilog"), flag_help.more(options, word)))),
            }
        )
        made.add_argument(
            *("-h", "--help"),
            action=flag_help.Help,
            show=lambda asked: cls.parser(asked, **{**about, "prog": made.prog}).format_help(),
            groups=flag_help.words(options),
        )
        cls.add_cli_args(made, flag_help.chosen(options, word))
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
        """What was given on the command line, by field.

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
        return flag_help.markdown(cls.options(), [one for one in cls.flags() if one.variable_only])
