"""Flags of SGLang's server for caches and disaggregation. All others stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sglang_ext.migrate.rules import NoEqualError, Rule, Words, choice, each, no_equal, nothing, to

GLOBAL: Final = ("--radix-cache-backend", "global")
"""Flags that start the shared cache."""
_STORE = (
    "this package has no store apart from the servers: servers that register with a router (--kv-router URL) "
    "fetch KV from each other, and keep it on their own disks (--kv-disk-path DIR)"
)
_LINKER = "the shared cache stands where SGLang's linker would. " + _STORE
_SPARSE = (
    "hierarchical sparse attention keeps a part of each request's KV on the device, which is not supported"
)
FILE_STORE: Final = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
"""SGLang's environment variable for the folder of HiCache's file backend."""
FILE_FOLDER: Final = "/tmp/hicache"
"""That folder where the variable is not set."""
_ORDERS: Final = ("layer_first", "page_first", "page_first_direct")
_OWN: Final = "-kv"


def _storage(given: Words) -> Words:
    if given == ["file"]:
        return ["--kv-disk-path", FILE_FOLDER + _OWN]
    raise NoEqualError(_STORE)


def file_store(folder: str, layout: str, io_backend: str) -> tuple[str, Words]:
    """The folder of the disk tier beside one of HiCache's, and the flags with which that one is read.

    Args:
        layout, io_backend: values of ``--hicache-mem-layout`` and ``--hicache-io-backend``.

    Raises:
        NoEqualError: files of that layout are not read.
    """
    folder = folder.rstrip("/")
    if layout == "page_first" and io_backend == "direct":
        layout = "page_first_direct"  # as SGLang does
    if layout not in _ORDERS:
        raise NoEqualError(
            f"files of the layout {layout} are not read: leave them; the disk tier fills as prompts come"
        )
    return folder + _OWN, ["--kv-load-policy", f"hicache={layout}:{folder}"]


def _transfer(given: Words) -> Words:
    if given == ["fake"]:
        raise NoEqualError("a pair without a transfer is for measurements of SGLang only")
    tcp = ("--kv-transports", "tcp") if given == ["mooncake_tcp"] else ()
    return ["--disaggregation-transfer-backend", "global", *tcp]


SERVER_FLAGS: Final[Mapping[str, Rule]] = {
    **each(
        ("--enable-hierarchical-cache", "--enable-hicache"),
        Rule(lambda _: list(GLOBAL), f"`{' '.join(GLOBAL)}`", "with `--kv-dram-size` below", 0),
    ),
    "--hicache-size": to(
        "--kv-dram-size", "per rank, as HiCache's; in GB", convert=lambda gigabytes: f"{float(gigabytes):g}GB"
    ),
    "--hicache-ratio": no_equal(
        "give the DRAM tier a size, --kv-dram-size SIZE, per rank: the ratio times the size of the KV pool, "
        "which SGLang logs at start"
    ),
    "--hicache-host-memory-fraction": nothing("--kv-dram-size is checked against the host's memory at start"),
    "--hicache-host-memory-mode": choice(
        "", {"cache": ""}, "host memory is a tier, never a staging buffer only: leave the flag out"
    ),
    "--hicache-write-policy": nothing(
        "KV is written through, behind the computation; `--kv-durability` says how far"
    ),
    "--hicache-io-backend": nothing("copies between device and host choose their way by themselves"),
    "--hicache-mem-layout": nothing(
        "the DRAM tier has one layout; with `--hicache-storage-backend file` the layout of the files to read"
    ),
    "--hicache-storage-backend": Rule(
        _storage,
        "file → `--kv-disk-path`, a folder beside HiCache's, and `--kv-load-policy hicache=LAYOUT:DIR`",
        "each server needs its own disk tier; HiCache's files are only read",
        others=_STORE,
    ),
    "--hicache-storage-backend-extra-config": no_equal(_STORE),
    "--hicache-storage-prefetch-policy": choice(
        "--kv-load-policy",
        {"best_effort": "auto", "timeout": "auto", "wait_complete": "always"},
        "there are auto and always",
        "auto loads where that is expected to be faster than computing",
    ),
    **each(
        ("--hicache-storage-prefetch-retry-poll-interval", "--hicache-storage-prefetch-retry-max-attempts"),
        nothing("what a tier has is known when a request comes: nothing is polled"),
    ),
    "--enable-unified-cache-external-linker": no_equal(_LINKER, values=0),
    **each(
        ("--unified-cache-external-linker-backend", "--unified-cache-external-linker-config"),
        no_equal(_LINKER),
    ),
    "--enable-hisparse": no_equal(_SPARSE, values=0),
    **each(("--hisparse-config", "--hierarchical-sparse-attention-extra-config"), no_equal(_SPARSE)),
    "--enable-lmcache": Rule(
        lambda _: list(GLOBAL), f"`{' '.join(GLOBAL)}`", "with the settings of LMCache below", 0
    ),
    "--radix-eviction-policy": choice(
        "--kv-eviction-policy",
        {"lru": "", "slru": "slru"},
        "there are lru and slru; others are functions of your own, given as package.module:function",
    ),
    "--radix-eviction-policy-config": no_equal("policies of this package have no parameters"),
    "--radix-cache-backend": Rule(
        lambda _: list(GLOBAL),
        f"`{' '.join(GLOBAL)}`",
        "one backend at a time: the shared cache takes its place",
    ),
    "--enable-session-radix-cache": no_equal(
        "sessions are kept by hints: send them to the router (docs/advisory.md)", values=0
    ),
    "--kv-events-config": no_equal(
        "servers tell routers of their KV themselves (--kv-router URL); a router answers what it knows at "
        "POST /query"
    ),
    "--disaggregation-transfer-backend": Rule(
        _transfer,
        "`--disaggregation-transfer-backend global`",
        "one transport for all ways: shared memory, process memory, RDMA, TCP; mooncake_tcp adds "
        "`--kv-transports tcp`",
    ),
    "--disaggregation-ib-device": to(
        "--kv-rdma-devices", "rank i takes entry i; without it each rank takes the nearest device"
    ),
    "--disaggregation-decode-enable-radix-cache": nothing(
        "`--kv-pd-caching`, 3 by default, sets it", values=0
    ),
    "--disaggregation-decode-enable-offload-kvcache": no_equal(
        "decode keeps KV in its tiers and returns it to prefill: give --kv-dram-size and leave this out",
        values=0,
    ),
    "--disaggregation-enable-kv-checksum": no_equal(
        "KV in tiers is verified by checksums, but not KV that is handed over", values=0
    ),
}
"""Of the server. A flag with `disaggregation`, `hicache` or the like in its name that is not here is listed
in `KEPT`."""
KEPT: Final = frozenset(
    {
        "--disable-radix-cache",
        "--enable-unified-memory",
        "--mamba-radix-cache-strategy",
        "--disaggregation-mode",
        "--disaggregation-bootstrap-port",
        "--disaggregation-decode-retraction-backup",
        "--disaggregation-decode-extra-slots",
        "--disaggregation-decode-polling-interval",
        "--disaggregation-decode-host-receive-threshold",
        "--disaggregation-decode-allocation-policy",
    }
)
"""Flags of SGLang's that a server with the shared cache takes as they are."""
