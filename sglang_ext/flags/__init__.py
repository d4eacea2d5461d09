"""Flags from dataclasses: one field made by :func:`flag` is one flag, one variable, one row of the reference.

    @dataclass(frozen=True, kw_only=True)
    class Arguments(Flagged):
        size: int = flag(0, "Memory for it.", SIZE)

``Arguments.parse(["--size", "4GiB"])``, ``Arguments(size=4 << 30)`` and, with a ``variable_prefix``, the
environment give the same value and refuse the same ones, by the name that the user wrote. A value on the
command line wins over the environment, which wins over the default.

Several fields can share one flag: a field with ``within="--kv-disk-io"`` is given as
``--kv-disk-io lag=wait``, or behind the value of a field whose flag it is, as in
``--kv-disk-io auto,lag=wait``. ``--help`` shows the common flags, ``--help all`` all of them (`help.py`).
"""

from __future__ import annotations

from sglang_ext.flags.field import REQUIRED, Flag, flag, list_flag
from sglang_ext.flags.flagged import Flagged
from sglang_ext.flags.values import (
    COUNT,
    NUMBER,
    PATH,
    PORT,
    SECONDS,
    SIZE,
    WORDS,
    Parser,
    one_of,
    parse_count,
    parse_seconds,
    parse_size,
    parse_switch,
    parse_words,
    several_of,
    show_size,
)

__all__ = [
    "COUNT",
    "NUMBER",
    "PATH",
    "PORT",
    "REQUIRED",
    "SECONDS",
    "SIZE",
    "WORDS",
    "Flag",
    "Flagged",
    "Parser",
    "flag",
    "list_flag",
    "one_of",
    "parse_count",
    "parse_seconds",
    "parse_size",
    "parse_switch",
    "parse_words",
    "several_of",
    "show_size",
]
