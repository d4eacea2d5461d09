"""Programmes for a small fleet: the steps of a test, one after another, drawn from a seed.

A programme combines mechanisms that other tests try alone: hints, the disk, requests that move, roles that
change, two tenants and updates of the weights, all with prefill and decode apart. It is plain data, drawn
without looking at a clock or a server, so that its seed determines all of it. The runner
(`tests/integration/crossings.py`) compares every answer with a stock server's.

The fleet has the instances `INSTANCES`, in the roles `ROLES` at the start of a programme.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, TypeAlias

RoleName = Literal["prefill", "decode"]
INSTANCES = ("p", "a", "b")
ROLES: dict[str, RoleName] = {"p": "prefill", "a": "decode", "b": "decode"}
TENANTS = 2
POLICIES = ("prompt-tree", "cost", "session", "least-load", "round-robin")
"""The router's policies, one per programme."""
VOCABULARY = (100, 30_000)
BEGINNING = 70
"""Tokens that all conversations have in common: nodes of the tree are cut where they part."""
ADDED = (30, 150)
"""Tokens that a turn adds."""
CONVERSATIONS = 4
TURNS = 5
STEPS = 24
"""Steps of a programme of usual length."""


class Mechanism(StrEnum):
    """A mechanism that a conversation's KV can go through between two of its turns, or in a turn."""

    HINT = "hint"
    """Its turn was announced."""
    DISK = "disk"
    """Other prompts have pushed it out of memory."""
    MOVE = "move"
    """Its request moves to another decode instance."""
    ROLE = "role"
    """An instance has changed its role."""
    TENANTS = "tenants"
    """The other tenant has asked the same."""
    WEIGHTS = "weights"
    """The weights have been updated."""


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation, as one tenant asks it. Both tenants may: their prompts are the same then."""

    conversation: int
    number: int
    tenant: int


@dataclass(frozen=True)
class Hint:
    """A tenant announces the next turn of a conversation.

    waits: until all that can be brought is there.
    """

    conversation: int
    tenant: int
    waits: bool


@dataclass(frozen=True)
class Ask:
    """Turns, asked at the same time.

    moves: the decode instance that is the first to answer is drained in the middle of their answers, and
        taken back.
    """

    turns: tuple[Turn, ...]
    moves: bool = False


@dataclass(frozen=True)
class Fill:
    """Prompts that no conversation begins with, more than the memory of the instances holds."""

    number: int


@dataclass(frozen=True)
class ChangeRole:
    """An instance serves in this role from now on."""

    instance: str
    role: RoleName


@dataclass(frozen=True)
class Update:
    """All servers get other weights, in place, or their first ones again."""

    tuned: bool


@dataclass(frozen=True)
class Flush:
    """All tiers of all instances are emptied."""


Step: TypeAlias = Hint | Ask | Fill | ChangeRole | Update | Flush


@dataclass(frozen=True)
class Programme:
    """The steps of a fleet.

    conversations: for each, the token ids that each of its turns adds.
    policy: the router's.
    """

    seed: int
    conversations: tuple[tuple[tuple[int, ...], ...], ...]
    policy: str
    steps: tuple[Step, ...]

    @property
    def turns(self) -> Iterator[Turn]:
        """All that are asked, in order."""
        return (turn for step in self.steps if isinstance(step, Ask) for turn in step.turns)

    @property
    def role_changes(self) -> int:
        """How many."""
        return sum(isinstance(step, ChangeRole) for step in self.steps)

    def check(self) -> None:
        """Raises:
        AssertionError: a step is not possible where it stands.
        """
        roles, tuned = dict(ROLES), False
        asked = [0] * len(self.conversations)
        for step in self.steps:
            match step:
                case Ask(turns, moves):
                    assert len({(turn.conversation, turn.tenant) for turn in turns}) == len(turns) > 0
                    assert not moves or _count(roles, "decode") > 1, "there is nowhere to move to"
                    for turn in turns:
                        assert 0 <= turn.number <= asked[turn.conversation], "a turn is left out"
                    for turn in turns:
                        asked[turn.conversation] = max(asked[turn.conversation], turn.number + 1)
                case Hint(conversation, _):
                    assert 0 < asked[conversation] < len(self.conversations[conversation])
                case ChangeRole(instance, role):
                    assert roles[instance] != role
                    assert _count(roles, roles[instance]) > 1, "the last of its role"
                    roles[instance] = role
                case Update():
                    assert step.tuned != tuned
                    tuned = step.tuned
                case _:
                    pass


def shortened(programme: Programme, *steps: Step) -> Programme:
    """The same conversations in other steps."""
    found = replace(programme, steps=steps)
    found.check()
    return found


def fill_prompts(seed: int, number: int, *, count: int, tokens: int) -> list[list[int]]:
    """The prompts of a `Fill`."""
    rng = random.Random(f"fill {seed} {number}")
    return [[rng.randrange(*VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def draw(seed: int, steps: int = STEPS) -> Programme:
    """The programme of a seed; programmes of one seed with more steps begin alike."""
    rng = random.Random(f"programme {seed}")

    def text(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(*VOCABULARY) for _ in range(length))

    beginning = text(BEGINNING)
    conversations = tuple(
        tuple((beginning if number == 0 else ()) + text(rng.randint(*ADDED)) for number in range(TURNS))
        for _ in range(CONVERSATIONS)
    )
    policy = rng.choice(POLICIES)
    drawn = _Drawing(rng)
    while len(drawn.steps) < steps and drawn.open:
        drawn.step()
    return Programme(seed, conversations, policy, tuple(drawn.steps))


@dataclass
class _Drawing:
    """A programme that is being drawn, and in which state it has the fleet."""

    rng: random.Random
    steps: list[Step] = field(default_factory=list)
    roles: dict[str, RoleName] = field(default_factory=lambda: dict(ROLES))
    tuned: bool = False
    asked: list[int] = field(default_factory=lambda: [0] * CONVERSATIONS)
    hinted: set[int] = field(default_factory=set)
    fills: int = 0

    @property
    def open(self) -> list[int]:
        """Conversations that go on."""
        return [each for each, number in enumerate(self.asked) if number < TURNS]

    def step(self) -> None:
        """Draw one more step."""
        begun = any(self.asked)
        last = self.steps[-1] if self.steps else None
        kinds = {
            "ask": 6.0,
            "move": 2.5 * (_count(self.roles, "decode") > 1),
            "hint": 3.0 * any(self.asked[each] > 0 for each in set(self.open) - self.hinted),
            "fill": 2.0 * (begun and not isinstance(last, Fill | Flush)),
            "role": 1.5 * begun,
            "update": 0.7 * (begun and not isinstance(last, Update)),
            "flush": 0.3 * (begun and not isinstance(last, Fill | Flush)),
        }
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        match kind:
            case "ask" | "move":
                self.steps.append(Ask(self._turns(), kind == "move"))
            case "hint":
                conversation = self.rng.choice(
                    [each for each in self.open if self.asked[each] and each not in self.hinted]
                )
                self.hinted.add(conversation)
                self.steps.append(Hint(conversation, _owner(conversation), self.rng.random() < 0.5))
            case "fill":
                self.steps.append(Fill(self.fills))
                self.fills += 1
            case "role":
                free = [each for each in INSTANCES if _count(self.roles, self.roles[each]) > 1]
                instance = self.rng.choice(free)
                role: RoleName = "decode" if self.roles[instance] == "prefill" else "prefill"
                self.roles[instance] = role
                self.steps.append(ChangeRole(instance, role))
            case "update":
                self.tuned = not self.tuned
                self.steps.append(Update(self.tuned))
            case "flush":
                self.steps.append(Flush())

    def _turns(self) -> tuple[Turn, ...]:
        """Next turns of some conversations, those first that a hint has announced; now and then the other
        tenant also asks the same turn or the turn before, which may be new to it."""
        order = sorted(self.open, key=lambda each: (each not in self.hinted, self.rng.random()))
        turns: list[Turn] = []
        for conversation in order[: self.rng.randint(1, 3)]:
            number, owner = self.asked[conversation], _owner(conversation)
            self.asked[conversation] += 1
            self.hinted.discard(conversation)
            turns.append(Turn(conversation, number, owner))
            if self.rng.random() < 0.3:
                said = number if self.rng.random() < 0.5 or not number else number - 1
                turns.append(Turn(conversation, said, 1 - owner))
        return tuple(turns)


def _owner(conversation: int) -> int:
    return conversation % TENANTS


def _count(roles: dict[str, RoleName], role: RoleName) -> int:
    return sum(each == role for each in roles.values())


def crossings(programme: Programme) -> set[frozenset[Mechanism]]:
    """Pairs of mechanisms that meet in a turn whose conversation has KV, both since the turn before."""
    found: set[frozenset[Mechanism]] = set()
    met: dict[tuple[int, int], set[Mechanism]] = {}
    for step in programme.steps:
        match step:
            case Ask(turns, moves):
                for turn in turns:
                    met_now = met.get((turn.conversation, turn.tenant))
                    if met_now is not None:
                        here = met_now | ({Mechanism.MOVE} if moves else set())
                        if (turn.conversation, 1 - turn.tenant) in met:
                            here.add(Mechanism.TENANTS)
                        found |= {frozenset(pair) for pair in itertools.combinations(here, 2)}
                for turn in turns:
                    met[turn.conversation, turn.tenant] = {Mechanism.MOVE} if moves else set()
            case Hint(conversation, tenant):
                met.get((conversation, tenant), set()).add(Mechanism.HINT)
            case Flush():
                met.clear()
            case Fill() | ChangeRole() | Update():
                mechanism = {Fill: Mechanism.DISK, ChangeRole: Mechanism.ROLE, Update: Mechanism.WEIGHTS}
                for each in met.values():
                    each.add(mechanism[type(step)])
    return found


@dataclass(frozen=True)
class Kept:
    """A programme that is run again and again: its seed, how many steps of it, and why."""

    seed: int
    steps: int
    why: str


SHORT = Kept(21281, 9, "any two mechanisms meet, in as few steps as were found")
KEPT = (Kept(685, 4, "a server with updated weights was not taken back after a drain"),)
"""Those that have failed once."""

ALL_CROSSINGS = frozenset(frozenset(pair) for pair in itertools.combinations(Mechanism, 2))


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How long the common beginning is."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class MayBeCached:
    """The prefixes that may be cached: prompts and answers of the same tenant under the same weights since
    the last flush. A longer hit has used another tenant's KV."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, bool], list[Sequence[int]]] = {}

    def add(self, tenant: int, tuned: bool, tokens: Sequence[int]) -> None:
        """It has sent this, or been answered."""
        self._said.setdefault((tenant, tuned), []).append(tokens)

    def flush(self) -> None:
        """Nothing is cached."""
        self._said.clear()

    def most(
        self, tenant: int, tuned: bool, prompt: Sequence[int], *, beside: Sequence[Sequence[int]] = ()
    ) -> int:
        """The most tokens of a prompt's beginning that may be cached.

        prompt: is not added yet: its own tokens are no evidence.
        beside: prompts of the tenant that are sent at the same time.
        """
        said = [*self._said.get((tenant, tuned), []), *beside]
        return max((_shared(each, prompt) for each in said), default=0)

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(said)} of tenant {tenant}" for (tenant, _), said in self._said.items())
        return f"MayBeCached({counts})"
