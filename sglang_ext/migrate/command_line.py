"""A command line of SGLang's server or router, as one of this package. Pure: files are read by the caller."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang_ext.errors import UserError
from sglang_ext.migrate.gateway import GATEWAY, WORKERS
from sglang_ext.migrate.lmcache import LMCACHE, VARIABLE
from sglang_ext.migrate.rules import MANY, NoEqualError, Rule
from sglang_ext.migrate.server_flags import FILE_FOLDER, FILE_STORE, GLOBAL, SERVER_FLAGS, file_store

CONFIG_FILE: Final = "LMCACHE_CONFIG_FILE"
CONFIG_FLAG: Final = "--lmcache-config-file"
_PREFIX: Final = "--router-"
_PYTHON: Final = re.compile(r"(.*/)?python[0-9.]*$")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
_SERVER: Final = ("sglang.launch_server", "sglang_ext.launch_server")
_ROUTER: Final = ("sglang_router", "sglang_router.launch_router")
_BOTH: Final = "sglang_router.launch_server"
_CLUSTER: Final = ("--host", "--port", "--model-path", "--model")
"""Flags of both that `sglang-ext cluster` takes itself; those of its servers stand after ``--``."""


class UnknownCommandError(UserError):
    """The command line is of no program that is known here."""


@dataclass
class Migrated:
    """The new command line, and what of the old one has no equal."""

    words: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    """By flag: why, and the way out."""
    notes: dict[str, str] = field(default_factory=dict)
    """By flag: a remark on each flag that was changed or left out."""

    def __str__(self) -> str:
        return shlex.join(self.words)

    def put(self, name: str, rule: Rule, values: list[str]) -> list[str]:
        """Apply a rule; returns the new words."""
        try:
            words = rule.apply(values)
        except NoEqualError as error:
            self.lacking[name] = str(error)
            return []
        except (ValueError, IndexError):
            self.lacking[name] = f"{' '.join(values) or 'nothing'} is no value of {name}"
            return []
        if rule.note and words[:1] != [name]:
            self.notes[name] = f"{' '.join(words) or 'left out'}; {rule.note}"
        return words


def config_file_of(words: Sequence[str]) -> str | None:
    """The LMCache configuration file that a command line names, which `migrate` wants the contents of."""
    found = None
    for number, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == CONFIG_FLAG:
            found = value if equals else next(iter(words[number + 1 :]), None)
        elif flag == CONFIG_FILE and equals and found is None:
            found = value
    return found


def migrate(words: Sequence[str], settings: Mapping[str, str] | None = None) -> Migrated:
    """The command line for this package.

    Args:
        words: of the old one, with the environment variables before it.
        settings: of LMCache's configuration file, if the command line names one.

    Raises:
        UnknownCommandError: the words start no SGLang server or router.
    """
    made = Migrated()
    variables, words = _split_variables(words)
    program, rest = _split_program(words)
    lmcache = dict(settings or {})
    kept = []
    for name, value in variables.items():
        if name.startswith(VARIABLE) and name != CONFIG_FILE:
            lmcache[name.removeprefix(VARIABLE).lower()] = value
        elif name not in (CONFIG_FILE, FILE_STORE):
            kept.append(f"{name}={value}")
    if program in _ROUTER:
        made.words = [*kept, "sglang-ext", "router", *_router_words(made, rest)]
        return made
    if program == _BOTH:
        made.words = [*kept, "sglang-ext", "cluster", *_cluster_words(made, rest, variables, lmcache)]
        return made
    made.words = [*kept, "sglang-ext", "serve", *_server_words(made, rest, variables, lmcache)]
    return made


def _split_variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Assignments before a command, with `env` or without, and the command."""
    left = list(words[1:] if words[:1] == ["env"] else words)
    variables: dict[str, str] = {}
    while left and (match := _ASSIGNMENT.match(left[0])):
        variables[match[1]] = match[2]
        del left[0]
    return variables, left


def _split_program(words: list[str]) -> tuple[str, list[str]]:
    """The module that a command line runs, and its arguments.

    Raises:
        UnknownCommandError: it is none of those that are known.
    """
    first = words[0].rpartition("/")[2] if words else ""
    if first and _PYTHON.match(words[0]) and words[1:2] == ["-m"] and len(words) > 2:
        module, rest = words[2], words[3:]
        if module in (*_SERVER, *_ROUTER, _BOTH):
            return module, rest
    elif first == "sglang" and words[1:2] == ["serve"]:
        return _SERVER[0], words[2:]
    elif first in ("sglang-router", "smg", "amg"):
        command = words[1] if words[1:2] and not words[1].startswith("-") else "launch"
        return (_BOTH if command in ("server", "serve") else _ROUTER[0]), words[
            1 + (words[1:2] == [command]) :
        ]
    raise UnknownCommandError(
        f"{' '.join(words[:3]) or 'an empty command line'} starts no SGLang server or router. Give a command "
        "line of `python -m sglang.launch_server`, `sglang serve`, `python -m sglang_router.launch_router`, "
        "`python -m sglang_router.launch_server` or `sglang-router`, in quotes"
    )


def _flags(words: Sequence[str], many: Mapping[str, int]) -> list[tuple[str, list[str]]]:
    """Flags with their values; words before the first flag have an empty name. many: how many values each
    known flag takes; other flags take all up to the next flag."""
    found: list[tuple[str, list[str]]] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            found.append(("", [word]))
            continue
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        limit = many.get(name, MANY) - len(values)
        while left and not left[0].startswith("--") and (many.get(name, MANY) == MANY or limit > 0):
            values.append(left.pop(0))
            limit -= 1
        found.append((name, values))
    return found


def _router_words(made: Migrated, words: Sequence[str], prefix: str = "--") -> list[str]:
    rules = {prefix + name: rule for name, rule in GATEWAY.items()}
    new: list[str] = []
    workers: list[str] = []
    for name, values in _flags(words, {name: rule.values for name, rule in rules.items()}):
        if name not in rules:
            made.lacking[name or values[0]] = "this is no flag of SGLang's router that is known here"
            continue
        converted = made.put(name, rules[name], values)
        if converted[:1] == [WORKERS]:
            workers += converted[1:]
        else:
            new += converted
    return [*([WORKERS, *workers] if workers else []), *new]


def _server_words(
    made: Migrated, words: Sequence[str], variables: Mapping[str, str], lmcache: Mapping[str, str]
) -> list[str]:
    new: list[str] = []
    many = {name: rule.values for name, rule in SERVER_FLAGS.items()} | {CONFIG_FLAG: 1}
    given = _flags(words, many)
    names = {name for name, _ in given}
    for name, values in given:
        if name == CONFIG_FLAG:
            continue
        rule = SERVER_FLAGS.get(name)
        new += made.put(name, rule, values) if rule is not None else [*([name] if name else []), *values]
    if ("--hicache-storage-backend", ["file"]) in given:
        new += _hicache_files(made, new, variables.get(FILE_STORE, FILE_FOLDER), given)
    for key, value in lmcache.items():
        rule = LMCACHE.get(key)
        if rule is None:
            made.lacking[key] = "this is no setting of LMCache that is known here"
        else:
            new += made.put(key, rule, [value])
    return _completed(new, names)


def _hicache_files(
    made: Migrated, words: list[str], folder: str, given: Sequence[tuple[str, list[str]]]
) -> list[str]:
    """The words that have the files of HiCache read; ``words`` get the disk tier beside them."""
    values = {name: value[0] for name, value in given if value}
    layout = values.get("--hicache-mem-layout", "layer_first")
    try:
        own, more = file_store(folder, layout, values.get("--hicache-io-backend", ""))
    except NoEqualError as error:
        made.lacking["--hicache-mem-layout"] = str(error)
        return []
    words[words.index("--kv-disk-path") + 1] = own
    return more


def _completed(words: list[str], names: set[str]) -> list[str]:
    """With the flags that start the shared cache, once."""
    while words.count(GLOBAL[0]) > 1:
        at = len(words) - 1 - words[::-1].index(GLOBAL[0])
        del words[at : at + 2]
    split = "--disaggregation-mode" in names
    if split and "--disaggregation-transfer-backend" not in words:
        words += ["--disaggregation-transfer-backend", "global"]
    if not split and GLOBAL[0] not in words and "--disable-radix-cache" not in words:
        words += GLOBAL
    if "--kv-disk-path" in words and "--kv-dram-size" not in words:
        words += ["--kv-dram-size", "4GB"]
    return words


def _cluster_words(
    made: Migrated, words: Sequence[str], variables: Mapping[str, str], lmcache: Mapping[str, str]
) -> list[str]:
    """`sglang_router.launch_server`: servers and their router in one command."""
    many = {_PREFIX + name: rule.values for name, rule in GATEWAY.items()}
    many |= {name: rule.values for name, rule in SERVER_FLAGS.items()}
    router: list[str] = []
    own: list[str] = []
    servers: list[str] = []
    for name, values in _flags(words, many):
        if name.startswith(_PREFIX):
            router += [name, *values]
        elif name in ("--dp-size", "--data-parallel-size", "--dp"):
            own += ["--colocated", *values]
        elif name in _CLUSTER:
            own += [name, *values]
        else:
            servers += [*([name] if name else []), *values]
    new = _router_words(made, router, _PREFIX)
    server = _server_words(made, servers, variables, lmcache)
    if GLOBAL[0] in server:  # the servers of a cluster have it by default
        at = server.index(GLOBAL[0])
        del server[at : at + 2]
    return [
        *own,
        *(["--router-args", shlex.join(new)] if new else []),
        *(["--", *server] if server else []),
    ]
