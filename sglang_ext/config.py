"""Settings of one server's shared cache, as flags and as environment variables.

``dram_size`` is ``--kv-dram-size`` on the command line and ``SGLANG_EXT_KV_DRAM_SIZE`` in the environment,
for programs that start ``sglang.Engine`` and have no command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang_ext.errors import ConfigError
from sglang_ext.flags import (
    COUNT,
    PATH,
    PORT,
    SECONDS,
    SIZE,
    Flagged,
    Parser,
    flag,
    one_of,
    parse_size,
    several_of,
)
from sglang_ext.flags.removed import SERVE
from sglang_ext.own_functions import policy_name

MAX_BLOCK_SIZE = 1024
MAX_ID_CHARS = 200
HICACHE_ORDERS = ("layer_first", "page_first", "page_first_direct", "page_unified")
"""SGLang's words for the orders of HiCache's pages that can be read (`tiered_store.hicache`)."""


def parse_id(text: str) -> str:
    """A name of an instance: visible ASCII characters without blanks.

    Raises:
        ValueError: when the text is something else.
    """
    if not text or len(text) > MAX_ID_CHARS or not all(33 <= ord(c) <= 126 for c in text):
        raise ValueError(f"{text!r} is not a name of 1 to {MAX_ID_CHARS} visible ASCII characters, no blanks")
    return text


def parse_numa(text: str) -> str:
    """``auto``, ``none`` or the number of a NUMA node.

    Raises:
        ValueError: when it is none of these.
    """
    if not re.fullmatch(r"auto|none|\d{1,3}", text):
        raise ValueError(f"{text!r} is not auto, none or the number of a node")
    return text


def parse_durability(text: str) -> str:
    """``off``, ``dram``, ``disk``, ``acked``, or ``acked:N`` with a number of answers.

    Raises:
        ValueError: when it is none of these.
    """
    if not re.fullmatch(r"off|dram|disk|acked(:\d{1,4})?", text):
        raise ValueError(f"{text!r} is not off, dram, disk, acked, or acked:N with a number of answers")
    return text


def parse_region(text: str) -> str:
    """``auto``, or a size.

    Raises:
        ValueError: when it is neither.
    """
    if text != "auto":
        parse_size(text)
    return text


def parse_hicache(text: str) -> str:
    """An order of HiCache's pages and a directory, with a colon between them.

    Raises:
        ValueError: the order cannot be read, or there is no directory.
    """
    order, _, folder = text.partition(":")
    if order not in HICACHE_ORDERS or not folder:
        raise ValueError(f"{text!r} is not LAYOUT:DIR with a LAYOUT of {', '.join(HICACHE_ORDERS)}")
    return text


def parse_urls(text: str) -> str:
    """URLs of routers, with commas between them.

    Raises:
        ValueError: when one is not of the form http://host:port or dns+http://name:port.
    """
    urls = [url.strip().rstrip("/") for url in text.split(",")]
    for url in urls:
        if not re.fullmatch(r"(https?|dns\+http)://[^/?#@\s]+", url):
            raise ValueError(f"{url!r} is not of the form http://host:port or dns+http://name:port")
    return ",".join(dict.fromkeys(urls))


def parse_host(text: str) -> str:
    """An address, or a name of a host or of a network interface.

    Raises:
        ValueError: when it is none.
    """
    if not re.fullmatch(r"[0-9A-Za-z._:-]{1,253}", text):
        raise ValueError(f"{text!r} is neither an address nor a name")
    return text


def parse_ports(text: str) -> str:
    """Two ports with a dash between them.

    Raises:
        ValueError: when they are none, or the second is the smaller.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536):
        raise ValueError(f"{text!r} is not of the form 31000-31099")
    return text


@dataclass(frozen=True)
class KvConfig(Flagged):
    """The settings of one server's shared cache.

    Raises:
        ConfigError: from the constructor, when a value cannot work; names the flag.
    """

    flag_prefix = "--kv-"
    variable_prefix = "SGLANG_EXT_KV_"
    removed = SERVE

    dram_size: int = flag(
        0,
        "The size of the DRAM tier per rank, such as 512MB, 4GB or 4GiB. "
        "0 means no DRAM tier: KV that leaves the device is recomputed.",
        SIZE,
        group="Tiers",
        common=True,
    )
    disk_path: str | None = flag(
        None,
        "The directory of the disk tier, on a local disk; each server needs its own. KV in it survives "
        "restarts. Needs a DRAM tier. Not given: no disk tier.",
        PATH,
        common=True,
    )
    disk_size: int = flag(
        32 * 10**9,
        "The most that the disk tier may take per rank. Older KV is given up for newer.",
        SIZE,
        common=True,
    )
    durability: str = flag(
        "disk",
        "How far new KV is written by itself: off (nowhere), dram, or disk. With acked, the end of an answer "
        "is held back until the KV of its prompt and itself is on disk; with acked:N, until that holds for "
        "all answers of its conversation but the newest N. What is there already is used in any case.",
        Parser(parse_durability, "off|dram|disk|acked[:N]"),
        common=True,
    )
    durability_timeout: float = flag(
        10.0,
        "With --kv-durability acked: how long the end of an answer is held back at most. It is then sent "
        "all the same, with durability_end late, and counted.",
        SECONDS.positive(),
        within="--kv-durability",
        key="timeout",
    )
    eviction_policy: str = flag(
        "lru",
        "The order in which blocks leave a tier: lru (least recently used first), slru (segmented LRU: "
        "blocks used only once leave before blocks used again), or a function of your own as "
        "package.module:function.",
        policy_name(("lru", "slru")),
        common=True,
    )
    block_size: int = flag(
        16,
        f"The number of tokens in a block, the unit of index, tiers and transfer. "
        f"A multiple of --page-size, 1 to {MAX_BLOCK_SIZE}. The same on every server of a cluster.",
        COUNT.within(1, MAX_BLOCK_SIZE),
        "TOKENS",
        common=True,
    )
    numa: str = flag(
        "auto",
        "On which NUMA node the DRAM tier of a rank lies: auto is that of its GPU, or of the processors that "
        "it is confined to; none is wherever the kernel puts it.",
        Parser(parse_numa, "auto|none|NODE"),
    )
    disk_io: str = flag(
        "auto",
        "How KV is read from disk: buffered (through the page cache), direct (with O_DIRECT, unless the page "
        "cache has the bytes anyway) or auto (direct unless that is clearly slower, measured at start with a "
        "temporary file of 64 MiB).",
        one_of("auto", "direct", "buffered"),
    )
    disk_lag: str = flag(
        "skip",
        "What happens to new KV while the disk cannot keep up: skip (it stays in DRAM only, counted, and is "
        "tried again with the next turn) or wait (the server waits, for up to 5 seconds).",
        one_of("skip", "wait"),
        within="--kv-disk-io",
        key="lag",
    )
    disk_admission: str = flag(
        "first-layer",
        "When a request that takes KV from disk is admitted: first-layer (the rest streams in front of the "
        "forward pass, which runs again if a layer turns out to be damaged) or complete (all of it has been "
        "read and verified). With --kv-transfer-mode push-by-layer, with --pp-size above 1 and, on a GPU, "
        "with a draft model, always complete.",
        one_of("first-layer", "complete"),
        within="--kv-disk-io",
        key="admission",
    )
    layer_cache_size: int = flag(
        0,
        "Memory per rank for the lowest layers of KV on disk, with which requests start at once while the "
        "rest streams from disk. 0 means none.",
        SIZE,
    )
    layer_cache_layers: int = flag(
        1,
        "How many of the lowest layers the layer cache keeps.",
        COUNT.within(1, 1024),
        "LAYERS",
        within="--kv-layer-cache-size",
        key="layers",
    )
    layer_region_size: str = flag(
        "0",
        "The most of HBM per rank that may hold the lowest layers of announced sessions, with which their "
        "requests start at once while the rest comes from DRAM: a size (then at least layer 0 is held), 0 "
        "for none, or auto (up to three quarters of it; as many layers as hide the loading of the rest, by "
        "measured speeds, and none where a wait for layer 0 would not be noticed). It is given back whenever "
        "the server needs it. Only used where announced sessions do not fit as a whole.",
        Parser(parse_region, "auto|SIZE"),
    )
    load_policy: str = flag(
        "auto",
        "What to do with KV found on disk: auto (load it when that is expected to be faster than computing, "
        "from measured speeds) or always (load it).",
        one_of("auto", "always"),
    )
    load_min_tokens: int = flag(
        64,
        "The shortest run of tokens worth loading from DRAM or disk; shorter runs are recomputed.",
        metavar="TOKENS",
        within="--kv-load-policy",
        key="min-tokens",
    )
    hicache: str | None = flag(
        None,
        "The directory of HiCache's file backend, behind the --hicache-mem-layout of the servers that wrote "
        "it (layer_first, page_first, page_first_direct or page_unified), as in layer_first:/data/l3. KV "
        "that --kv-disk-path lacks is read from there. The files have no checksums. Not given: none.",
        Parser(parse_hicache, "LAYOUT:DIR"),
        within="--kv-load-policy",
        key="hicache",
    )
    pressure_policy: str = flag(
        "weakest-first",
        "Which announced sessions lose their KV when nothing else is left that could go: weakest-first "
        "(lowest priority, then the hint that expires soonest), smallest-first (lowest priority, then the "
        "least KV, as in Symphony), or a function of your own as package.module:function.",
        policy_name(("weakest-first", "smallest-first")),
        within="--kv-eviction-policy",
        key="pressure",
    )
    retract_wait: float | None = flag(
        None,
        "With --enable-priority-scheduling: how long a request may be expected to wait for room before "
        "running requests of lower priorities are retracted for it; their KV is kept, and they go on from it "
        "later. 0 retracts them whenever there is no room. Not given: 200ms.",
        SECONDS,
    )
    dram_for_others: int = flag(
        0,
        "The most of the DRAM tier per rank that may keep KV for other servers of the cluster whose own DRAM "
        "is full. Only what is free is used for that, and this server takes it back whenever it needs it. "
        "Needs a router and a DRAM tier. 0 means none.",
        SIZE,
        within="--kv-dram-size",
        key="for-others",
    )
    check: bool = flag(
        False,
        "Verify all invariants of the cache whenever the server is idle. For debugging; slow.",
    )
    router: str | None = flag(
        None,
        "A router to register with, and to tell of everything that enters or leaves the cache. Give it once "
        "per router (in the environment: URLs with commas between them). dns+http://NAME:PORT means the "
        "routers at all addresses of a name, such as a headless Service's; it is looked up every 5 seconds.",
        Parser(parse_urls, "URL"),
        several="append",
        collect=",".join,
        group="Cluster",
        common=True,
    )
    cluster_key_file: str | None = flag(
        None,
        "The file with the key of the cluster, the same on every member. Without it the agent listens on "
        "loopback only.",
        PATH,
        common=True,
    )
    instance_id: str | None = flag(
        None,
        "The name of this server in the cluster, unique there. Defaults to where it is reached, and beyond "
        "loopback on which machine.",
        Parser(parse_id, "NAME"),
        common=True,
    )
    announce_host: str | None = flag(
        None,
        "The address (or a name that all members can look up) by which routers and other servers reach this "
        "one. Not given: --host; where that is every address, this machine's on the way to the router.",
        Parser(parse_host, "HOST"),
        common=True,
    )
    data_interface: str | None = flag(
        None,
        "The network on which KV travels between servers: the name of an interface such as eth1, or this "
        "machine's address there. Not given: that of --kv-announce-host.",
        Parser(parse_host, "INTERFACE"),
    )
    ports: str | None = flag(
        None,
        "The ports on which other members reach this server beside --port and "
        "--disaggregation-bootstrap-port: one for the agent and two per rank (three with prefill and decode "
        "apart on a GPU), the first that are free of FIRST-LAST. Servers on one machine may share a range. "
        "Not given: any.",
        Parser(parse_ports, "FIRST-LAST"),
        common=True,
    )
    agent_port: int = flag(
        0,
        "The port of the agent, to which routers connect. 0 means one of --kv-ports.",
        PORT,
        within="--kv-ports",
        key="agent",
    )
    silence: float = flag(
        8.0,
        "How long a server on another machine may be silent before it is taken for dead, and what it held is "
        "freed. 8s outlasts a network that fails over in 3s. On this machine, 2.5s are enough.",
        SECONDS.positive(),
    )
    advisory_compute: bool = flag(
        False,
        "Compute the part of an announced prompt that no instance holds, while this server is idle. "
        "A request that comes meanwhile waits for one prefill chunk at most.",
    )
    pd_caching: str = flag(
        "3",
        "With --disaggregation-transfer-backend global, who keeps KV: basic (neither), 1 (prefill keeps what "
        "it computed), 2 (decode keeps what it received and generated too, and is sent what it lacks) or 3 "
        "(decode's KV returns to prefill when a request ends). The same on every server of a cluster.",
        one_of("basic", "1", "2", "3"),
        group="Hand-overs between prefill and decode",
        common=True,
    )
    transfer_mode: str = flag(
        "pull",
        "With --disaggregation-transfer-backend global: pull (prefill computes at once, decode allocates and "
        "reads when it is done), push (decode allocates first, prefill writes when it is done) or "
        "push-by-layer (prefill writes each layer while it computes the next). The same on every server.",
        one_of("pull", "push", "push-by-layer"),
        common=True,
    )
    transfer_layout: str = flag(
        "blocks",
        "With --disaggregation-transfer-backend global, how a request's KV lies while it travels: blocks (as "
        "in the engine's pool, one range per page and plane) or aggregated (packed into one range first, and "
        "unpacked on arrival; for pools in host memory, not with push-by-layer). The same on every server.",
        one_of("blocks", "aggregated"),
    )
    transfer_staging_size: int = flag(
        256 * 10**6,
        "With --kv-transfer-layout aggregated: memory per rank in which requests are packed. A request that "
        "finds no room there travels in blocks.",
        SIZE,
        within="--kv-transfer-layout",
        key="staging",
    )
    transports: str = flag(
        "",
        "How KV may travel between servers, best first, such as cma,tcp. Not given: the first of shm, cma, "
        "cuda_ipc, verbs and tcp by which the other's memory can really be reached. gpudirect is RDMA from "
        "and to GPU memory, which has never run.",
        several_of("shm", "cma", "cuda_ipc", "verbs", "tcp", "gpudirect"),
        common=True,
    )
    rdma_devices: str = flag(
        "",
        "RDMA devices, or device:port, such as mlx5_0,mlx5_3:2: rank i takes entry i, round and round. Not "
        "given: each rank takes the one nearest to its GPU or memory, by PCI and NUMA.",
        metavar="A,B",
    )
    transfer_coalescing: str = flag(
        "on",
        "Whether adjacent ranges of KV are read or written as one (KVDirect, section 4.2). off is for "
        "measuring what that is worth.",
        one_of("on", "off"),
        group="Measuring",
        variable_only=True,
    )
    stage_times: str = flag(
        "on",
        "Whether each answer tells how long its request spent in each stage: prefill queue, prefill, "
        "transfer, decode queue and decode.",
        one_of("on", "off"),
        variable_only=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disk_path is not None and not self.dram_size:
            raise ConfigError(
                "the disk tier is written from DRAM and read into it",
                field="--kv-disk-path",
                hint="Give the DRAM tier a size too, such as --kv-dram-size 4GB",
            )
        if self.hicache is not None and (self.disk_path is None or self.acked_behind is not None):
            raise ConfigError(
                "what is read from HiCache's files goes on to the disk tier, and is no durable answer",
                field="--kv-load-policy hicache",
                hint="Give --kv-disk-path too, and a --kv-durability other than acked",
            )
        if self.acked_behind is not None and self.disk_path is None:
            raise ConfigError(
                "without a disk tier no answer becomes durable",
                field="--kv-durability",
                hint="Give --kv-disk-path too, or choose dram or off",
            )
        if self.agent_port and self.router is None:
            raise ConfigError(
                "there is no agent without a router", field="--kv-ports agent", hint="Give --kv-router"
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
        if self.dram_for_others and (self.router is None or not self.dram_size):
            raise ConfigError(
                "a router says what of other servers' KV is kept, and it is kept in DRAM",
                field="--kv-dram-size for-others",
                hint="Give --kv-router and --kv-dram-size too, or set it to 0",
            )
        if self.dram_for_others > self.dram_size:
            raise ConfigError(
                f"{self.dram_for_others} bytes are more than the DRAM tier has ({self.dram_size})",
                field="--kv-dram-size for-others",
                hint="Give a part of --kv-dram-size",
            )
        if self.layer_cache_size and self.disk_path is None:
            raise ConfigError(
                "the layer cache is for KV on disk",
                field="--kv-layer-cache-size",
                hint="Set it to 0, or give --kv-disk-path",
            )

    @property
    def port_range(self) -> tuple[int, ...]:
        """Ports of which the first free one is taken; 0 is any."""
        if self.ports is None:
            return (0,)
        first, _, last = self.ports.partition("-")
        return tuple(range(int(first), int(last) + 1))

    @property
    def layer_region_bytes(self) -> int | None:
        """Most bytes of HBM for layers of announced sessions; None for as much as is good."""
        return None if self.layer_region_size == "auto" else parse_size(self.layer_region_size)

    @property
    def writes_dram(self) -> bool:
        """Whether new KV is written to DRAM by itself (``durability``)."""
        return self.durability != "off"

    @property
    def writes_disk(self) -> bool:
        """Whether it goes on to the disk."""
        return self.durability == "disk" or self.acked_behind is not None

    @property
    def acked_behind(self) -> int | None:
        """Of each conversation, how many answers need not be durable when the end of the newest is sent; None
        where no end waits for that.
        """
        word, _, behind = self.durability.partition(":")
        return int(behind or 0) if word == "acked" else None


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
