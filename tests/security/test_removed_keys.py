"""A key that was removed from the cluster's is of no use within seconds: agents end its channels."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from sglang_ext.clock import SystemClock
from sglang_ext.cluster_key import ClusterKey, read_cluster_key
from sglang_ext.engine.events import agent as agent_module
from sglang_ext.keys import encode_tokens
from sglang_ext.router.cluster.agents import Agents
from sglang_ext.router.index.index import Index
from sglang_ext.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from agent_rig import NAME, PLAIN, Instance, until

pytestmark = pytest.mark.slow

OLD, NEW = "the old key of the cluster, 0123456789", "the new key of the cluster, 0123456789"


def written(path: Path, *keys: str) -> Path:
    path.touch(mode=0o600)
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text("\n".join(keys) + "\n")
    new.rename(path)
    return path


def router(key: ClusterKey, name: str) -> Agents:
    return Agents(Index(SystemClock(), block_size=4), SystemClock(), router=name, key=key)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "cluster.key", OLD, NEW)


async def test_who_has_only_a_removed_key_hears_no_more_of_an_agent(file: Path) -> None:
    instance = Instance(key=read_cluster_key(str(file)))
    rekeyed: list[str] = []
    instance.agent.rekeyed.subscribe(rekeyed.append)
    before = instance.registration
    ours, theirs = router(read_cluster_key(str(file)), "ours"), router(ClusterKey(OLD.encode()), "theirs")
    try:
        for each in (ours, theirs):
            each.connect(NAME, before)
            await until(lambda each=each: each.index.trusted(NAME), instance)
        (link,) = theirs._links.values()
        written(file, NEW)
        await until(lambda: rekeyed != [], instance)
        assert rekeyed == [ClusterKey(NEW.encode()).curve_pair()[0].decode()]
        await until(lambda: not link.alive, instance)
        last_seen_at = link.last_seen_at
        # The agent says so to routers, and the one with a key that is accepted has all of it again.
        instance.insert([7] * 8)
        anew = msgspec.structs.replace(before, agent_key=rekeyed[0])
        ours.connect(NAME, anew)
        await until(lambda: ours._links[NAME].alive and ours.index.trusted(NAME), instance)
        await until(lambda: NAME in ours.index.match(PLAIN, encode_tokens([7] * 8)), instance)
        assert (link.alive, link.last_seen_at) == (False, last_seen_at)
    finally:
        await ours.close()
        await theirs.close()
        instance.close()


def test_routers_of_long_ago_are_forgotten() -> None:
    instance = Instance()
    try:
        agent = instance.agent
        now = agent._now()
        long_ago = dict.fromkeys((f"r{number}" for number in range(1000)), now - agent_module.FORGET_S - 1.0)
        agent._heard = {**long_ago, "now": now}
        wait_until(lambda: not long_ago.keys() & agent._heard.keys(), seconds=30, what="a heartbeat")
        assert "now" in agent._heard
        assert agent.silent_s("r1") == float("inf")
    finally:
        instance.close()
