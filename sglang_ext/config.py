"""What the user can set for the shared cache of one server, as flags and as environment variables.

One field of :class:`KvConfig` is one flag: ``dram_size`` is ``--kv-dram-size`` on the command line and
``SGLANG_EXT_KV_DRAM_SIZE`` in the environment, which is for those who start ``sglang.Engine`` and have no
command line. A flag given on the command line wins over the environment.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_ext.errors import ConfigError

ENVIRONMENT_PREFIX = "SGLANG_EXT_KV_"
MAX_BLOCK_SIZE = 1024
MAX_ID_CHARS = 200

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})

Parser = Callable[[str], Any]
"""Text to value; raises ``ValueError`` with a sentence that says what is accepted."""


def parse_size(text: str) -> int:
    """Bytes in a size such as ``512MB`` (decimal), ``4GiB`` (binary) or ``1048576`` (bytes).

    Raises:
        ValueError: when the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = (match[2] or "").lower() if match else ""
    if match is None or ("." in match[1] and not unit):
        raise ValueError(f"{text!r} is not a size; write it like 512MB, 4GB, 4GiB, or as a number of bytes")
    scale = (_UNITS | _BINARY_UNITS)[unit]
    whole, _, fraction = match[1].partition(".")
    return int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)


def parse_count(text: str) -> int:
    """A whole number, not negative.

    Raises:
        ValueError: when the text is something else.
    """
    if not (text.isascii() and text.strip().isdecimal()):
        raise ValueError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def parse_switch(text: str) -> bool:
    """On or off, as an environment variable says it: 1 or 0, true or false, yes or no, on or off.

    Raises:
        ValueError: when the text is something else.
    """
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(f"{text!r} is neither 1 nor 0")


def parse_id(text: str) -> str:
    """A name of an instance: visible ASCII characters without blanks.

    Raises:
        ValueError: when the text is something else.
    """
    if not text or len(text) > MAX_ID_CHARS or not all(33 <= ord(c) <= 126 for c in text):
        raise ValueError(f"{text!r} is not a name of 1 to {MAX_ID_CHARS} visible ASCII characters, no blanks")
    return text


def parse_urls(text: str) -> str:
    """URLs of routers, with commas between them.

    Raises:
        ValueError: when one is not of the form http://host:port.
    """
    urls = [url.strip().rstrip("/") for url in text.split(",")]
    for url in urls:
        if not re.fullmatch(r"https?://[^/?#@\s]+", url):
            raise ValueError(f"{url!r} is not of the form http://host:port")
    return ",".join(dict.fromkeys(urls))


def parse_path(text: str) -> str:
    """A path, absolute from here on: other processes may start elsewhere.

    Raises:
        ValueError: when the text is empty.
    """
    if not text.strip():
        raise ValueError("the path is empty")
    return os.path.abspath(os.path.expanduser(text))


def _one_of(*choices: str) -> Parser:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _several_of(*choices: str) -> Parser:
    def parse(text: str) -> str:
        wrong = [word for word in text.split(",") if word not in choices]
        if text and wrong:
            raise ValueError(f"{wrong[0]!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _within(low: int, high: int) -> Parser:
    def parse(text: str) -> int:
        value = parse_count(text)
        if not low <= value <= high:
            raise ValueError(f"{value} is not within {low} to {high}")
        return value

    return parse


@dataclass(frozen=True)
class Flag:
    """One setting as the user sees it.

    ``field`` is the name in :class:`KvConfig`, ``default`` and ``type`` those of the field, ``metavar`` what
    stands for the value in ``--help`` (None for a switch), ``parse`` turns text into a value; ``repeats``: it
    may be given several times, which is the same as once with commas.
    """

    field: str
    default: Any
    type: type
    help: str
    metavar: str | None
    parse: Parser
    repeats: bool = False

    @property
    def name(self) -> str:
        """As on the command line: ``--kv-dram-size``."""
        return "--kv-" + self.field.replace("_", "-")

    @property
    def dest(self) -> str:
        """As an attribute of the parsed arguments: ``kv_dram_size``."""
        return "kv_" + self.field

    @property
    def variable(self) -> str:
        """As an environment variable: ``SGLANG_EXT_KV_DRAM_SIZE``."""
        return ENVIRONMENT_PREFIX + self.field.upper()

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.metavar is None


def _flag(default: Any, help: str, metavar: str | None, parse: Parser, *, repeats: bool = False) -> Any:
    kind = str if default is None else type(default)
    about = {"type": kind, "help": help, "metavar": metavar, "parse": parse, "repeats": repeats}
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True)
class KvConfig:
    """The settings of one server's shared cache.

    Raises:
        ConfigError: from the constructor, when a value cannot work; names the flag.
    """

    dram_size: int = _flag(
        0,
        "The size of the DRAM tier per rank, such as 512MB, 4GB or 4GiB. "
        "0 means no DRAM tier: KV that leaves the device is recomputed.",
        "SIZE",
        parse_size,
    )
    disk_path: str | None = _flag(
        None,
        "The directory of the disk tier, on a local disk; each server needs its own. KV in it survives "
        "restarts. Needs a DRAM tier. Not given: no disk tier.",
        "PATH",
        parse_path,
    )
    disk_size: int = _flag(
        32 * 10**9,
        "The most that the disk tier may take per rank. Older KV is given up for newer.",
        "SIZE",
        parse_size,
    )
    durability: str = _flag(
        "disk",
        "How far new KV is written by itself: off (nowhere), dram, or disk. What is there already is used in "
        "any case.",
        "{off,dram,disk}",
        _one_of("off", "dram", "disk"),
    )
    disk_lag: str = _flag(
        "skip",
        "What happens to new KV while the disk cannot keep up: skip (it stays in DRAM only, counted, and is "
        "tried again with the next turn) or wait (the server waits, for up to 5 seconds).",
        "{skip,wait}",
        _one_of("skip", "wait"),
    )
    disk_io: str = _flag(
        "auto",
        "How KV is read from disk: buffered (through the page cache), direct (with O_DIRECT, unless the page "
        "cache has the bytes anyway) or auto (direct unless that is clearly slower, measured at start with a "
        "temporary file of 64 MiB).",
        "{auto,direct,buffered}",
        _one_of("auto", "direct", "buffered"),
    )
    disk_admission: str = _flag(
        "first-layer",
        "When a request that takes KV from disk is admitted: first-layer (the rest streams in front of the "
        "forward pass, which runs again if a layer turns out to be damaged) or complete (all of it has been "
        "read and verified). On a GPU, and on PD servers, always complete.",
        "{first-layer,complete}",
        _one_of("first-layer", "complete"),
    )
    layer_cache_size: int = _flag(
        0,
        "Memory per rank for the lowest layers of KV on disk, with which requests start at once while the "
        "rest streams from disk. 0 means none.",
        "SIZE",
        parse_size,
    )
    layer_cache_layers: int = _flag(
        1,
        "How many of the lowest layers the layer cache keeps.",
        "LAYERS",
        _within(1, 1024),
    )
    load_policy: str = _flag(
        "auto",
        "What to do with KV found on disk: auto (load it when that is expected to be faster than computing, "
        "from measured speeds) or always (load it).",
        "{auto,always}",
        _one_of("auto", "always"),
    )
    block_size: int = _flag(
        16,
        f"The number of tokens in a block, the unit of index, tiers and transfer. "
        f"A multiple of --page-size, 1 to {MAX_BLOCK_SIZE}. The same on every server of a cluster.",
        "TOKENS",
        _within(1, MAX_BLOCK_SIZE),
    )
    eviction_policy: str = _flag(
        "lru",
        "The order in which blocks leave a tier: lru (least recently used first) or slru (segmented LRU: "
        "blocks used only once leave before blocks used again).",
        "{lru,slru}",
        _one_of("lru", "slru"),
    )
    instance_id: str | None = _flag(
        None,
        "The name of this server in the cluster, unique there. Defaults to host:port.",
        "NAME",
        parse_id,
    )
    router: str | None = _flag(
        None,
        "A router to register with, and to tell of everything that enters or leaves the cache. Give it once "
        "per router (in the environment: URLs with commas between them).",
        "URL",
        parse_urls,
        repeats=True,
    )
    agent_port: int = _flag(
        0,
        "The port of the agent, to which routers connect. 0 means any that is free.",
        "PORT",
        _within(0, 65535),
    )
    cluster_key_file: str | None = _flag(
        None,
        "The file with the key of the cluster, the same on every member. Without it the agent listens on "
        "loopback only.",
        "PATH",
        parse_path,
    )
    advisory_compute: bool = _flag(
        False,
        "Compute what nobody holds of a prompt that was announced to the router, while this server is idle. "
        "A request that comes meanwhile waits for one prefill chunk at most.",
        None,
        parse_switch,
    )
    load_min_tokens: int = _flag(
        64,
        "The shortest run of tokens worth loading from DRAM or disk; shorter runs are recomputed.",
        "TOKENS",
        parse_count,
    )
    pd_caching: str = _flag(
        "3",
        "With --disaggregation-transfer-backend global, who keeps KV: basic (nobody), 1 (prefill keeps what "
        "it computed), 2 (decode keeps what it received and generated too, and is sent what it lacks) or 3 "
        "(decode's KV returns to prefill when a request ends). The same on every server of a cluster.",
        "{basic,1,2,3}",
        _one_of("basic", "1", "2", "3"),
    )
    transfer_mode: str = _flag(
        "pull",
        "With --disaggregation-transfer-backend global: pull (prefill computes at once, decode allocates and "
        "reads when it is done), push (decode allocates first, prefill writes when it is done) or "
        "push-by-layer (prefill writes each layer while it computes the next; host memory only). The same on "
        "every server.",
        "{pull,push,push-by-layer}",
        _one_of("pull", "push", "push-by-layer"),
    )
    transfer_layout: str = _flag(
        "blocks",
        "With --disaggregation-transfer-backend global, how a request's KV lies while it travels: blocks (as "
        "in the engine's pool, one range per page and plane) or aggregated (packed into one range first, and "
        "unpacked on arrival; for pools in host memory, not with push-by-layer). The same on every server.",
        "{blocks,aggregated}",
        _one_of("blocks", "aggregated"),
    )
    transfer_staging_size: int = _flag(
        256 * 10**6,
        "With --kv-transfer-layout aggregated: memory per rank in which requests are packed. A request that "
        "finds no room there travels in blocks.",
        "SIZE",
        parse_size,
    )
    transports: str = _flag(
        "",
        "How KV may travel between servers, best first, such as cma,tcp. Not given: the first of shm, cma, "
        "verbs and tcp by which the other's memory can really be reached.",
        "NAMES",
        _several_of("shm", "cma", "verbs", "tcp"),
    )
    check: bool = _flag(
        False,
        "Verify all invariants of the cache whenever the server is idle. For debugging; slow.",
        None,
        parse_switch,
    )

    def __post_init__(self) -> None:
        for flag in flags():
            value = getattr(self, flag.field)
            if value is None and flag.default is None:
                continue
            if type(value) is not flag.type:
                raise ConfigError(f"{value!r} is not of type {flag.type.__name__}", field=flag.name)
            if flag.type is not bool:
                _parsed(flag, str(value))
        if self.disk_path is not None and not self.dram_size:
            raise ConfigError(
                "the disk tier is written from DRAM and read into it",
                field="--kv-disk-path",
                hint="Give the DRAM tier a size too, such as --kv-dram-size 4GB",
            )

        if self.agent_port and self.router is None:
            raise ConfigError(
                "there is no agent without a router", field="--kv-agent-port", hint="Give --kv-router"
            )
        if self.transfer_layout == "aggregated" and self.transfer_mode == "push-by-layer":
            raise ConfigError(
                "aggregated KV travels whole, and by layer it does not",
                field="--kv-transfer-layout",
                hint="Give --kv-transfer-mode pull or push, or --kv-transfer-layout blocks",
            )
        if self.advisory_compute and (self.router is None or not self.dram_size):
            raise ConfigError(
                "what is computed ahead comes from a router's hints and is kept in DRAM",
                field="--kv-advisory-compute",
                hint="Give --kv-router and --kv-dram-size too",
            )
        if self.layer_cache_size and self.disk_path is None:
            raise ConfigError(
                "the layer cache is for KV on disk",
                field="--kv-layer-cache-size",
                hint="Set it to 0, or give --kv-disk-path",
            )

    @property
    def writes_dram(self) -> bool:
        """Whether new KV is written to DRAM by itself (``durability``)."""
        return self.durability != "off"

    @property
    def writes_disk(self) -> bool:
        """Whether it goes on to the disk."""
        return self.durability == "disk"

    def values(self) -> dict[str, Any]:
        """The settings as a plain dictionary, for :meth:`from_values` in another process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> KvConfig:
        """Settings from field names and values; those that are missing keep their defaults.

        Raises:
            ConfigError: when a name is unknown or a value cannot work.
        """
        known = {flag.field for flag in flags()}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting {', '.join(map(repr, unknown))}",
                hint=f"There are {', '.join(sorted(known))}",
            )
        return cls(**values)

    @classmethod
    def from_user(cls, given: Mapping[str, Any], environment: Mapping[str, str]) -> KvConfig:
        """Settings from flags the user gave (by field name) over those in the environment.

        Raises:
            ConfigError: when a value cannot work, or a variable with our prefix is unknown.
        """
        return cls.from_values({**environment_values(environment), **given})


def _parsed(flag: Flag, text: str) -> Any:
    try:
        return flag.parse(text)
    except ValueError as error:
        raise ConfigError(str(error), field=flag.name) from None


def flags() -> tuple[Flag, ...]:
    """Every flag, in the order of ``--help``."""
    return _FLAGS


_FLAGS = tuple(
    Flag(field=field.name, default=field.default, **field.metadata) for field in dataclasses.fields(KvConfig)
)


def environment_values(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the environment, by field name.

    Raises:
        ConfigError: when a value cannot work, or a variable with our prefix is unknown; names the variable.
    """
    by_variable = {flag.variable: flag for flag in flags()}
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        flag = by_variable.get(variable)
        if flag is None:
            raise ConfigError(
                f"unknown variable {variable}",
                field=variable,
                hint=f"There are {', '.join(sorted(by_variable))}",
            )
        try:
            values[flag.field] = flag.parse(text)
        except ValueError as error:
            raise ConfigError(str(error), field=variable) from None
    return values


def check_block_size(config: KvConfig, page_size: int) -> None:
    """Check that a block is a whole number of the engine's pages.

    Raises:
        ConfigError: naming the flag and a value that works.
    """
    if config.block_size % page_size:
        fitting = -(-config.block_size // page_size) * page_size
        raise ConfigError(
            f"{config.block_size} is not a multiple of --page-size {page_size}",
            field="--kv-block-size",
            hint=f"Use --kv-block-size {fitting}",
        )


class _Listener(Protocol):
    host: str
    port: int


def with_instance_id(config: KvConfig, server: _Listener, hostname: str) -> KvConfig:
    """``config`` with an instance id: as given, or host:port, or hostname:port for a wildcard address."""
    if config.instance_id is not None:
        return config
    host = hostname if server.host in ("", "0.0.0.0", "::") else server.host
    return dataclasses.replace(config, instance_id=f"{host}:{server.port}")
