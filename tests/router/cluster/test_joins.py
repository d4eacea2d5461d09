"""The messages that announce prefill servers to decode instances, and their times: by records and a clock
that stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_members import FACTS, registration

from sglang_ext.protocol.agent import PREFILLS_AGAIN_S, PrefillServer, PrefillServers, ToAgent
from sglang_ext.protocol.cluster import Registration, url_of_replica
from sglang_ext.router.cluster.joins import Joins, prefill_servers
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.testing.fakes import FakeClock

P, Q, D, E = (f"http://127.0.0.1:{port}" for port in (1001, 1002, 2001, 2002))


class Rig:
    """A fleet whose events are published; agents that take messages, or do not."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.fleet = Fleet(now=self.clock.monotonic, pairs=True)
        self.alive: set[str] = set()
        self.takes = True
        self.said: list[tuple[str, tuple[PrefillServer, ...]]] = []
        self.joins = Joins(self.fleet.rows, self, self.clock, router="r")
        self.fleet.happened.subscribe(lambda *_: self.joins.announce())

    def registration(self, name: str) -> Registration | None:
        row = self.fleet.rows.get(name)
        return row.registration if row is not None and name in self.alive else None

    def send(self, name: str, message: ToAgent) -> bool:
        if not self.takes:
            return False
        assert isinstance(message, PrefillServers)
        assert message.router == "r"
        self.said.append((name, message.servers))
        return True

    def join(self, url: str, role: str, epoch: int = 1, port: int | None = 9000) -> None:
        name = url.rpartition(":")[2]
        self.fleet.join(url, registration(name, url, epoch, role=role))
        self.alive.add(url)
        self.fleet.learnt(url, replace(FACTS, role=role, bootstrap_port=port, identity=f"{url} {epoch}"))

    def take(self) -> list[tuple[str, tuple[PrefillServer, ...]]]:
        said, self.said = self.said, []
        return said


def server(url: str, epoch: int = 1, port: int = 9000) -> PrefillServer:
    return PrefillServer(url.rpartition(":")[2], epoch.to_bytes(16), f"127.0.0.1:{port}")


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_prefill_server_that_joins_is_announced_to_all_decode_servers(rig: Rig) -> None:
    rig.join(D, "decode")
    rig.join(E, "decode")
    assert rig.take() == [], "there is none to announce"
    rig.join(P, "prefill")
    assert sorted(rig.take()) == [(D, (server(P),)), (E, (server(P),))]


def test_a_decode_server_receives_all_prefill_servers_at_its_start(rig: Rig) -> None:
    rig.join(P, "prefill")
    rig.join(Q, "prefill", port=None)
    assert rig.take() == [], "prefill servers receive nothing"
    rig.join(D, "decode")
    # SGLang's own port, where the server does not tell.
    assert rig.take()[-1] == (D, (server(P), server(Q, port=8998)))


def test_replicas_of_a_prefill_server_are_announced_each_by_its_address(rig: Rig) -> None:
    urls = [url_of_replica(P, rank) for rank in range(2)]
    for url in urls:
        rig.join(url, "prefill")
    rig.join(D, "decode")
    ((_, servers),) = rig.take()
    assert [each.address for each in servers] == ["127.0.0.1:9000", "127.0.0.1:9000#dp1"]


def test_what_is_known_is_said_again_only_after_a_while(rig: Rig) -> None:
    rig.join(P, "prefill")
    rig.join(D, "decode")
    rig.take()
    for _ in range(3):
        rig.joins.announce()
    assert rig.take() == []
    rig.clock.advance(PREFILLS_AGAIN_S)
    rig.joins.announce()
    rig.joins.announce()
    assert rig.take() == [(D, (server(P),))]


def test_a_silent_agent_receives_announcements_once_it_is_alive(rig: Rig) -> None:
    rig.join(P, "prefill")
    rig.join(D, "decode")
    rig.take()
    rig.alive.discard(D)
    rig.joins.announce()
    rig.alive.add(D)
    rig.joins.announce()
    assert rig.take() == [(D, (server(P),))]


def test_what_was_not_taken_is_sent_again(rig: Rig) -> None:
    rig.takes = False
    rig.join(P, "prefill")
    rig.join(D, "decode")
    rig.takes = True
    rig.joins.announce()
    assert rig.take() == [(D, (server(P),))]


@pytest.mark.parametrize("how", ["lost", "leave", "drain", "missed"])
def test_one_that_is_gone_is_not_named_any_more(rig: Rig, how: str) -> None:
    rig.join(P, "prefill")
    rig.join(Q, "prefill")
    rig.join(D, "decode")
    rig.take()
    if how == "missed":  # one probe is no verdict
        rig.fleet.missed(P, "slow")
        assert rig.take() == []
        return
    getattr(rig.fleet, how)(P, "a test")
    assert rig.take() == [(D, (server(Q),))]


def test_a_restart_is_another_server(rig: Rig) -> None:
    rig.join(P, "prefill")
    rig.join(D, "decode")
    rig.take()
    rig.join(P, "prefill", epoch=2)
    assert rig.take() == [(D, ()), (D, (server(P, epoch=2),))]
    # And a decode server that was started anew knows nothing.
    rig.join(D, "decode", epoch=2)
    assert rig.take()[-1] == (D, (server(P, epoch=2),))


def test_a_change_of_roles_is_followed(rig: Rig) -> None:
    rig.join(P, "prefill")
    rig.join(D, "decode")
    rig.take()
    rig.fleet.rows[P].update(rig.fleet.rows[P].facts, registration("1001", P, role="decode"))
    rig.fleet.learnt(P, replace(FACTS, role="decode", identity="changed"))
    assert rig.take() == [(D, ())]


def test_addresses_are_as_requests_name_them(rig: Rig) -> None:
    url = "http://[::1]:1001"
    rig.fleet.join(url, None)
    rig.fleet.learnt(url, replace(FACTS, role="prefill", bootstrap_port=7))
    (told,) = prefill_servers(rig.fleet.rows.values())
    assert told == PrefillServer(url, b"", "[::1]:7")
