"""The book of hints: each rule by itself, then random histories against its invariants."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from sglang_ext.errors import InternalError
from sglang_ext.keys import encode_tokens
from sglang_ext.router.hints.advisory_book import ENDED_KEPT_S, HintBook, HintLimits, Verdict
from sglang_ext.router.hints.hint import ENDED, TRANSITIONS, Entry, Hint, Place, State
from sglang_ext.router.hints.remote_hints import RemoteHints

SPACE = ("space",)


def key(tokens: int, seed: int = 0) -> bytes:
    return encode_tokens(np.random.default_rng(seed).integers(0, 1000, tokens))


def hint(tokens: int = 64, seed: int = 0, **more: object) -> Hint:
    given: dict[str, object] = {"tenant": "a", "namespace": SPACE, "key": key(tokens, seed)} | more
    return Hint(**given)  # type: ignore[arg-type]


def claim(
    book: HintBook, tenant: str, space: object, asked: bytes, session: str | None, now: float
) -> Entry | None:
    """A request has come: the hint that expected it, which ends with this."""
    book.expire(now)
    if (entry := book.expected(tenant, space, asked, session)) is not None:
        book.used(entry, now)
    return entry


def accepted(book: HintBook, id: str, offered: Hint, now: float = 0.0, at: str = "one") -> Entry:
    answer = book.offer(id, offered, now)
    assert answer.verdict is Verdict.ACCEPTED
    assert answer.start
    assert answer.entry is not None
    book.placed(answer.entry, Place(at))
    return answer.entry


def test_a_hint_is_moved_then_ready_then_used() -> None:
    book = HintBook(HintLimits(), RemoteHints())
    entry = accepted(book, "h1", hint(session="s"))
    assert (entry.state, book.promised("one")) == (State.MOVING, 1)
    assert book.arrived(entry, 1.0) == []
    assert entry.state is State.READY
    assert claim(book, "a", SPACE, key(64) + key(8, 9), "s", 2.0) is entry
    assert (entry.state, book.promised("one")) == (State.USED, 0)
    assert claim(book, "a", SPACE, key(64), "s", 2.0) is None
    book.check()


def test_a_request_without_a_session_is_known_by_the_longest_conversation_it_continues() -> None:
    book = HintBook(HintLimits(), RemoteHints())
    short = accepted(book, "short", hint(32))
    long = accepted(book, "long", hint(64))
    accepted(book, "other", hint(64, seed=5))
    assert short.hint.key == long.hint.key[: len(short.hint.key)]
    assert claim(book, "a", SPACE, key(64) + key(3, 8), None, 0.0) is long
    assert claim(book, "a", SPACE, key(64) + key(3, 8), None, 0.0) is short
    assert claim(book, "a", SPACE, key(64) + key(3, 8), None, 0.0) is None


def test_another_sessions_request_does_not_take_a_hint() -> None:
    book = HintBook(HintLimits(), RemoteHints())
    entry = accepted(book, "h", hint(session="s"))
    assert claim(book, "a", SPACE, key(64), "t", 0.0) is None
    assert claim(book, "a", SPACE, key(64), None, 0.0) is entry


def test_another_tenant_or_namespace_claims_nothing() -> None:
    book = HintBook(HintLimits(), RemoteHints())
    entry = accepted(book, "h", hint(session="s"))
    assert claim(book, "b", SPACE, key(64), "s", 0.0) is None
    assert claim(book, "a", ("elsewhere",), key(64), None, 0.0) is None
    assert book.get("h", "b") is None
    assert book.get("h", "a") is entry


def test_the_same_again_lives_longer_and_moves_nothing() -> None:
    book = HintBook(HintLimits(), RemoteHints())
    entry = accepted(book, "h1", hint(ttl_s=10.0))
    again = book.offer("h2", hint(ttl_s=10.0), 5.0)
    assert (again.verdict, again.entry, again.start) == (Verdict.ACCEPTED, entry, False)
    assert book.expire(12.0) == []
    assert book.expire(15.0) == [entry]


def test_a_grown_conversation_replaces_the_hint_of_its_session() -> None:
    book = HintBook(HintLimits(), RemoteHints())
    first = accepted(book, "h1", hint(32, session="s"))
    second = accepted(book, "h2", hint(64, session="s"))
    assert first.state is State.CANCELLED
    assert claim(book, "a", SPACE, b"", "s", 0.0) is second
    book.check()


def test_a_flood_is_refused_with_the_time_to_come_back() -> None:
    book = HintBook(HintLimits(per_second=10.0, burst=2), RemoteHints())
    answers = [book.offer(str(i), hint(16, seed=i), 0.0) for i in range(3)]
    assert [answer.verdict for answer in answers] == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.REFUSED]
    assert answers[2].retry_after_s == pytest.approx(0.1)
    assert book.offer("other", hint(16, tenant="b"), 0.0).verdict is Verdict.ACCEPTED


def test_too_many_at_once_are_refused_until_one_ends() -> None:
    book = HintBook(HintLimits(live=2), RemoteHints())
    first = accepted(book, "1", hint(16, seed=1, ttl_s=5.0))
    accepted(book, "2", hint(16, seed=2, ttl_s=9.0))
    refused = book.offer("3", hint(16, seed=3), 1.0)
    assert (refused.verdict, refused.retry_after_s) == (Verdict.REFUSED, 4.0)
    book.cancel(first, 1.0)
    accepted(book, "3", hint(16, seed=3), 1.0)


def test_what_exceeds_the_budget_is_clipped_then_deferred_then_started() -> None:
    book = HintBook(HintLimits(moving_tokens=100), RemoteHints())
    first = accepted(book, "1", hint(64, seed=1))
    clipped = book.offer("2", hint(64, seed=2), 0.0)
    assert clipped.verdict is Verdict.CLIPPED
    assert clipped.start
    assert clipped.entry is not None
    assert clipped.entry.hint.key == key(64, 2)[: 36 * 4]
    deferred = book.offer("3", hint(64, seed=3), 0.0)
    assert (deferred.verdict, deferred.start) == (Verdict.DEFERRED, False)
    assert book.arrived(clipped.entry, 1.0) == [], "36 tokens are no room for 64"
    assert book.arrived(first, 1.0) == [deferred.entry]
    assert deferred.entry is not None
    assert deferred.entry.state is State.MOVING
    book.check()


def test_a_hint_larger_than_any_budget_is_clipped_to_it() -> None:
    book = HintBook(HintLimits(moving_tokens=50), RemoteHints())
    answer = book.offer("1", hint(64), 0.0)
    assert answer.verdict is Verdict.CLIPPED
    assert answer.entry is not None
    assert answer.entry.hint.tokens == 50


def test_an_instance_that_goes_away_takes_its_hints_along() -> None:
    book = HintBook(HintLimits(), RemoteHints())
    here = accepted(book, "1", hint(16, seed=1), at="one")
    there = accepted(book, "2", hint(16, seed=2), at="two")
    assert book.lost("one", 3.0) == [here]
    assert (here.state, there.state) == (State.FAILED, State.MOVING)
    assert book.promised("one") == 0
    assert book.arrived(here, 4.0) == [], "news of a dead instance change nothing"
    assert here.state is State.FAILED
    book.check()


def test_a_pair_is_expected_at_both_and_outlives_the_one_that_decodes() -> None:
    book = HintBook(HintLimits(), RemoteHints())
    entry = book.offer("1", hint(16), 0.0).entry
    assert entry is not None
    book.placed(entry, Place("prefill", "decode"))
    assert [book.promised(name) for name in ("prefill", "decode")] == [1, 1]
    assert book.lost("decode", 1.0) == []
    assert book.decoding_at("decode") == [entry]
    book.placed(entry, Place("prefill", "another"))
    assert [book.promised(name) for name in ("prefill", "decode", "another")] == [1, 0, 1]
    book.check()
    assert book.lost("prefill", 2.0) == [entry]
    assert [book.promised(name) for name in ("prefill", "another")] == [0, 0]
    book.check()


def test_one_can_ask_for_a_while_what_became_of_it() -> None:
    book = HintBook(HintLimits(), RemoteHints())
    entry = accepted(book, "1", hint(ttl_s=5.0))
    assert book.expire(5.0) == [entry]
    assert book.get("1", "a") is entry
    book.expire(5.0 + ENDED_KEPT_S)
    assert book.get("1", "a") is None


def test_what_has_ended_stays_so() -> None:
    assert not any(state in TRANSITIONS for state in ENDED)
    assert set(TRANSITIONS) | ENDED == set(State)
    book = HintBook(HintLimits(), RemoteHints())
    entry = accepted(book, "1", hint())
    book.cancel(entry, 0.0)
    with pytest.raises(InternalError, match="cannot become"):
        book._end(entry, State.USED, 0.0, "")


class Histories(RuleBasedStateMachine):
    """Whatever happens in whatever order: counters and maps agree, and no budget is exceeded."""

    entries: Bundle[Entry] = Bundle("entries")

    @initialize()
    def begin(self) -> None:
        self.book = HintBook(
            HintLimits(per_second=5.0, burst=8, live=6, moving_tokens=100, ttl_s=20.0), RemoteHints()
        )
        self.now = 0.0
        self.serial = 0

    @rule(
        target=entries,
        tokens=st.integers(0, 130),
        seed=st.integers(0, 3),
        tenant=st.sampled_from("ab"),
        session=st.none() | st.sampled_from("xyz"),
        place=st.builds(
            Place, st.sampled_from(["one", "two"]), st.none() | st.sampled_from(["three", "four"])
        ),
        ttl=st.none() | st.floats(0.0, 50.0),
    )
    def offer(
        self, tokens: int, seed: int, tenant: str, session: str | None, place: Place, ttl: float | None
    ) -> Entry | None:
        self.serial += 1
        offered = hint(tokens, seed, tenant=tenant, session=session, ttl_s=ttl)
        answer = self.book.offer(str(self.serial), offered, self.now)
        assert (answer.entry is None) == (answer.verdict is Verdict.REFUSED)
        assert (answer.retry_after_s is not None) == (answer.verdict is Verdict.REFUSED)
        if answer.entry is not None:
            assert offered.key.startswith(answer.entry.hint.key) or answer.reason == "repeated"
            self.book.placed(answer.entry, place)
        return answer.entry

    @rule(seconds=st.floats(0.0, 15.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for entry in self.book.expire(self.now):
            assert entry.expires <= self.now

    @rule(entry=entries)
    def arrive(self, entry: Entry | None) -> None:
        if entry is not None:
            self._started(self.book.arrived(entry, self.now))

    @rule(entry=entries)
    def compute(self, entry: Entry | None) -> None:
        if entry is not None:
            self.book.computing(entry)

    @rule(entry=entries)
    def fail(self, entry: Entry | None) -> None:
        if entry is not None:
            self._started(self.book.failed(entry, self.now, "test"))

    @rule(entry=entries)
    def cancel(self, entry: Entry | None) -> None:
        if entry is not None:
            self._started(self.book.cancel(entry, self.now))

    @rule(tokens=st.integers(0, 130), seed=st.integers(0, 3), session=st.none() | st.sampled_from("xyz"))
    def request(self, tokens: int, seed: int, session: str | None) -> None:
        prompt = key(tokens, seed)
        claimed = claim(self.book, "a", SPACE, prompt, session, self.now)
        if claimed is not None:
            assert claimed.hint.tenant == "a"
            assert claimed.hint.session == session or prompt.startswith(claimed.hint.key)

    @rule(place=st.sampled_from(["one", "two"]))
    def lose(self, place: str) -> None:
        self.book.lost(place, self.now)
        assert self.book.promised(place) == 0

    @rule(lost=st.sampled_from(["three", "four"]), other=st.none() | st.just("five"))
    def lose_who_decodes(self, lost: str, other: str | None) -> None:
        for entry in self.book.decoding_at(lost):
            assert entry.instance is not None
            self.book.placed(entry, Place(entry.instance, other))
        assert self.book.promised(lost) == 0

    def _started(self, entries: list[Entry]) -> None:
        assert all(entry.state is State.MOVING for entry in entries)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "book"):
            self.book.check()


TestHistories = Histories.TestCase


def test_computing_counts_as_moving_and_places_are_counted_by_priority() -> None:
    book = HintBook(HintLimits(moving_tokens=100), RemoteHints())
    first = book.offer("1", dataclasses.replace(hint(100), priority=2), 0.0).entry
    assert first is not None
    book.placed(first, Place("one"))
    book.computing(first)
    second = book.offer("2", hint(10, 1), 0.0).entry
    assert second is not None
    book.placed(second, Place("one"))
    assert (first.state, second.state) == (State.COMPUTING, State.DEFERRED)
    assert [book.promised("one", least) for least in (None, 0, 1, 2, 3)] == [2, 2, 1, 1, 0]
    book.check()
    assert book.arrived(first, 1.0) == [second]
    book.computing(first)
    assert first.state is State.READY, "it does not go back"
    book.placed(first, Place("two"))
    assert [book.promised(name, 1) for name in ("one", "two", "three")] == [0, 1, 0]
    book.check()
