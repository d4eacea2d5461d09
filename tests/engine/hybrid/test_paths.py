"""The order in which DRAM gives blocks up: the rule alone, and blocks that need each other. No bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.engine.hybrid.components import FULL, AtSnapshot, Component, LastWindow
from sglang_ext.engine.hybrid.paths import Name, Paths
from sglang_ext.engine.hybrid.worth import FRESH, USES_CAP, WORTHLESS, ByWorth, level_of, worth

STATE, WINDOW = Component("state", AtSnapshot()), Component("window", LastWindow(8))
PAGE = 4
KV_BYTES, STATE_BYTES = 10, 100


def test_worth_is_tokens_for_each_byte_by_uses_over_idle_time() -> None:
    base = level_of(1000, 1000, 0)
    assert worth(level_of(4000, 1000, 0), 8) == pytest.approx(4 * worth(base, 8))
    assert worth(level_of(1000, 4000, 0), 8) == pytest.approx(worth(base, 8) / 4)
    assert worth(level_of(1000, 1000, 3), 8) == pytest.approx(4 * worth(base, 8))
    assert worth(base, 16) == pytest.approx(worth(base, 8) / 2)
    assert level_of(1000, 1000, USES_CAP) == level_of(1000, 1000, 10 * USES_CAP)
    assert level_of(0, 1000, 5) == WORTHLESS
    assert worth(WORTHLESS, 1) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(-6, 6), st.integers(0, 99), st.booleans()), max_size=150
    )
)
def test_the_order_is_that_of_all_pieces_compared(steps: list[tuple[int, int, int, bool]]) -> None:
    order: ByWorth[int] = ByWorth(1)
    pieces: dict[int, tuple[int, int]] = {}
    for piece, level, used, goes in steps:
        if goes:
            order.remove(piece)
            pieces.pop(piece, None)
        else:
            order.put(piece, level, used)
            pieces[piece] = level, used
        found = order.least(100, lambda each: bool(each % 3))
        values = {each: worth(pieces[each][0], 101 - pieces[each][1]) for each in pieces if each % 3}
        assert (found is None) == (not values)
        if found is not None:
            assert values[found] == min(values.values())
    assert len(order) == len(pieces)


class Model:
    """Paths, and the blocks that are held by each component."""

    def __init__(self, other: Component = STATE, nbytes: int = FRESH) -> None:
        self.other = other
        self.paths = Paths({FULL: KV_BYTES, other: STATE_BYTES if other is STATE else KV_BYTES}, PAGE, nbytes)
        self.held: dict[Component, set[Name]] = {FULL: set(), other: set()}

    def enter(self, component: Component, names: Sequence[Name]) -> None:
        new = set(names) - self.held[component]
        self.held[component] |= new
        self.paths.entered(component, names, new)

    def serve(self, path: Sequence[Name], start: int = 0) -> None:
        """Save the blocks of a path from a place on."""
        if start:
            self.paths.expect(path[start - 1], path[start])
        self.enter(FULL, path[start:])
        self.enter(self.other, path[-1:] if self.other is STATE else path[start:])
        self.check()

    def give_up(self) -> tuple[Component, Name] | None:
        piece = self.paths.least(lambda piece: True)
        if piece is None:
            return None
        name = piece.names[-1]
        self.paths.left(piece.component, [name])
        self.held[piece.component].remove(name)
        self.check()
        return piece.component, name

    def check(self) -> None:
        self.paths.check(self.held)

    def all_given_up(self) -> list[tuple[Component, Name]]:
        found = []
        while (gone := self.give_up()) is not None:
            found.append(gone)
        return found


def path(text: str) -> list[Name]:
    """A prefix of one block for each letter."""
    return [text[: end + 1].encode() for end in range(len(text))]


def test_a_state_goes_before_its_kv_and_kv_from_the_end() -> None:
    model = Model()
    model.serve(path("abc"))
    assert model.all_given_up() == [(STATE, b"abc"), (FULL, b"abc"), (FULL, b"ab"), (FULL, b"a")]


def test_the_beginning_of_a_conversation_stays_as_long_as_its_end() -> None:
    """Also where it was used in HBM only: DRAM saw no more of it than that a later turn was saved."""
    model = Model()
    model.serve(path("ab"))
    model.serve(path("xy"))
    model.serve(path("abcd"), start=2)
    gone = model.all_given_up()
    assert gone.index((FULL, b"xy")) < gone.index((FULL, b"abcd")) < gone.index((FULL, b"ab"))
    assert gone.index((STATE, b"ab")) < gone.index((STATE, b"abcd"))


def test_kv_that_no_resume_can_use_goes_first() -> None:
    model = Model()
    model.serve(path("abc"))
    model.enter(FULL, path("xyz"))
    assert model.give_up() == (FULL, b"xyz")


def test_a_state_without_its_kv_is_worthless() -> None:
    model = Model()
    model.serve(path("abc"))
    model.enter(STATE, path("xyz")[-1:])
    assert model.give_up() == (STATE, b"xyz")
    model.enter(STATE, path("xyz")[-1:])
    model.enter(FULL, path("xyz"))  # it comes later
    assert model.give_up() == (STATE, b"abc")


def test_a_state_whose_kv_is_lost_is_worthless() -> None:
    model = Model()
    model.serve(path("abc"))
    model.serve(path("xyz"))
    model.paths.left(FULL, [b"xyz"])
    model.held[FULL].remove(b"xyz")
    model.check()
    assert {model.give_up() for _ in range(3)} == {(STATE, b"xyz"), (FULL, b"xy"), (FULL, b"x")}


def test_long_prefixes_are_worth_more_for_each_byte_of_their_state() -> None:
    """A run that was used last may go first."""
    model = Model(nbytes=FRESH * 1000)
    model.serve(path("a" * 40))
    model.serve(path("bb"))
    assert model.give_up() == (STATE, b"bb")


def test_uses_count_once_for_each_request() -> None:
    model = Model(nbytes=FRESH * 1000)
    model.serve(path("abc"))
    model.serve(path("xyz"))
    for _ in range(9):
        model.paths.used(b"xyz", "waiting")
    model.paths.used(b"abc", "first")
    model.paths.used(b"abc", "second")
    assert model.give_up() == (STATE, b"xyz")


def test_a_fork_shares_the_kv_before_it() -> None:
    model = Model()
    model.serve(path("abcd"))
    model.serve(path("abxy"), start=2)
    model.enter(STATE, path("ab")[-1:])
    gone = model.all_given_up()
    assert {gone.index((FULL, end)) < gone.index((FULL, b"ab")) for end in (b"abc", b"abx")} == {True}


def test_windows_before_the_end_of_a_run_go_first() -> None:
    model = Model(WINDOW, FRESH * 1000)
    model.serve(path("abcde"))
    model.serve(path("vwxyz"))
    gone = model.all_given_up()
    assert {name for _, name in gone[:6]} == {b"a", b"ab", b"abc", b"v", b"vw", b"vwx"}
    assert {component for component, _ in gone[:6]} == {WINDOW}


@pytest.mark.parametrize("other", [STATE, WINDOW], ids=repr)
@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_leaves_nothing_without_what_it_needs(other: Component, seed: int) -> None:
    """Paths come whole or from any place on, in the order of copies; any are used; the rule gives them up."""
    rng = random.Random(seed)
    model, paths = Model(other), [path("a")]
    for _ in range(300):
        base = rng.choice(paths)
        whole = path(
            base[rng.randrange(len(base))].decode() + "".join(rng.choices("abc", k=rng.randint(1, 4)))
        )
        held = [name in model.held[FULL] for name in whole]
        start = rng.randrange(held.index(False) + 1) if False in held else 0
        model.serve(whole, start)
        paths.append(whole)
        model.paths.used(rng.choice(rng.choice(paths)), rng.choice([None, "request"]))
        for _ in range(rng.randrange(8)):
            model.give_up()
    assert all(held <= {name for each in paths for name in each} for held in model.held.values())
    model.all_given_up()
    assert not any(model.held.values())
