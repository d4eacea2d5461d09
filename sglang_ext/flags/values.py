"""Text to value: the kinds of values that flags take."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Text to value, and the word for the value in ``--help``.

    ``parse`` raises ``ValueError`` with a sentence that names the accepted values.
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
BY_TYPE: Mapping[type, Parser] = {
    bool: Parser(parse_switch),
    int: COUNT,
    float: NUMBER,
    Path: Parser(lambda text: Path(text), "PATH"),
}


def one_of(*choices: str) -> Parser:
    """A parser that accepts one of these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return Parser(parse, f"{{{','.join(choices)}}}")


def several_of(*choices: str) -> Parser:
    """A parser that accepts some of these words with commas between them, or nothing."""

    def parse(text: str) -> str:
        return ",".join(one_of(*choices).parse(word) for word in text.split(",")) if text else text

    return Parser(parse, "NAMES")
