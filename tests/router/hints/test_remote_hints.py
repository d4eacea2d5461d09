"""Copies of other routers' hints: each rule by itself, then random histories against a plain list."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_advisory_book import hint, key

from sglang_ext.router.cluster.broadcast import HintStatus
from sglang_ext.router.hints.advisory_book import ENDED_KEPT_S
from sglang_ext.router.hints.hint import ENDED, State
from sglang_ext.router.hints.remote_hints import RemoteHints, digest_of

SPACE = ("tokens", None, None, None)


def status(id: str = "a", stamp: int = 1, tokens: int = 64, **more: object) -> HintStatus:
    values: dict[str, object] = {
        "router": "r", "id": id, "stamp": stamp, "tenant": "a", "namespace": SPACE, "tokens": tokens,
        "digest": digest_of(key(tokens)), "state": "ready", "age_s": 0.0, "lives_s": 10.0,
        "told": {"id": id}, "instance": "one", **more,
    }  # fmt: skip
    return msgspec.convert({**values, "type": "hint"}, HintStatus)


def test_a_request_is_expected_by_its_session_and_by_the_longest_conversation_it_continues() -> None:
    copies = RemoteHints()
    for id, tokens, session in (("short", 16, None), ("long", 64, None), ("s", 80, "s"), ("t", 32, "t")):
        assert copies.learn(status(id, tokens=tokens, session=session), 0.0)
    copies.check()
    prompt = key(64) + key(3, 8)

    def expected(session: str | None = None, tenant: str = "a", asked: bytes = prompt) -> str | None:
        found = copies.expected(tenant, SPACE, asked, session)
        return None if found is None else found.id

    assert expected("s") == "s", "a session's own, whatever it asks"
    assert expected("u") == "long", "not another session's"
    assert (expected(), expected(asked=key(32) + key(9, 2))) == ("long", "t")
    assert (expected(tenant="b"), expected(asked=key(64, seed=2))) == (None, None)
    copies.end(copies.get("long"), State.USED, "", 1.0)
    assert expected() == "t", "any session's for a request that names none"
    copies.check()


def test_an_older_word_changes_nothing_and_what_has_ended_does_not_come_back() -> None:
    copies = RemoteHints()
    copies.learn(status(stamp=5), 0.0)
    assert not copies.learn(status(stamp=4, state="moving"), 0.0)
    copy = copies.get("a", "a")
    assert copy.state is State.READY
    assert copies.get("a", "b") is None
    copies.end(copy, State.USED, "here", 1.0)
    copies.learn(status(stamp=6, state="computing"), 1.0)
    assert copy.state is State.USED
    copies.learn(status(stamp=7, state="used", told={"why": "there"}), 1.0)
    assert copy.as_json(1.0)["why"] == "there"
    assert not copies.learn(status("new", state="of a newer release"), 1.0)
    assert copies.get("new") is None
    copies.expire(1.0 + ENDED_KEPT_S)
    assert copies.get("a") is None


def test_a_repeated_hint_is_distinguished_from_its_successor() -> None:
    copies = RemoteHints()
    copies.learn(status(session="s"), 0.0)
    for offered, same in (
        (hint(64, session="s", namespace=SPACE), True),
        (hint(80, session="s", namespace=SPACE), False),
    ):
        copy = copies.same(offered)
        assert copy is not None
        assert copy.is_for(offered) is same
    assert copies.same(hint(64, session="t", namespace=SPACE)) is None
    assert copies.same(hint(64, namespace=SPACE)).id == "a"


class Histories(RuleBasedStateMachine):
    """Words in any order; a list of the newest of each is the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = RemoteHints()
        self.newest: dict[str, HintStatus] = {}
        self.over: set[str] = set()
        self.now = 0.0

    @rule(
        id=st.sampled_from("abcd"),
        stamp=st.integers(0, 20),
        state=st.sampled_from(State),
        tokens=st.sampled_from((0, 16, 64)),
        session=st.sampled_from((None, "s", "t")),
        instance=st.sampled_from((None, "one", "two")),
    )
    def hears(
        self, id: str, stamp: int, state: State, tokens: int, session: str | None, instance: str | None
    ) -> None:
        word = status(
            id, stamp, tokens=tokens, state=state.value, session=session, instance=instance, lives_s=1e6
        )
        self.copies.learn(word, self.now)
        if id not in self.newest or stamp > self.newest[id].stamp:
            self.newest[id] = word
            if state in ENDED:
                self.over.add(id)

    @rule(id=st.sampled_from("abcd"))
    def ends(self, id: str) -> None:
        if (copy := self.copies.get(id)) is not None:
            self.copies.end(copy, State.USED, "", self.now)
            self.over.add(id)

    @invariant()
    def counts_are_those_of_the_newest(self) -> None:
        self.copies.check()
        live = [word for id, word in self.newest.items() if id not in self.over]
        assert self.copies.live("a") == len(live) == len(self.copies)
        assert self.copies.promised("one") == sum(word.instance == "one" for word in live)
        moving = sum(word.tokens for word in live if word.state in ("moving", "computing"))
        assert self.copies.moving("a") == moving


TestHistories = Histories.TestCase
