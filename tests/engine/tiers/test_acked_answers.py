"""When the end of an answer may be sent: never before the answer is durable, and no later than necessary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from test_disk_writes import BLOCK, LAYOUT, PLAIN, Setup

from sglang_ext.engine.tiers.acked_answers import Acked, AckedAnswers, AckEnd
from sglang_ext.keys import encode_tokens
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.tiers import MemoryTier
from sglang_ext.tiered_store.tier import Outcome, Put
from sglang_ext.tiers import Tier

TIMEOUT = 10.0


class Acking(Setup):
    """A set-up with the part that acknowledges answers."""

    def __init__(self, *, behind: int = 0, disk_blocks: int = 100, backlog: int = 100) -> None:
        super().__init__(disk_blocks, backlog)
        self.clock = FakeClock()
        self.answers = AckedAnswers(
            self.tree,
            self.write_down,
            self.writes,
            self.below,
            self.ranks,
            behind=behind,
            timeout=TIMEOUT,
            clock=self.clock,
        )

    def answer(self, tokens: Sequence[int]) -> Acked:
        """A request has ended that had these tokens, its answer included."""
        self.insert(list(tokens[: len(tokens) // BLOCK * BLOCK]))
        return self.answers.ended(PLAIN, encode_tokens(list(tokens)))

    def passes(self, count: int = 2) -> None:
        for _ in range(count):
            self.ranks.each_pass()

    def on_disk(self, answer: Acked) -> bool:
        return self.below.match(self.names.digest(PLAIN), answer.names) == len(answer.names)


@pytest.fixture
def setup() -> Iterator[Acking]:
    setup = Acking()
    yield setup
    setup.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Acking]]:
    made: list[Acking] = []

    def make(**how: int) -> Acking:
        made.append(Acking(**how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_end_is_sent_when_prompt_and_answer_are_on_disk_and_not_before(setup: Acking) -> None:
    answer = setup.answer(range(14))
    for step in (setup.passes, setup.to_dram, setup.passes):
        step()
        assert not setup.answers.may_report(answer)
        assert not setup.on_disk(answer)
    assert setup.answers.busy
    setup.clock.advance(0.5)
    setup.to_disk()
    setup.passes()
    assert setup.answers.may_report(answer)
    assert setup.on_disk(answer)
    assert answer.details() == {
        "durability_end": "durable",
        "durability_tokens": 12,
        "durability_wait_us": 500_000,
    }
    assert not setup.answers.busy
    assert list(setup.answers.waits) == [0.5]
    assert setup.answers.counters == {AckEnd.DURABLE: 1}


def test_what_has_no_whole_block_waits_for_nothing(setup: Acking) -> None:
    assert setup.answers.may_report(setup.answer(range(3)))


def test_a_known_answer_is_sent_again_at_once(setup: Acking) -> None:
    setup.answer(range(12))
    setup.to_dram()
    setup.to_disk()
    again = setup.answer(range(12))
    setup.passes()
    assert setup.answers.may_report(again)


def test_a_turn_may_be_behind_and_the_one_before_it_may_not(make: Callable[..., Acking]) -> None:
    setup = make(behind=1)
    first, other = setup.answer(range(8)), setup.answer(range(50, 54))
    assert setup.answers.may_report(first)
    assert first.reported is AckEnd.BEHIND
    assert first.details()["durability_tokens"] == 0
    second = setup.answer(range(16))
    setup.passes()
    assert not setup.answers.may_report(second)
    assert setup.answers.may_report(other)  # another conversation
    setup.tier.copies.settle()
    setup.writer.group_bytes = 1
    setup.writer.step()  # the first turn, which was submitted first
    setup.passes()
    assert first.outcome is AckEnd.DURABLE
    assert setup.answers.may_report(second)
    assert second.reported is AckEnd.BEHIND
    assert not setup.on_disk(second)


@pytest.mark.parametrize("outcome", [Outcome.FULL, Outcome.READ_ONLY, Outcome.IO_ERROR])
def test_a_disk_that_refuses_is_said_at_once(setup: Acking, outcome: Outcome) -> None:
    class Refusing(MemoryTier):
        def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> Put | Outcome:
            return outcome

    setup.writer.tier = Refusing(LAYOUT, 10)
    answer, short = setup.answer(range(12)), setup.answer(range(60, 64))
    setup.to_dram()
    assert not setup.answers.may_report(answer)
    setup.to_disk()
    setup.passes()
    assert setup.answers.may_report(answer)
    assert setup.answers.may_report(short)
    assert answer.reported is short.reported is AckEnd.REFUSED
    assert answer.details()["durability_tokens"] == 0


def test_what_the_writer_skipped_is_tried_again(make: Callable[..., Acking]) -> None:
    setup = make(backlog=2)
    first, second = setup.answer([1] * 8), setup.answer([2] * 8)
    setup.to_dram()
    for answer in (first, second):
        setup.to_disk()
        setup.passes()
        assert setup.writes.counters.write_skipped == 2
        assert setup.answers.may_report(answer)
        assert answer.reported is AckEnd.DURABLE


def test_what_dram_had_no_room_for_is_tried_again(setup: Acking) -> None:
    first, second = setup.answer([1] * 24), setup.answer([2] * 16)
    assert setup.write_down.skipped == 2  # of ten blocks, in an arena of eight
    setup.to_dram()
    setup.passes()
    assert not setup.answers.may_report(second)
    setup.to_disk()
    setup.passes()
    assert setup.answers.may_report(first)
    setup.to_dram()
    setup.to_disk()
    setup.passes()
    assert setup.answers.may_report(second)
    assert second.reported is AckEnd.DURABLE
    assert setup.on_disk(second)


def test_an_end_is_sent_late_rather_than_never_and_watched_all_the_same(setup: Acking) -> None:
    answer = setup.answer(range(12))
    setup.to_dram()
    setup.passes()
    setup.clock.advance(TIMEOUT - 0.1)
    assert not setup.answers.may_report(answer)
    setup.clock.advance(0.2)
    assert setup.answers.may_report(answer)
    assert answer.reported is AckEnd.LATE
    assert not setup.answers.busy
    setup.to_disk()
    setup.passes()
    assert answer.outcome is AckEnd.DURABLE
    assert answer.reported is AckEnd.LATE


def test_what_has_left_memory_unwritten_is_lost(setup: Acking) -> None:
    kept, lost = setup.answer([1] * 24), setup.answer([2] * 16)
    setup.to_dram()
    setup.evict_hbm(10)  # DRAM has eight of them
    setup.passes()
    assert setup.answers.may_report(lost)
    assert lost.reported is AckEnd.LOST
    assert not setup.answers.may_report(kept)


def test_what_the_disk_gave_up_meanwhile_is_lost(setup: Acking) -> None:
    answer = setup.answer(range(12))
    setup.to_dram()
    while setup.writer.step():
        pass
    setup.below.drop(setup.names.digest(PLAIN), answer.names[:1])
    setup.passes()
    assert setup.answers.may_report(answer)
    assert answer.reported is AckEnd.LOST


def test_what_is_on_disk_and_left_memory_is_durable(setup: Acking) -> None:
    answer = setup.answer(range(12))
    setup.to_dram()
    while setup.writer.step():
        pass
    setup.writes.act(setup.writes.propose())
    setup.evict_hbm(3)
    setup.store.ledger.delete(Tier.DRAM, setup.tree.evict(setup.dram, 3))
    assert not list(setup.tree.nodes())
    setup.passes()
    assert setup.answers.may_report(answer)
    assert answer.reported is AckEnd.DURABLE


def in_step(ranks: Sequence[Acking]) -> None:
    """One pass of every rank."""
    for parts in zip(*(each.ranks._parts for each in ranks), strict=True):
        said = [part.propose() for part in parts]
        for part in parts:
            part.act([min(numbers) for numbers in zip(*said, strict=True)])


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_not_on_every_ranks_disk_is_not_durable(make: Callable[..., Acking], fails: bool) -> None:
    ranks = [make(), make()]
    if fails:
        ranks[1].below.close()
    answers = [each.answer(range(12)) for each in ranks]
    for each in ranks:
        each.to_dram()
    while ranks[0].writer.step():
        pass
    for _ in range(3):
        in_step(ranks)
    assert ranks[0].on_disk(answers[0])
    assert not any(each.answers.may_report(answer) for each, answer in zip(ranks, answers, strict=True))
    while ranks[1].writer.step():
        pass
    for _ in range(3):
        in_step(ranks)
    for each, answer in zip(ranks, answers, strict=True):
        assert each.answers.may_report(answer)
        assert (answer.reported is AckEnd.DURABLE) is not fails
    assert answers[1].reported is (AckEnd.REFUSED if fails else AckEnd.DURABLE)


class CountedAcked(Acked):
    """Counts how often two answers are compared."""

    compared = 0

    def follows(self, other: Acked) -> bool:
        type(self).compared += 1
        return super().follows(other)


def test_held_ends_cost_a_pass_over_a_hanging_disk_nothing_each(
    make: Callable[..., Acking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each scheduler pass asks for every held end again, for as long as the disk hangs."""
    monkeypatch.setattr("sglang_ext.engine.tiers.acked_answers.Acked", CountedAcked)
    setup = make(behind=2, disk_blocks=400, backlog=400)
    turns = [list(range(BLOCK * (1 + n))) for n in range(30)]
    answers = [setup.answer(tokens) for tokens in turns]

    def told() -> list[bool]:
        setup.passes(1)
        return [setup.answers.may_report(answer) for answer in answers]

    first = told()
    assert first == [n < 2 for n in range(30)]
    CountedAcked.compared = 0
    for _ in range(5):
        assert told() == first
    assert CountedAcked.compared == 0
    # Counts are kept up: durable answers are followed by none, and new ones count for later turns.
    expected = [1 + sum(Acked.follows(each, other) for other in setup.answers._pending) for each in answers]
    assert [setup.answers._turns_behind(each) for each in answers[2:]] == expected[2:]
    for step in (setup.passes, setup.to_dram, setup.passes, setup.to_disk, setup.passes):
        step()
    left = [each for each in answers[2:] if each.outcome is None]
    assert len(left) < 28
    for each in left:
        assert setup.answers._turns_behind(each) == 1 + sum(
            each.follows(other) for other in setup.answers._pending
        )
