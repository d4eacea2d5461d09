"""One flag: its attributes, its place in a parser, and its value in parsed arguments."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.cluster_key import read_secret
from sglang_ext.errors import ConfigError
from sglang_ext.flags.values import BY_TYPE, Parser, show_size

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
    """Makes the field's value from the values of a flag that takes several."""
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
    """The value of the flag when it is given without one; empty where it needs one."""
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
        if self.type not in (str, *BY_TYPE):
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
        given = getattr(args, self.dest, None)
        if given is None or isinstance(given, list):
            return {name: value for part in given or () for name, value in part.items()}
        return {self.field: given}  # a program has set it, without a command line

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
        metavar: stands for the value in ``--help``; by default the parser's.
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
