"""Runs a programme (`tests.support.programmes`) on a small fleet (`crossing_fleet`), and compares each
answer with a stock server's.

Conversations are held with the stock server before; its answers are part of the prompts, so that a wrong one
of the fleet's changes no later prompt. Requests that are to move ask for no log probabilities, which would
keep them where they are.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from crossing_fleet import SECONDS, Fleet, Front, Models, update
from hooked_server import holding
from token_requests import GREEDY, advise, generate, settled

from sglang_ext.protocol.cluster import instance_path
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.testing.waiting import until, wait_until
from tests.support.compare import Answer, assert_same
from tests.support.programmes import (
    INSTANCES,
    ROLES,
    Ask,
    ChangeRole,
    Fill,
    Flush,
    Hint,
    MayBeCached,
    Programme,
    RoleName,
    Step,
    Turn,
    Update,
    fill_prompts,
)
from tests.support.servers.server import ServerProcess

MOVED_TOKENS = 96
"""Tokens of answers that move. Decode servers hold them at their first tokens until one has moved."""
FILLING, FILL_TOKENS = 3, 1100
"""Prompts for each server, and their length: together more than its HBM or its DRAM holds."""
ATOL = 1e-4

BeforeStep = Callable[[int, Step], Awaitable[None]]


class Differs(AssertionError):
    """An answer is not the stock server's."""


class NotItsOwn(AssertionError):
    """A turn has found more cached than its tenant has sent: KV of another tenant, or of other weights."""


# -- right answers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A turn's prompt, and the answer that is right."""

    prompt: list[int]
    answer: Answer

    @property
    def said(self) -> list[int]:
        return [*self.prompt, *self.answer.tokens]


Expected = list[dict[Turn, Asked]]
"""By step."""


def stock_answers(programme: Programme, stock: ServerProcess, models: Models) -> Expected:
    """A stock server's answers to a programme's turns, step by step."""
    said: dict[tuple[int, int], list[int]] = {}
    expected: Expected = []
    is_tuned = False
    try:
        for step in programme.steps:
            expected.append({})
            if isinstance(step, Update):
                is_tuned = step.tuned
                update(stock, models.of(is_tuned))
            if not isinstance(step, Ask):
                continue
            # A prompt of both tenants is answered once, and prompts of one step are answered side by side.
            prompts = {
                (turn.conversation, turn.number): [
                    *(said[turn.conversation, turn.number - 1] if turn.number else ()),
                    *programme.conversations[turn.conversation][turn.number],
                ]
                for turn in step.turns
            }
            with ThreadPoolExecutor(len(prompts)) as pool:
                length = tokens_of(step)
                sent = {
                    each: pool.submit(stock.generate, prompt, max_new_tokens=length)
                    for each, prompt in prompts.items()
                }
            asked = {each: Asked(prompts[each], answer.result()) for each, answer in sent.items()}
            expected[-1] = {turn: asked[turn.conversation, turn.number] for turn in step.turns}
            for each in asked:
                said.setdefault(each, asked[each].said)
    finally:
        if is_tuned:
            update(stock, models.first)
    return expected


def tokens_of(step: Ask) -> int:
    return MOVED_TOKENS if step.moves else int(GREEDY["max_new_tokens"])


def assert_same_tokens(expected: Answer, got: Sequence[int]) -> None:
    """For requests that move, which cannot ask for log probabilities."""
    assert len(got) == len(expected.tokens), f"{len(got)} tokens, not {len(expected.tokens)}"
    for place, (right, token) in enumerate(zip(expected.tokens, got, strict=True)):
        if right != token:
            if expected.is_tie(place, ATOL):
                return
            raise AssertionError(f"token {place} is {token}, not {right}")


# -- running a programme --------------------------------------------------------------------------------


@dataclass
class Played:
    """The outcome of a programme.

    cached: for the turns asked for log probabilities, the number of cached tokens.
    did: how often fleet and router used each crossed mechanism.
    """

    cached: dict[Turn, int] = field(default_factory=dict)
    did: Counter[str] = field(default_factory=Counter)


@dataclass
class Received:
    """The part of a streamed answer that has arrived."""

    instance: str = ""
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    ended: object = None
    """SGLang's ``finish_reason``."""


class Player:
    """Runs a programme.

    on_drain: is called when a drain begins, while the drained server generates no more tokens.
    """

    def __init__(
        self, programme: Programme, fleet: Fleet, front: Front, *, on_drain: Callable[[], None] | None = None
    ) -> None:
        self._programme = programme
        self._fleet = fleet
        self._front = front
        self._router = front.router
        self._on_drain = on_drain
        self._may_be_cached = MayBeCached()
        self._most: dict[Turn, int] = {}
        """The most tokens that may be cached, of the turns that are asked now."""
        self._played = Played()

    async def play(
        self, expected: Expected, *, at_least: Counter[str] | None = None, before: BeforeStep | None = None
    ) -> Played:
        """Run all of it.

        at_least: the least counts of fleet and router by then (`Played.did`).
        before: is called before each step.

        Raises:
            Differs, NotItsOwn: names the seed and the step.
            AssertionError: something else is wrong.
        """
        await self._reset()
        began = await asyncio.to_thread(self._counted)
        for number, step in enumerate(self._programme.steps):
            try:
                if before is not None:
                    await before(number, step)
                await self._step(step, expected[number])
            except Exception as error:
                error.add_note(f"seed {self._programme.seed}, step {number}: {step}")
                raise
        await self._idle()
        wanted = Counter(at_least)

        def enough() -> bool:
            self._played.did = self._counted() - began
            return wanted <= self._played.did

        try:
            # Schedulers export their counters once a second.
            await asyncio.to_thread(wait_until, enough, seconds=10, what="counters")
        except TimeoutError:
            raise AssertionError(f"too little of {wanted - self._played.did}: {self._played}") from None
        return self._played

    def _counted(self) -> Counter[str]:
        return self._fleet.counted() + self._front.counted()

    async def _step(self, step: Step, expected: dict[Turn, Asked]) -> None:
        match step:
            case Ask():
                await self._ask(step, expected)
            case Hint(conversation, tenant, waits):
                client = self._front.tenants[tenant]
                told = await advise(client, self._router, session=self._session(conversation))
                if waits:
                    await settled(client, self._router, told["id"])
            case Fill(number):
                await asyncio.to_thread(self._fill, number)
            case ChangeRole(instance, role):
                await self._change_role(instance, role)
            case Update(is_tuned):
                await self._update(is_tuned)
            case Flush():
                await self._flush()

    def _session(self, conversation: int) -> str:
        return f"{self._programme.seed}-{conversation}"

    # -- requests -------------------------------------------------------------------------------------

    async def _ask(self, step: Ask, expected: dict[Turn, Asked]) -> None:
        known, is_tuned = self._may_be_cached, self._fleet.tuned
        self._most = {
            turn: known.most(
                turn.tenant,
                is_tuned,
                asked.prompt,
                beside=[
                    other.said
                    for each, other in expected.items()
                    if each != turn and each.tenant == turn.tenant
                ],
            )
            for turn, asked in expected.items()
        }
        if step.moves:
            await self._ask_and_drain(expected)
        else:
            await asyncio.gather(*(self._one(turn, asked) for turn, asked in expected.items()))
        for turn, asked in expected.items():
            known.add(turn.tenant, is_tuned, asked.said)

    async def _one(self, turn: Turn, asked: Asked) -> None:
        answer, _ = await generate(
            self._front.tenants[turn.tenant],
            self._router.url,
            asked.prompt,
            session=self._session(turn.conversation),
        )
        self._found(turn, answer.cached_tokens)
        try:
            assert_same(asked.answer, answer, atol=ATOL)
        except AssertionError as error:
            raise Differs(f"{turn}: {error}") from None

    def _found(self, turn: Turn, cached: int) -> None:
        self._played.cached[turn] = cached
        if cached > (most := self._most[turn]):
            raise NotItsOwn(f"{turn} found {cached} tokens cached, and its tenant has said {most} of them")

    async def _ask_and_drain(self, expected: dict[Turn, Asked]) -> None:
        """Ask, and drain in the middle of the answers whichever decode server is the first to answer.

        Decode servers generate the first few tokens only, those that are not drained until the drain begins.
        So an answer is never over before, however late this process sees its first token.
        """
        received = {turn: Received() for turn in expected}
        with ExitStack() as stack:
            holds = {name: stack.enter_context(ExitStack()) for name in self._decoding()}
            for name, hold in holds.items():
                hold.enter_context(holding(self._fleet.faults[name], "generating"))
            answers = [
                asyncio.create_task(self._stream(turn, asked, received[turn]))
                for turn, asked in expected.items()
            ]
            try:
                await until(
                    lambda: (
                        any(each.tokens for each in received.values()) or any(each.done() for each in answers)
                    ),
                    SECONDS,
                    "a first token",
                )
                if url := next((each.instance for each in received.values() if each.tokens), ""):
                    await self._drain(url, holds)
            finally:
                stack.close()
                ended = await asyncio.gather(*answers, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error
        for turn, asked in expected.items():
            self._found(turn, received[turn].cached_tokens)
            try:
                assert_same_tokens(asked.answer, received[turn].tokens)
            except AssertionError as error:
                raise Differs(f"{turn}: {error}; it ended with {received[turn].ended}") from None

    def _decoding(self) -> list[str]:
        return [name for name, role in self._roles().items() if role == "decode"]

    async def _drain(self, url: str, holds: dict[str, ExitStack]) -> None:
        """Drain an instance until it has nothing left, and take it back.

        holds: by instance, those of tokens. The instance's own ends when one of its requests has moved, or
            cannot be moved. From then on it is slow, so that others have to move as well.
        """
        (name,) = (name for name, server in self._fleet.servers.items() if server.url == url)
        row = self._router.fleet.rows[url]
        before = self._moves()
        if self._on_drain is not None:
            self._on_drain()
        slow = self._fleet.faults[name] / "slow"
        slow.touch()
        try:
            await self._post_admin(instance_path(name) + "/drain", {"deadline_s": SECONDS})
            for other in holds.keys() - {name}:
                holds[other].close()
            await until(
                lambda: self._moves() > before or row.state is State.LEFT, SECONDS, f"a move from {name}"
            )
            holds[name].close()
            await until(lambda: row.state is State.LEFT, SECONDS, f"{name} drained")
        finally:
            slow.unlink()
        self._router.members.resume(name)
        await self._all_usable()

    def _moves(self) -> int:
        """The number of requests so far that have moved, or cannot move."""
        counted = self._front.counted()
        return counted["moves moved"] + counted["moves stuck"]

    async def _stream(self, turn: Turn, asked: Asked, received: Received) -> None:
        body = {
            "input_ids": asked.prompt,
            "sampling_params": {**GREEDY, "max_new_tokens": MOVED_TOKENS},
            "stream": True,
        }
        headers = {"x-session-id": self._session(turn.conversation)}
        client = self._front.tenants[turn.tenant]
        async with client.post(f"{self._router.url}/generate", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            received.instance = answer.headers["x-kv-instance"]
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                received.tokens = event["output_ids"]
                received.cached_tokens = event["meta_info"]["cached_tokens"]
                received.ended = event["meta_info"]["finish_reason"]

    def _fill(self, number: int) -> None:
        """Past the router, so that each server gets its share, whatever the policy."""
        pairs = self._fleet.pairs(self._roles())
        prompts = fill_prompts(self._programme.seed, number, count=FILLING * len(pairs), tokens=FILL_TOKENS)
        for at, prompt in enumerate(prompts):
            self._fleet.pass_through(*pairs[at % len(pairs)], prompt)

    # -- changes of the fleet ---------------------------------------------------------------------------

    async def _post_admin(self, path: str, body: dict[str, Any]) -> None:
        async with self._front.admin.post(self._router.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def _all_usable(self) -> None:
        await until(lambda: len(self._router.fleet.usable()) == len(INSTANCES), SECONDS, "all servers usable")

    async def _idle(self) -> None:
        for server in self._fleet.servers.values():
            await asyncio.to_thread(server.wait_idle)

    async def _change_role(self, instance: str, role: RoleName) -> None:
        await self._post_admin(instance_path(instance) + "/role", {"role": role})
        await self._all_usable()

    async def _update(self, is_tuned: bool) -> None:
        await self._idle()
        model = self._fleet.models.of(is_tuned)
        servers = self._fleet.servers.values()
        await asyncio.gather(*(asyncio.to_thread(update, server, model) for server in servers))
        self._fleet.tuned = is_tuned
        await self._all_usable()

    async def _flush(self) -> None:
        await self._idle()
        await asyncio.gather(*(asyncio.to_thread(each.flush) for each in self._fleet.servers.values()))
        self._may_be_cached.flush()

    def _roles(self) -> dict[str, str]:
        members = {name: self._router.members.member(name) for name in INSTANCES}
        return {name: self._router.members.role(member) for name, member in members.items()}

    async def _reset(self) -> None:
        """As a programme expects the fleet, whatever the one before it has left."""
        await self._all_usable()
        while wrong := [name for name, role in self._roles().items() if role != ROLES[name]]:
            roles = list(self._roles().values())
            name = next(each for each in wrong if roles.count(self._roles()[each]) > 1)
            await self._change_role(name, ROLES[name])
        if self._fleet.tuned:
            await self._update(False)
        await self._flush()
