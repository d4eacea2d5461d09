"""``sglang-ext migrate``: from command lines of HiCache, LMCache and SGLang's router to this package's."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.errors import ConfigError, SglangExtError
from sglang_ext.flags import REQUIRED, Flagged, flag
from sglang_ext.migrate.command_line import config_file_of, migrate

PROG = "sglang-ext migrate"
LACKING = 1
"""Exit status where something has no equal."""
NOT_UNDERSTOOD = 2


@dataclass(frozen=True, kw_only=True)
class Arguments(Flagged):
    """Flags of the command."""

    prog = PROG
    description = (
        "Print the command line of this package for one of SGLang's server with HiCache or LMCache, or of "
        "SGLang's router. Flags that are the same stay. Those that have no equal are named on stderr, with "
        "the reason."
    )

    command_line: str = flag(
        REQUIRED,
        "The old command line in quotes, with the environment variables that stand before it.",
        positional=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print it. Returns the exit status."""
    try:
        given = Arguments.parse(
            arguments,
            epilog=f"Exit status: 0, {LACKING} when a flag has no equal, {NOT_UNDERSTOOD} when the command "
            "line is none of SGLang's server or router.",
        )
        words = shlex.split(given.command_line)
        made = migrate(words, read_settings(config_file_of(words)))
    except ValueError as error:
        sys.stderr.write(f"{PROG}: the command line has an open quote: {error}\n")
        return NOT_UNDERSTOOD
    except SglangExtError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return NOT_UNDERSTOOD
    sys.stdout.write(f"{made}\n")
    for name, note in made.notes.items():
        sys.stderr.write(f"{name}: {note}\n")
    for name, why in made.lacking.items():
        sys.stderr.write(f"{name} has no equal: {why}\n")
    return LACKING if made.lacking else 0


def read_settings(path: str | None) -> dict[str, str]:
    """The settings in LMCache's configuration file, as text.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    if path is None:
        return {}
    import yaml  # type: ignore[import-untyped]  # only where there is such a file

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="--lmcache-config-file") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a mapping of settings", field="--lmcache-config-file")
    return {str(key): _text(value) for key, value in found.items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
