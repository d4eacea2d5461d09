"""Members that come and go, by records and a clock that stands still; no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sglang_ext.errors import InternalError, PeerError
from sglang_ext.protocol.agent import Beat, Fill
from sglang_ext.protocol.cluster import (
    HEARTBEAT_S,
    VERDICT_S,
    Cluster,
    InstanceView,
    Registration,
    TierFill,
    url_of_replica,
)
from sglang_ext.router.api.documents import Document
from sglang_ext.router.cluster.broadcast import RouterChannel
from sglang_ext.router.cluster.members import FORGET_S, HEARD_S, CannotChangeRole, Members, Unknown
from sglang_ext.router.cluster.members_view import cluster, instance_view
from sglang_ext.router.cluster.membership import EmbeddedMembership, RouterStatus, Seen
from sglang_ext.router.cluster.roster import (
    LEFT_KEPT_S,
    Intent,
    Member,
    Roster,
    Taken,
    decode_member,
    encode_member,
)
from sglang_ext.router.dispatch.flight import Homes
from sglang_ext.router.fleet.facts import InstanceFacts, ModelFacts
from sglang_ext.router.fleet.fleet import Fleet, Load
from sglang_ext.router.fleet.health import HealthWatch
from sglang_ext.router.fleet.lifecycle import TRANSITIONS, USABLE, Event, State
from sglang_ext.signals import Signal
from sglang_ext.tasks import Rounds
from sglang_ext.testing.fakes import FakeClock

pytestmark = pytest.mark.slow

FACTS = InstanceFacts(
    ModelFacts("llama", "LlamaForCausalLM", 32_000, 4096), "default", "start-1", "colocated", "/models/llama"
)
A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"


def registration(name: str = "a", url: str = A, epoch: int = 1, **more: Any) -> Registration:
    return Registration(url=url, instance=name, epoch=f"{epoch:032x}", **more)


@dataclass
class Links:
    """The messages that the agents received."""

    connected: dict[str, Registration] = field(default_factory=dict)
    dead: list[tuple[str, int]] = field(default_factory=list)
    beats: dict[str, Beat] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)

    def connect(self, name: str, registration: Registration) -> None:
        self.connected[name] = registration

    def disconnect(self, name: str) -> None:
        self.connected.pop(name, None)

    def peer_dead(self, instance: str, epoch: str) -> None:
        self.dead.append((instance, int(epoch, 16)))

    def beat(self, name: str) -> Beat | None:
        return self.beats.get(name)

    def silent_s(self, name: str) -> float:
        return self.silent.get(name, math.inf)


class Watch(HealthWatch):
    """The instances that are watched."""

    def __init__(self, fleet: Fleet, clock: FakeClock) -> None:
        nobody: Any = None
        super().__init__(fleet, nobody, clock, interval_s=1.0, timeout_s=1.0, rounds=Rounds())
        self.watched: list[str] = []

    def watch(self, name: str) -> None:
        self.watched.append(name)


@dataclass
class Store(EmbeddedMembership):
    """The records that were shared."""

    published: list[Member] = field(default_factory=list)
    written: list[RouterStatus] = field(default_factory=list)

    def publish(self, member: Member) -> None:
        self.published.append(member)

    def share_status(self, status: RouterStatus) -> None:
        self.written.append(status)


class NoDocuments:
    """A router to which no document was given."""

    def __init__(self) -> None:
        self.changed: Signal[[Document]] = Signal()

    def learn(self, document: Document) -> None:
        raise AssertionError(document)

    def all(self) -> list[Document]:
        return []


class Rig:
    """A manager without anything around it."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.fleet = Fleet(now=self.clock.monotonic)
        self.watch, self.links, self.store = Watch(self.fleet, self.clock), Links(), Store()
        self.members = Members(
            self.fleet,
            self.watch,
            self.store,
            self.clock,
            channel=RouterChannel("router"),
            links=self.links,
            homes=Homes(self.fleet.rows.keys),
            documents=NoDocuments(),
            on_drain=lambda name: None,
        )

    def join(self, name: str = "a", url: str = A, epoch: int = 1, **more: Any) -> None:
        """Register, and be found in order."""
        self.members.register(registration(name, url, epoch, **more))
        self.fleet.learnt(url, FACTS)

    def state(self, url: str = A) -> State | None:
        row = self.fleet.rows.get(url)
        return row.state if row else None

    def view(self, name: str = "a") -> InstanceView:
        return instance_view(self.members, self.members.member(name), {})

    def check(self) -> None:
        self.fleet.check()
        self.members.roster.check()


@pytest.fixture
def rig() -> Rig:
    return Rig()


# -- registering ---------------------------------------------------------------------------------------------


def test_an_instance_registers_and_is_given_requests(rig: Rig) -> None:
    answer = rig.members.register(registration(agent="tcp://127.0.0.1:5000"))
    assert (answer.instance, answer.state, answer.router) == ("a", "new", rig.members.router)
    assert rig.watch.watched == [A]
    assert rig.links.connected[A].agent == "tcp://127.0.0.1:5000"
    rig.fleet.learnt(A, FACTS)
    assert rig.members.register(registration(agent="tcp://127.0.0.1:5000")).state == "ready"
    assert rig.watch.watched == [A]
    assert len(rig.store.published) == 1
    rig.check()


def test_a_view_lists_the_tiers_of_an_instance(rig: Rig) -> None:
    rig.join()
    assert rig.view().tiers == {}
    rig.links.beats[A] = Beat(bytes(16), 0, fills=(Fill(0, 3, 8, 1), Fill(2, 0, 100), Fill(31, 1, 1)))
    assert rig.view().tiers == {
        "hbm": TierFill(used=3, size=8, spilled=1),
        "disk": TierFill(used=0, size=100),
    }
    shown = msgspec.json.decode(msgspec.json.encode(cluster(rig.members)))
    assert shown["instances"][0]["tiers"]["hbm"] == {"used": 3, "size": 8, "spilled": 1}


def test_an_instance_without_an_agent_is_not_connected(rig: Rig) -> None:
    rig.join()
    assert rig.links.connected == {}


def test_a_new_epoch_is_a_restart_and_everybody_hears_of_the_old_one(rig: Rig) -> None:
    rig.join(epoch=1)
    rig.members.register(registration(epoch=2))
    assert rig.state() is State.NEW
    assert rig.links.dead == [("a", 1)]
    assert rig.watch.watched == [A, A]
    rig.check()


def test_a_name_that_lives_elsewhere_is_taken(rig: Rig) -> None:
    rig.join(epoch=1)
    with pytest.raises(Taken, match="lives"):
        rig.members.register(registration(url=B, epoch=2))
    rig.clock.advance(VERDICT_S + 1)
    rig.members.register(registration(url=B, epoch=2))
    assert rig.state(A) is None
    assert rig.state(B) is State.NEW
    assert rig.links.dead[0] == ("a", 1)
    rig.check()


def test_two_that_announce_one_address_do_not_take_turns(rig: Rig) -> None:
    """The second is refused while heartbeats of the very first arrive, whether they have one name or two."""
    rig.join(epoch=1, agent="tcp://127.0.0.1:5000")
    rig.links.beats[A], rig.links.silent[A] = Beat((1).to_bytes(16, "big"), 0), HEARTBEAT_S
    for name in ("a", "b"):
        with pytest.raises(Taken, match=r"lives.*--kv-announce-host"):
            rig.members.register(registration(name, epoch=2))
    assert rig.view().epoch == f"{1:032x}"
    assert rig.members.register(registration(epoch=1, agent="tcp://127.0.0.1:5000")).state == "ready"
    rig.links.silent[A] = HEARD_S  # it was killed
    rig.members.register(registration(epoch=2))
    assert rig.links.dead == [("a", 1)]
    # Heartbeats now come from the old process, still, or from another one.
    rig.links.silent[A] = 0.0
    rig.members.register(registration(epoch=3))
    rig.check()


def test_an_instance_that_is_not_reached_back_gets_the_reason_and_so_does_the_log(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    again = registration(agent="tcp://node7:5000")
    assert rig.members.register(again).problem == ""
    rig.fleet.lost(A, "cannot connect to it: the name is not known")
    for _ in range(2):
        problem = rig.members.register(again).problem
        assert "the name is not known" in problem
        assert "tcp://node7:5000 sends no messages" in problem
    said = [record.message for record in caplog.records if "reached back" in record.message]
    assert len(said) == 1
    assert "--kv-announce-host" in said[0]
    rig.links.beats[A] = Beat((1).to_bytes(16, "big"), 0)
    assert rig.members.register(again).problem == ""


def test_a_url_belongs_to_the_instance_that_registered_last(rig: Rig) -> None:
    rig.join("a", A, 1)
    rig.join("b", A, 2)
    assert rig.members.roster.get("a").intent is Intent.GONE
    assert rig.view("b").state == "ready"
    assert [view.instance for view in cluster(rig.members).instances] == ["b"]
    rig.check()


def test_an_instance_that_was_listed_registers(rig: Rig) -> None:
    rig.members.list_url(A)
    rig.fleet.learnt(A, FACTS)
    assert rig.view("127.0.0.1:1001").registered is False
    rig.members.register(registration())
    assert [view.instance for view in cluster(rig.members).instances] == ["a"]
    rig.members.list_url(A)
    assert len(cluster(rig.members).instances) == 1
    rig.check()


def test_an_instance_that_leaves_may_come_back(rig: Rig) -> None:
    rig.join()
    rig.members.leave("a")
    assert rig.state() is None
    assert rig.links.dead == [("a", 1)]
    assert cluster(rig.members).instances == ()
    rig.join()
    assert rig.state() is State.READY
    rig.check()


def test_the_replicas_of_a_server_are_members_that_leave_together(rig: Rig) -> None:
    names, urls = ("a.dp0", "a.dp1"), [url_of_replica(A, rank) for rank in range(2)]
    rig.members.list_url(A)
    rig.join("b", B, 9)
    for epoch, (name, url) in enumerate(zip(names, urls, strict=True), 1):
        rig.join(name, url, epoch)
    views = {view.instance: view.url for view in cluster(rig.members).instances}
    assert views == {"b": B} | dict(zip(names, urls, strict=True)), "the listed one is the whole server"
    rig.members.drain("a.dp1", 60.0)
    assert [rig.state(url) for url in (*urls, B)] == [State.LEFT, State.LEFT, State.READY]
    rig.members.resume("a.dp0")
    assert [rig.state(url) for url in urls] == [State.NEW, State.NEW]
    rig.members.leave("a.dp0")
    assert [view.instance for view in cluster(rig.members).instances] == ["b"]
    rig.join(names[0], urls[0], 3)
    rig.join("a", A, 4)
    assert sorted(view.instance for view in cluster(rig.members).instances) == ["a", "b"]
    rig.check()


def test_unknown_instances_are_refused_by_name(rig: Rig) -> None:
    with pytest.raises(Unknown, match="None has joined"):
        rig.members.leave("x")
    rig.join()
    with pytest.raises(Unknown, match="There are: a"):
        rig.members.drain("x", 1.0)
    assert rig.members.member(A).instance == "a"


# -- draining ------------------------------------------------------------------------------------------------


def test_a_drain_and_how_far_it_has_come(rig: Rig) -> None:
    rig.join(agent="tcp://127.0.0.1:5000")
    with rig.fleet.carrying(A, 1):
        rig.members.drain("a", 60.0)
        rig.clock.advance(20.0)
        rig.members.tick()
        draining = rig.view().draining
        assert draining is not None
        assert (draining.since_s, draining.deadline_s, draining.in_flight) == (20.0, 40.0, 1)
        assert A in rig.links.connected
        rig.check()
    assert rig.view().state == "left"
    assert A not in rig.links.connected
    assert rig.links.dead == []


def test_one_that_was_drained_does_not_come_back_by_registering_again(rig: Rig) -> None:
    rig.join()
    rig.members.drain("a", 60.0)
    assert rig.members.register(registration()).state == "left"
    assert rig.state() is State.LEFT
    rig.join(epoch=2)
    assert rig.state() is State.READY


def test_a_drain_is_taken_back(rig: Rig) -> None:
    rig.join(agent="tcp://127.0.0.1:5000")
    rig.members.drain("a", 60.0)
    rig.members.resume("a")
    assert rig.state() is State.NEW
    assert rig.watch.watched == [A, A]
    assert A in rig.links.connected
    assert rig.view().draining is None


def test_a_drain_lasts_as_long_for_a_router_with_another_clock(rig: Rig) -> None:
    """A router whose clock is 90 s ahead, and that learns of the drain later, gives it its 60 s, too."""
    ahead = Rig(FakeClock(wall=rig.clock.wall() + 90.0))
    rig.join()
    ahead.join()
    rig.members.on_member(ahead.store.published[-1])
    rig.members.drain("a", 60.0)
    rig.clock.advance(50.0)
    with ahead.fleet.carrying(A, 1):
        ahead.members.on_member(rig.store.published[-1])
        for passed, state in ((0.0, State.DRAINING), (59.0, State.DRAINING), (2.0, State.LEFT)):
            ahead.clock.advance(passed)
            ahead.members.tick()
            assert ahead.state() is state


def test_the_deadline_of_a_drain(rig: Rig) -> None:
    rig.join()
    with rig.fleet.carrying(A, 1) as load:
        rig.members.drain("a", 60.0)
        rig.clock.advance(59.0)
        rig.members.tick()
        assert rig.state() is State.DRAINING
        rig.clock.advance(2.0)
        rig.members.tick()
        assert rig.state() is State.LEFT
        assert not load.doomed
        assert "1 requests had not ended" in rig.view().why
    rig.check()


def test_a_listed_instance_that_was_drained_keeps_away_when_it_registers(rig: Rig) -> None:
    rig.members.list_url(A)
    rig.fleet.learnt(A, FACTS)
    rig.members.drain("127.0.0.1:1001", 60.0)
    rig.members.register(registration())
    assert rig.state() is not State.READY
    assert rig.view("a").draining is not None


def test_an_instance_may_register_under_the_name_by_which_it_was_listed(rig: Rig) -> None:
    name = "127.0.0.1:1001"
    rig.members.list_url(A)
    rig.fleet.learnt(A, FACTS)
    rig.members.register(registration(name))
    assert rig.state() is State.READY
    assert rig.view(name).registered
    rig.check()
    other = Rig()
    other.members.list_url(A)
    other.fleet.learnt(A, FACTS)
    other.members.drain(name, 60.0)
    assert other.members.register(registration(name)).state != "ready"
    assert other.view(name).draining is not None


def test_roles_are_what_they_were_started_as(rig: Rig) -> None:
    rig.join()
    rig.members.change_role("a", "colocated")
    with pytest.raises(CannotChangeRole, match=r"Drain it, start it anew as decode"):
        rig.members.change_role("a", "decode")


# -- dying ---------------------------------------------------------------------------------------------------


def test_a_silent_agent_is_a_verdict_and_everybody_hears_of_it(rig: Rig) -> None:
    rig.join(agent="tcp://127.0.0.1:5000")
    rig.watch.on_silent(A)
    assert rig.state() is State.DOWN
    assert rig.links.dead == [("a", 1)]
    rig.watch.on_silent(A)
    assert rig.links.dead == [("a", 1)]
    assert rig.watch.watched[-1] == A


def test_each_death_is_reported_once(rig: Rig) -> None:
    rig.join()
    for times in (1, 2):
        rig.watch.on_silent(A)
        rig.fleet.lost(A, "nobody listens")
        assert rig.links.dead == [("a", 1)] * times
        rig.fleet.learnt(A, FACTS)
    rig.fleet.lost(A, "killed")
    rig.join(url=B, epoch=2)
    assert rig.links.dead == [("a", 1)] * 3


def test_heartbeats_count_for_the_epoch_that_registered(rig: Rig) -> None:
    rig.join(agent="tcp://127.0.0.1:5000")
    rig.clock.advance(10.0)
    rig.watch.on_heartbeat(A, f"{2:032x}")
    assert rig.view().last_seen_s == 10.0
    rig.watch.on_heartbeat(A, f"{1:032x}")
    assert rig.view().last_seen_s == 0.0
    rig.watch.on_heartbeat("http://nobody", f"{1:032x}")


def test_who_is_dead_for_long_is_forgotten_unless_listed(rig: Rig) -> None:
    rig.join("a", A)
    rig.members.list_url(B)
    for url in (A, B):
        rig.fleet.lost(url, "killed")
    rig.clock.advance(FORGET_S + 1)
    rig.members.tick()
    assert set(rig.fleet.rows) == {B}
    assert [member.url for member in rig.members.roster] == [B]
    rig.check()


def test_a_grave_is_forgotten_after_a_day(rig: Rig) -> None:
    rig.join()
    rig.members.leave("a")
    rig.clock.advance(LEFT_KEPT_S + 1)
    rig.members.tick()
    assert len(rig.members.roster) == 0


# -- several routers -----------------------------------------------------------------------------------------


def test_what_other_routers_send_is_load(rig: Rig) -> None:
    rig.join()
    rig.store.others = {"r2": RouterStatus("r2", {"a": Seen("ready", 3), "x": Seen("ready", 9)})}
    rig.members.on_routers(rig.store.others)
    assert rig.fleet.usable()[0].in_flight == 3
    (elsewhere,) = rig.view().elsewhere
    assert (elsewhere.router, elsewhere.in_flight) == ("r2", 3)
    rig.members.on_routers({})
    assert rig.fleet.usable()[0].in_flight == 0
    rig.members.tick()
    assert rig.store.written[-1].instances["a"] == Seen("ready", 0)


def test_a_view_survives_the_wire(rig: Rig) -> None:
    rig.join()
    everything = cluster(rig.members)
    assert msgspec.json.decode(msgspec.json.encode(everything), type=Cluster) == everything
    assert everything.unusable == ""


def test_two_routers_agree_after_exchanging_records_in_any_order() -> None:
    first = Rig()
    first.join("a", A, 1)
    first.clock.advance(1.0)
    first.members.drain("a", 60.0)
    first.clock.advance(1.0)
    first.join("a", A, 2)
    first.clock.advance(1.0)
    first.join("b", B, 3)
    first.clock.advance(1.0)
    first.members.leave("b")
    for records in permutations(first.store.published):
        second = Rig()
        for record in (*records, *records[:2]):
            second.members.on_member(record)
        assert {encode_member(m) for m in second.members.roster} == {
            encode_member(m) for m in first.members.roster
        }
        assert second.state(A) is State.NEW
        assert second.state(B) is None
        second.check()


@given(
    records=st.lists(
        st.builds(
            lambda name, epoch, intent, stamp: Member(
                instance=name, url=A, registration=registration(name, A, epoch), intent=intent, stamp=stamp
            ),
            st.sampled_from("ab"), st.integers(1, 3), st.sampled_from(Intent), st.integers(0, 4),
        ),
        max_size=8,
    ),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_merging_does_not_depend_on_the_order(records: list[Member], data: st.DataObject) -> None:
    one, two = Roster(), Roster()
    for record in records:
        one.merge(record)
    for record in data.draw(st.permutations(records + records[:3])):
        two.merge(record)
    assert {encode_member(m) for m in one} == {encode_member(m) for m in two}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 5000,
        b"x" * 70_000,
        b'{"instance": "a"}',
        b'{"instance": "a", "url": "no url"}',
        b'{"instance": "a", "url": "http://a:99999"}',
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode_member(data)
    good = Member(instance="a", url=A, registration=registration())
    assert decode_member(encode_member(good)) == good


# -- anything in any order -----------------------------------------------------------------------------------


class LifeOfACluster(RuleBasedStateMachine):
    """Instances register, die, drain and leave in any order, requests go on: all invariants hold."""

    names = st.sampled_from(["a", "b"])
    urls = {"a": A, "b": B}

    @initialize()
    def start(self) -> None:
        self.rig = Rig()
        self.loads: list[tuple[Any, str, Load]] = []
        self.epochs = {"a": 0, "b": 0}
        self.gone: set[str] = {"a", "b"}
        self.drained: set[str] = set()

    @rule(name=names, new=st.booleans())
    def register(self, name: str, new: bool) -> None:
        if new or not self.epochs[name]:
            self.epochs[name] += 1
            self.drained.discard(name)
        self.gone.discard(name)
        self.rig.members.register(registration(name, self.urls[name], self.epochs[name]))

    @rule(name=names)
    def answers(self, name: str) -> None:
        row = self.rig.fleet.rows.get(self.urls[name])
        if row is not None and (row.state in (State.NEW, State.DOWN, State.UNFIT)):
            self.rig.fleet.learnt(row.name, replace(FACTS, identity=str(self.epochs[name])))
        elif row is not None:
            self.rig.fleet.alive(row.name)

    @rule(name=names)
    def misses(self, name: str) -> None:
        self.rig.fleet.missed(self.urls[name], "slow")

    @rule(name=names)
    def is_silent(self, name: str) -> None:
        self.rig.watch.on_silent(self.urls[name])

    @rule(name=names, deadline=st.sampled_from([0.0, 5.0, 100.0]))
    def drain(self, name: str, deadline: float) -> None:
        if name not in self.gone:
            self.rig.members.drain(name, deadline)
            self.drained.add(name)

    @rule(name=names)
    def resume(self, name: str) -> None:
        if name not in self.gone:
            self.rig.members.resume(name)
            self.drained.discard(name)

    @rule(name=names)
    def leave(self, name: str) -> None:
        if self.rig.members.roster.get(name) is not None:
            self.rig.members.leave(name)
            self.gone.add(name)
            self.drained.discard(name)

    @rule(seconds=st.sampled_from([0.5, 4.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.rig.members.tick()

    @rule(name=names)
    def send(self, name: str) -> None:
        if any(instance.name == self.urls[name] for instance in self.rig.fleet.usable()):
            carrying = self.rig.fleet.carrying(self.urls[name], 5)
            self.loads.append((carrying, self.urls[name], carrying.__enter__()))

    @rule(name=names)
    def comes_and_is_busy(self, name: str) -> None:
        """A state that random steps reach rarely, since it takes several of them."""
        self.register(name, new=False)
        self.answers(name)
        self.send(name)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.loads:
            carrying, _, _ = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
            carrying.__exit__(None, None, None)

    @rule()
    def everything_again(self) -> None:
        """Old records come back from other routers: they change nothing."""
        for record in self.rig.store.published[-30:]:
            self.rig.members.on_member(record)

    @invariant()
    def what_must_hold(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.check()
        for name, url in self.urls.items():
            row = self.rig.fleet.rows.get(url)
            running = sum(url == other for _, other, _ in self.loads)
            assert (row.in_flight if row else 0) == running, "no request's instance is forgotten"
            usable = row is not None and row.state in USABLE
            if name in self.gone or name in self.drained:
                assert not usable, "no request goes to a gone or drained instance"
            if row is not None and name not in self.gone and name not in self.drained:
                assert row.state not in (State.DRAINING, State.LEFT), (
                    "an instance neither gone nor drained stays"
                )
            if row is not None and name not in self.gone:
                assert row.epoch == f"{self.epochs[name]:032x}"
        dead = self.rig.links.dead
        assert all(epoch <= self.epochs[name] for name, epoch in dead)


TestLifeOfACluster = LifeOfACluster.TestCase
TestLifeOfACluster.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestLongLifeOfACluster(LifeOfACluster.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)


@pytest.mark.parametrize(
    ("state", "event", "wrong"),
    [
        (State.DRAINING, Event.ALIVE, State.READY),
        (State.READY, Event.DRAIN, State.READY),
        (State.LEFT, Event.LOST, State.DOWN),
        (State.DRAINING, Event.RESUME, State.DRAINING),
        (State.READY, Event.LEAVE, State.DRAINING),
    ],
)
def test_one_wrong_entry_of_the_table_is_found(
    state: State, event: Event, wrong: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSITIONS, (state, event), wrong)
    quiet = settings(
        max_examples=1000,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # that it is found is enough; it need not be made small
    )
    with pytest.raises((AssertionError, InternalError, ExceptionGroup)):
        run_state_machine_as_test(LifeOfACluster, settings=quiet)
