"""The mechanisms that A drives: A's and B's requests, and the servers."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.disagg.elsewhere import DRAM, FOR_OTHERS, first_by_name
from benchmarks.disagg.servers import GroupSpec, routed, running
from benchmarks.noisy_neighbour.sides import A_AT_ONCE, KEYS, LIMITS, Ask, Drive, Side, number, text, tokens
from benchmarks.router.processes import our_router, process, stand_ins, wait_for
from benchmarks.tiers.servers import TOKEN_BYTES
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.testing.tokenizer import write_tokenizer
from sglang_ext.testing.waiting import wait_until
from tests.support.servers.ports import free_port

WORKERS = 2
SERVICE_S = 0.02
PLACES = 8
"""Requests that a stand-in works on at a time."""
CONTEXT = 131_072
B_CHARS = 4096
LONG_CHARS = 200_000
TALK_TOKENS = 1024
ADDED_TOKENS = 16
"""By a turn."""
HBM_TOKENS, DRAM_TOKENS = 4096, 6144
"""Of the server with a disk: less than B's conversations have."""
AMPLE_DRAM_TOKENS = 1 << 17
"""Of the control's server: all that A and B send."""
B_TALKS = {"disk": 12, "spilling": 3}
"""B's conversations: more than memory holds, so that they come from disk; as many as DRAM holds without A."""
A_TALKS = 16


Stage = Callable[[], AbstractContextManager[str]]
"""Runs servers and a router, and gives the router's URL."""


@dataclass(frozen=True)
class Mechanism:
    """per_s: B's requests. at_once: A's requests at a time. control: servers without the mechanism, where
    that is not a matter of A's requests."""

    drive: Drive
    ask: Ask
    stage: Stage
    per_s: float = 20.0
    at_once: int = A_AT_ONCE
    control: Stage | None = None


# -- stages ----------------------------------------------------------------------------------------------


def _key_file(folder: Path) -> Path:
    """The keys of both tenants."""
    path = folder / "keys.json"
    entries = [
        {"key": KEYS["a"], "tenant": "a", **LIMITS},
        {"key": KEYS["b"], "tenant": "b"},
        {"key": KEYS["admin"], "tenant": "admin", "admin": True},
    ]
    path.write_text(json.dumps({"keys": entries}), encoding="utf-8")
    os.chmod(path, 0o600)
    return path


@contextlib.contextmanager
def before_stand_ins() -> Iterator[str]:
    """A router before stand-in workers, processes of their own."""
    with tempfile.TemporaryDirectory(prefix="noisy-neighbour-") as name:
        folder = Path(name)
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(tokenizer, CONTEXT)
        with stand_ins(folder, tokenizer=tokenizer, service_s=SERVICE_S, count=WORKERS, core=None) as ports:
            port = free_port()
            urls = [f"http://{LOOPBACK}:{each}" for each in ports]
            flags = ("--api-keys-file", str(_key_file(folder)), "--max-running-per-instance", str(PLACES))
            command = our_router(port, urls, *flags)
            with process(command, core=None, log=folder / "router.log") as router:
                wait_for(port, router, "/health")
                yield f"http://{LOOPBACK}:{port}"


@contextlib.contextmanager
def _before_servers(count: int, *flags: str, router: tuple[str, ...] = ()) -> Iterator[str]:
    """A router before SGLang servers with our cache."""
    port = free_port()
    spec = GroupSpec(
        0,
        count,
        (
            *("--radix-cache-backend", "global", "--kv-router", f"http://{LOOPBACK}:{port}"),
            *("--max-total-tokens", str(HBM_TOKENS), "--chunked-prefill-size", "256"),
            *("--kv-load-policy", "always", *flags),
        ),
    )
    with running({"all": spec}) as groups, tempfile.TemporaryDirectory(prefix="noisy-router-") as name:
        keys = ("--api-keys-file", str(_key_file(Path(name))))
        with routed(groups["all"], Path(name), port=port, flags=(*keys, *router)):
            url = f"http://{LOOPBACK}:{port}"
            wait_until(lambda: _registered(url) == count, seconds=120, what="all servers to register")
            yield url


def _registered(url: str) -> int:
    headers = {"authorization": f"Bearer {KEYS['admin']}"}
    found = httpx.get(f"{url}/cluster", headers=headers, timeout=30, trust_env=False).json()
    return sum(one["usable"] and one["registered"] for one in found["instances"])


@contextlib.contextmanager
def with_disk() -> Iterator[str]:
    """One server whose memory holds less than B's conversations."""
    with (
        tempfile.TemporaryDirectory(prefix="noisy-disk-") as folder,
        _before_servers(
            1,
            *("--kv-dram-size", str(DRAM_TOKENS * TOKEN_BYTES), "--kv-disk-path", folder),
            *("--kv-disk-size", str(2 << 30), "--kv-durability", "disk"),
        ) as url,
    ):
        yield url


@contextlib.contextmanager
def in_dram() -> Iterator[str]:
    """The control of a disk: the same server with DRAM for everything."""
    with _before_servers(1, "--kv-dram-size", str(AMPLE_DRAM_TOKENS * TOKEN_BYTES)) as url:
        yield url


def with_idle_dram(*flags: str) -> AbstractContextManager[str]:
    """Two servers, one of which gets all requests; the other one keeps the blocks that do not fit there."""
    policy = ("--policy", f"{first_by_name.__module__}:{first_by_name.__name__}")
    return _before_servers(2, "--kv-dram-size", f"{DRAM},for-others={FOR_OTHERS}", router=(*policy, *flags))


def without_spilling() -> AbstractContextManager[str]:
    """The control of spilling: the same servers, and blocks that do not fit are given up."""
    return with_idle_dram("--tenant-limits", "spill-blocks=0")


# -- requests --------------------------------------------------------------------------------------------


async def short_text(b: Side) -> float:
    """A prompt that was not sent before."""
    return await b.generate(text(B_CHARS))


async def tokenizing(a: Side) -> None:
    """Prompts near the context's length."""
    await a.generate(text(LONG_CHARS))


async def asked_tokens(a: Side) -> None:
    """Texts to be tokenized, and nothing else."""
    await a.send("POST", "/tokenize", {"prompt": text(LONG_CHARS)})


async def hints(a: Side) -> None:
    """Hints at long prompts that live as long as they may."""
    await a.send("POST", "/v1/advisory", {"text": text(LONG_CHARS // 4), "ttl_s": 3600})


async def documents(a: Side) -> None:
    """Documents that replace each other."""
    name = f"/v1/documents/{number() % 16}"
    await a.send("PUT", name, {"text": text(LONG_CHARS // 4)})


async def priorities(a: Side) -> None:
    """Many short requests of the highest priority that its key allows."""
    await a.generate(text(256), priority=LIMITS["priority"])


async def written(a: Side) -> None:
    """Prompts that were not sent before, whose KV goes to disk."""
    await a.generate(tokens(TALK_TOKENS))


class Talks:
    """Conversations, of which each turn is one of the next."""

    def __init__(self, count: int) -> None:
        self._talks = [tokens(TALK_TOKENS) for _ in range(count)]
        self._turn = 0

    async def __call__(self, side: Side) -> float:
        at = self._turn % len(self._talks)
        self._turn += 1
        # Once it is twice as long, it begins anew.
        self._talks[at] = [*self._talks[at], *tokens(ADDED_TOKENS)]
        if len(self._talks[at]) > 2 * TALK_TOKENS:
            self._talks[at] = tokens(TALK_TOKENS)
        return await side.generate(self._talks[at])

    async def drive(self, side: Side) -> None:
        """One turn, as a request of A's."""
        await self(side)


MECHANISMS: dict[str, Mechanism] = {
    "tokenizing": Mechanism(tokenizing, short_text, before_stand_ins),
    "tokenize-endpoint": Mechanism(asked_tokens, short_text, before_stand_ins),
    "hints": Mechanism(hints, short_text, before_stand_ins),
    "documents": Mechanism(documents, short_text, before_stand_ins),
    "priorities": Mechanism(priorities, short_text, before_stand_ins),
    "disk": Mechanism(written, Talks(B_TALKS["disk"]), with_disk, per_s=2.0, at_once=1, control=in_dram),
    "spilling": Mechanism(
        Talks(A_TALKS).drive,
        Talks(B_TALKS["spilling"]),
        with_idle_dram,
        per_s=2.0,
        at_once=1,
        control=without_spilling,
    ),
}
