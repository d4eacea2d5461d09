"""A simulated instance: SGLang's scheduler over the cache of `engine`, in passes of the cost model's length.

Requests wait in the order in which they came. A pass computes as many of their tokens as a chunk has, cuts
the last prompt where it has more, and takes as long as `cost_model.batch` says for these tokens; it also
waits for the KV that is loaded for it, layer by layer. Between passes with prompts, answers grow by a token a
step. A request is admitted by SGLang's estimate (`memory.PassBudget`); where answers then fill HBM, some
requests are retracted and wait again. As SGLang does, an instance refuses a prompt that HBM can never hold,
and ends an answer where HBM ends. ``tests/engine/test_simulated_instances.py`` compares all that with
SGLang's own scheduler.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from sglang_ext.cost_model import CostModel
from sglang_ext.cost_model.batch import Batching
from sglang_ext.engine.pd.returns import reserving
from sglang_ext.engine.peers.fetch_results import FetchResult
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchResult
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.errors import InternalError
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol.agent import Load
from sglang_ext.radix_global import Node
from sglang_ext.router.policies.base import Role
from sglang_ext.simulator.disk import NamedDisk
from sglang_ext.simulator.engine import LOAD_MIN_TOKENS, Engine
from sglang_ext.simulator.links import Network
from sglang_ext.simulator.memory import RETRACT_STEPS, NewTokenRatio, PassBudget
from sglang_ext.simulator.peers import Arrivals, Return, Returns, Wires
from sglang_ext.simulator.settings import BLOCK_TOKENS, Settings
from sglang_ext.simulator.virtual_time import VirtualClock
from sglang_ext.simulator.workload import Observed
from sglang_ext.tiers import Tier

BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
WAIT_OVER_S = 1e-6
STRETCH = 64
"""The most steps whose times are taken for equal, though contexts grow."""
LOOK_AGAIN_S = 5e-3
"""Between two looks at requests that wait for the disk: one may have waited long enough."""


class PromptTooLong(Exception):
    """HBM cannot hold the prompt, even with nothing else in it."""


@dataclass(eq=False, slots=True)
class Job:
    """One request at an instance. Its futures are done with its first token, and with its last.

    key, answer: the encoded tokens of the prompt and of the answer.
    """

    namespace: Hashable
    key: bytes
    answer: bytes
    first: asyncio.Future[None]
    last: asyncio.Future[None]
    priority: int = 0
    hits: dict[Tier, int] = field(default_factory=dict)
    """Tokens of the prompt that were there, by tier."""
    node: Node | None = None
    """Where its lock is; None before it is admitted."""
    computed: int = 0
    """Leading tokens of the prompt that have KV."""
    protected: int = 0
    """Leading tokens whose slots are the tree's."""
    owned: int = 0
    """Slots that are its own, as of `seen`."""
    made: int = 0
    """Tokens of its answer, as of `seen`."""
    seen: int = 0
    """The step at which it was last looked at, while its answer grows."""
    admitted_at: float = 0.0
    came_at: float = 0.0
    """Moments: when it came, when its first pass began, and when its last one had ended."""
    began_at: float = 0.0
    computed_at: float = 0.0
    observed: Observed | None = None
    """The times that it takes, from ``arrived`` on; else the cost model's."""
    arrived: float = 0.0
    hands_over: bool = False
    """It ends here with its prompt, whose KV is kept until another instance has it."""
    looked: bool = False
    """The disk was looked at for it."""
    home: str = ""
    """The prefill instance that has computed its prompt, at a decode instance."""
    tokens: int = field(init=False)
    """Of the prompt."""

    def __post_init__(self) -> None:
        self.tokens = len(self.key) // TOKEN_BYTES

    @property
    def text(self) -> bytes:
        """The prompt; of a retracted request, with the tokens of its answer so far."""
        return self.key + self.answer[: self.made * TOKEN_BYTES] if self.made else self.key

    @property
    def length(self) -> int:
        """Tokens of `text`."""
        return self.tokens + self.made

    @property
    def output(self) -> int:
        return len(self.answer) // TOKEN_BYTES


@dataclass(slots=True)
class Work:
    """The work of an instance since the start."""

    passes: int = 0
    computed_tokens: int = 0
    busy_s: float = 0.0
    """Of passes with prompts."""
    steps: int = 0
    generating_s: float = 0.0
    """Of the steps between them."""
    requests: int = 0
    prompts: int = 0
    """Requests in passes with prompts, one for each pass."""
    generated_tokens: int = 0
    """By steps: an answer's first token is its pass's."""
    retracted: int = 0
    """Requests that were sent back to the queue, because HBM had no room for their next tokens."""
    held_token_s: float = 0.0
    """Tokens in HBM that requests held, times the seconds for which they did."""
    queued_s: float = 0.0
    """Seconds in which requests waited that no pass could begin with."""


class Instance:
    """See the module's docstring.

    Args:
        name: its URL.
        number, epoch: of the instance, and of its start.
        published: called after each turn, to send the changes.
        on_hint, on_fetch: take the results of hints and fetches.
        disk: that it had before it was started again.
    """

    engine_type = Engine

    def __init__(
        self,
        name: str,
        epoch: int,
        settings: Settings,
        model: CostModel,
        clock: VirtualClock,
        loop: asyncio.AbstractEventLoop,
        network: Network,
        wires: Wires,
        published: Callable[[], None],
        on_hint: Callable[[PrefetchResult], None],
        on_fetch: Callable[[FetchResult], None],
        role: Role = Role.COLOCATED,
        disk: NamedDisk | None = None,
    ) -> None:
        self._token_bytes = model.kv_bytes_per_token
        self.arrivals: Arrivals[Job] = Arrivals(name, wires, self.wake)
        self._offered: dict[Job, None] = {}
        """Requests whose KV another instance is to take over."""
        self.name, self._settings, self._model, self._loop = name, settings, model, loop
        self._batching = Batching(chunk=settings.chunk)
        reads = role is not Role.DECODE or settings.role_controller == "on"
        own = wires if settings.fetch and reads else None
        self.engine = self.engine_type(
            name, epoch, settings, model, clock, loop, network, own, self.wake, on_hint, on_fetch, disk
        )
        self._wires = wires
        self.returns: Returns | None = None
        """Of an instance that prefills now or did before."""
        self._take_role(role)
        self._kept_back = 0
        """Blocks that are locked until prefill has them."""
        self._published = published
        self._waiting: deque[Job] = deque()
        self._cut: Job | None = None
        """The request whose prompt was cut, and goes on in the next pass."""
        self._running: list[tuple[int, int, Job]] = []
        """A heap: the step at which an answer ends, a number, and its request."""
        self._contexts = 0
        """Tokens of all running requests, less the steps since the start of each."""
        self._pace_s: float | None = None
        """`_step_s`, until the running requests or the step change."""
        self._results: list[tuple[Job, asyncio.Future[None]]] = []
        """That leave when the next pass or step has run (``Decode.late``)."""
        self._leaving: deque[list[tuple[Job, asyncio.Future[None]]]] = deque()
        """Results of earlier passes and steps, in their order, that leave at the end of a later one."""
        self._numbers = itertools.count()
        self._full = False
        """HBM had no room for the next request, and none has ended since (``batch_is_full``)."""
        self._ratio = NewTokenRatio(fixed=settings.ignore_eos)
        self._step = 0
        """Steps since the start, as of `_since`, at which the current one began."""
        self._since = 0.0
        self._computing = False
        self._after_pass: list[Callable[[float], None]] = []
        self._replayed: dict[Job, None] = {}
        """Requests with observed times whose prompts are being computed."""
        self._turn_at: asyncio.TimerHandle | asyncio.Handle | None = None
        self._due = 0.0
        self._replaying: dict[Job, None] = {}
        """Requests that take the observed times."""
        self._dead = False
        self._queued_since: float | None = None
        self.work = Work()

    # -- its role -----------------------------------------------------------------------------------

    def _take_role(self, role: Role) -> None:
        self.role = role
        self._keeps = role is not Role.DECODE or self._settings.pd_caching > 1
        self._grows = role is not Role.DECODE
        """Answers take slots as they grow, and not when their requests are admitted."""
        if role is not Role.PREFILL or self._settings.pd_caching <= 2:
            self._wires.homes.pop(self.name, None)
            return
        if self.returns is None:
            engine = self.engine
            self.returns = Returns(
                self.name, engine.store, engine.moves, engine.dram.block_bytes, self._wires, self.wake
            )
        self._wires.homes[self.name] = self._take_back

    @property
    def idle(self) -> bool:
        """Whether it has no request, and no KV of one is on its way."""
        waiting = self._waiting or self._cut or self.arrivals.waiting or self.arrivals.coming
        working = self._running or self._computing or self._replaying or self._results or self._leaving
        return not (waiting or working or self._offered or self._kept_back)

    def switch(self, role: Role) -> None:
        """Take another role, and keep the cache (``POST /pd_role_switch``). It is idle."""
        if not self.idle:
            raise InternalError(f"{self.name} has requests, and cannot change its role")
        self._take_role(role)
        self.wake()

    # -- requests -----------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """A request has come. `PromptTooLong` is set where its prompt can never be computed."""
        self.work.requests += 1
        job.came_at = self._loop.time()
        if job.observed is not None:
            self._replaying[job] = None
            self._arrived(job)
            self.wake()
            self._loop.call_at(job.arrived + job.observed.began_s, self._replay, job)
            return
        if self._admissible(job):
            self._queue(job)
            self.wake()

    def _admissible(self, job: Job) -> bool:
        """Refuse a prompt that HBM cannot hold, and cut an answer at the end of HBM, by SGLang's limits
        (``max_req_input_len`` and ``max_req_len``)."""
        most = self._settings.hbm * BLOCK_TOKENS - 1
        if job.tokens >= most - 5:
            job.first.set_exception(PromptTooLong())
            return False
        job.answer = job.answer[: (most - job.tokens - 1) * TOKEN_BYTES]
        return True

    def _queue(self, job: Job) -> None:
        """A request enters the queue. Where KV may come for it, SGLang matches it at once, which is a use of
        its prefix."""
        self._waiting.append(job)
        self._arrived(job)

    def _arrived(self, job: Job) -> None:
        if self.engine.promotions is not None or self.engine.peers is not None:
            self.engine.store.match(job.namespace, job.text[:-TOKEN_BYTES])
            self._look(job)

    def _look(self, job: Job) -> None:
        """Look on the disk for the prompt, unless it waits for a peer's KV first."""
        engine = self.engine
        if engine.promotions is None or job.looked or self._fetches(job):
            return
        job.looked = True
        key = job.text[:-TOKEN_BYTES]
        engine.promotions.begin(job, Wanted(job.namespace, key, job.priority, request=job))

    def _replay(self, job: Job) -> None:
        """Begin with a request that takes the observed times, if HBM has room; its KV is not kept else."""
        assert job.observed is not None
        if self._dead:
            return
        self.engine.each_pass(self._loop.time())
        self._grow_replayed()
        if not self._waits(job):
            self._admit_whole(job)
        self._replayed[job] = None
        self._loop.call_at(job.arrived + job.observed.computed_s, self._replay_computed, job)
        self._published()

    def _replay_computed(self, job: Job) -> None:
        assert job.observed is not None
        if self._dead:
            return
        self.engine.each_pass(self._loop.time())
        if job.node is None:
            self._admit_whole(job)
        if job.node is not None:
            self._keep(job, job.key, job.tokens)
        del self._replayed[job]
        before, self._replayed = self._replayed, {}
        self._pass_ended()
        self._replayed = before
        self._loop.call_at(job.arrived + job.observed.first_s, self._replay_first, job)
        self._published()

    def _grow_replayed(self) -> None:
        """Give the answers that are being replayed slots for the tokens of which they have KV by now."""
        now = self._loop.time()
        for job in self._replaying:
            observed = job.observed
            assert observed is not None
            computed_at = job.arrived + observed.computed_s
            if job.node is None or now <= computed_at:
                continue
            share = (now - computed_at) / max(1e-9, observed.last_s - observed.computed_s)
            more = int(min(1.0, share) * (job.output - 1)) - job.made
            if more > 0 and self.engine.hbm_tier.allocate(more) is not None:
                job.made += more
                job.owned += more

    def _replay_first(self, job: Job) -> None:
        """The first token has come to the router."""
        assert job.observed is not None
        if self._dead:
            return
        if not job.first.done():
            job.first.set_result(None)
        self._loop.call_at(job.arrived + job.observed.last_s, self._replay_last, job)

    def _replay_last(self, job: Job) -> None:
        if self._dead:
            return
        self._replaying.pop(job, None)
        self.engine.each_pass(self._loop.time())
        if job.node is not None:
            self._end(job)
        elif not job.last.done():
            job.last.set_result(None)
        self._published()

    @property
    def computing(self) -> bool:
        """Whether a pass with prompts runs."""
        return self._computing or bool(self._replayed)

    def after_pass(self, call: Callable[[float], None]) -> None:
        """Call a function with the time when the pass that runs has ended."""
        self._after_pass.append(call)

    def _pass_ended(self) -> None:
        calls, self._after_pass = self._after_pass, []
        for call in calls:
            call(self._loop.time())

    def receive(self, job: Job, source: str) -> None:
        """A prefill instance has computed the prompt of a request."""
        self.work.requests += 1
        job.came_at = self._loop.time()
        job.home = source
        self.arrivals.add(job, source)

    def give_up(self, job: Job) -> None:
        """The KV of a request that this instance was to decode does not come any more."""
        if self.arrivals.drop(job):
            self._release(job)
            self.wake()

    def handed_over(self, job: Job) -> None:
        """Another instance has the KV of a request, or it is not needed any more."""
        job.hands_over = False
        if job in self._offered:
            del self._offered[job]
            self._end(job)
            self.wake()

    def _admit_handed(self, job: Job) -> float | None:
        if not self._admit_whole(job):
            return None
        return float((job.tokens - job.computed) * self._token_bytes)

    def _handed(self, job: Job) -> None:
        """The KV of a request has come: its answer begins with the token that prefill has computed."""
        if self._dead:
            return
        now = self._loop.time()
        self._generate(now)
        if not self._running:
            self._since = now
        job.computed = job.tokens
        self._keep(job, job.key, job.tokens)
        job.made = 1
        job.first.set_result(None)
        self._go_on(job)
        self.wake()

    def _give_back(self, job: Job) -> None:
        """Keep the blocks of a request that has ended until prefill has them (``ReturnSender``)."""
        tree, hbm = self.engine.tree, self.engine.hbm
        key = job.text[:-TOKEN_BYTES]
        path = reserving.held(tree, hbm, job.namespace, key)
        blocks = sum(node.blocks for node in path)
        if not blocks or not reserving.may_lock(self._kept_back, blocks, self._settings.hbm):
            return
        tree.lock(path[-1], hbm)
        self._kept_back += blocks
        node = path[-1]

        def over() -> None:
            if not self._dead:
                self._kept_back -= blocks
                tree.unlock(node, hbm)
                self.wake()

        back = Return(job.namespace, key[: blocks * BLOCK_BYTES], self.name, lambda: not self._dead, over)
        take = self._wires.homes.get(job.home)
        self._wires.network.later(self._wires.latency_s, over if take is None else lambda: take(back))

    def _take_back(self, back: Return) -> None:
        """A decode instance has KV for this one."""
        assert self.returns is not None
        if self._dead or self.role is not Role.PREFILL:
            back.over()
        elif self.computing:
            self.after_pass(lambda _: self._take_back(back))
        else:
            self.returns.take(back, busy=bool(self._waiting))
            self.wake()

    @property
    def returned_blocks(self) -> int:
        """That decode instances have given back."""
        return 0 if self.returns is None else self.returns.blocks

    def _go_on(self, job: Job) -> None:
        """A pass has made a token of a request's answer; steps make the others."""
        job.seen = self._step
        if job.made >= job.output:
            self._full = False
            self._end(job)
        else:
            entry = (self._step + job.output - job.made, next(self._numbers), job)
            heapq.heappush(self._running, entry)
            self._contexts += job.length - job.seen
            self._pace_s = None

    def _see(self, job: Job) -> None:
        """Take note of the steps that a running request has had."""
        steps, job.seen = self._step - job.seen, self._step
        job.made += steps
        if self._grows:
            job.owned += steps

    def load(self) -> Load:
        """As heartbeats report it: prompts in a pass neither wait nor run."""
        queued = [*self._waiting, *([self._cut] if self._cut is not None else ())]
        running, now = len(self._running), self._loop.time()
        for job in self._replaying:
            assert job.observed is not None
            if now < job.arrived + job.observed.began_s:
                queued.append(job)
            elif now >= job.arrived + job.observed.computed_s:
                running += 1
        tokens = sum(job.length - job.computed for job in queued)
        return Load(running, len(queued), tokens)

    def die(self) -> list[Job]:
        """The process ends, with all that it has in memory. Returns the requests that it had."""
        self._dead = True
        if self._turn_at is not None:
            self._turn_at.cancel()
        self._leave(self._results)
        while self._leaving:
            self._leave_next()
        self.engine.close()
        self.arrivals.close()
        if self.returns is not None:
            self.returns.close()
            self._pass_ended()  # returns that wait for the pass end here
        return [*self._waiting, *([self._cut] if self._cut else ()), *(job for _, _, job in self._running)]

    def wake(self) -> None:
        """Something has come or has ended: take a turn at the end of the current step."""
        if self._computing or self._dead:
            return
        now = self._loop.time()
        due = now
        if self._running:
            step_s = self._step_s()
            done = int((now - self._since) / step_s)
            due = self._since + (done + 1) * step_s
        self._turn_by(due)

    def wake_in(self, seconds: float) -> None:
        """Take a turn after so many seconds, in which a wait may be over."""
        self._loop.call_later(seconds + WAIT_OVER_S, self.wake)

    def _turn_by(self, due: float) -> None:
        if self._turn_at is not None:
            if self._due <= due:
                return
            self._turn_at.cancel()
        self._due = due
        self._turn_at = self._loop.call_at(due, self._turn)

    # -- turns --------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One turn of the scheduler's loop."""
        if self._turn_at is not None:  # a command that waited for the pass has asked for another one
            self._turn_at.cancel()
        self._turn_at = None
        now = self._loop.time()
        self._generate(now)
        self.engine.each_pass(now)
        self.arrivals.begin(self._admit_handed, self._handed)
        batch = self._form_batch()
        self._note_queue(now)
        if batch:
            self._compute(batch)
        elif self._running:
            self._begin_steps()
        elif not self._waiting:
            self._ratio.reset()
        if self._results:
            self._hold_results()
        if not self._computing and (again := self.engine.next_pass(now)) < math.inf:
            self._turn_by(again)
        self._published()

    def _hold_results(self) -> None:
        """Results leave when the pass or step that now begins has run; at once if none does."""
        self._leaving.append(self._results)
        self._results = []
        if self._computing:
            self._loop.call_at(self._due, self._leave_next)
        elif self._running:
            self._loop.call_at(self._since + self._step_s(), self._leave_next)
        else:
            self._leave_next()

    def _step_s(self) -> float:
        """A step of the running requests, until the next one ends."""
        if self._pace_s is None:
            running = len(self._running)
            steps = min(self._running[0][0] - self._step, STRETCH)
            tokens = self._contexts + running * (self._step + (steps - 1) / 2)
            self._pace_s = self._model.decode_s(running, tokens)
        return self._pace_s

    def _begin_steps(self) -> None:
        """Generate until an answer ends or fills HBM."""
        tier = self.engine.hbm_tier
        fitting = tier.usable // len(self._running) if self._grows else math.inf
        if fitting < 1:
            self._retract()
            fitting = max(1, tier.usable // len(self._running)) if self._running else 0
        if self._running:
            steps = min(fitting, self._running[0][0] - self._step, STRETCH)
            self._turn_by(self._since + max(1, steps) * self._step_s())

    def _note_queue(self, now: float) -> None:
        if self._waiting and self._queued_since is None:
            self._queued_since = now
        elif not self._waiting and self._queued_since is not None:
            self.work.queued_s += now - self._queued_since
            self._queued_since = None

    def _generate(self, now: float) -> None:
        """Take note of the steps since the last turn, and end the answers that are complete."""
        while self._running:
            step_s = self._step_s()
            steps = int((now - self._since) / step_s + 1e-6)
            steps = min(steps, self._running[0][0] - self._step)
            if steps and self._grows:
                steps = min(steps, self.engine.hbm_tier.usable // len(self._running))
                if not steps:
                    self._retract()
                    continue
            if not steps:
                break
            self._take_steps(steps, step_s)
            while self._running and self._running[0][0] <= self._step:
                self._full = False
                job = heapq.heappop(self._running)[2]
                self._contexts -= job.length - job.seen
                self._pace_s = None
                self._end(job)

    def _take_steps(self, steps: int, step_s: float) -> None:
        tokens = steps * len(self._running)
        if self._grows and self.engine.hbm_tier.allocate(tokens) is None:
            raise InternalError(f"HBM has no room for {tokens} tokens of answers")
        self._step += steps
        self._pace_s = None
        self._since += steps * step_s
        self._ratio.decay(steps)
        self.work.steps += steps
        self.work.generated_tokens += tokens
        self.work.generating_s += steps * step_s

    def _retract(self) -> None:
        """Send requests back to the queue until the others' next tokens have room (``retract_decode``): those
        with the shortest answers, of these those with the longest prompts. The tree keeps the KV of
        their prompts."""
        for _, _, job in self._running:
            self._see(job)
        tier = self.engine.hbm_tier
        kept = sorted(self._running, key=lambda entry: (entry[2].made, -entry[2].tokens, -entry[1]))
        gone: list[Job] = []
        while len(kept) > 1 and (not gone or tier.usable < len(kept)):
            job = kept.pop(0)[2]
            gone.append(job)
            self._release(job)
            job.node, job.computed, job.protected, job.looked = None, 0, 0, False
            tier.evict(max(0, RETRACT_STEPS * len(kept) - tier.free))
        if tier.usable < len(kept):
            self._end(kept.pop()[2])
        self._ratio.retracted([(job.made, job.output) for _, _, job in kept])
        self._running = kept
        heapq.heapify(self._running)
        self._contexts = sum(job.length - job.seen for _, _, job in kept)
        self._pace_s = None
        self._full = False
        self.work.retracted += len(gone)
        for job in gone:
            self._queue(job)

    def _form_batch(self) -> list[tuple[Job, int]]:
        """The prompts of the next pass, and how many tokens of each it computes."""
        running, most = len(self._running), self._settings.running
        if not running:
            self._full = False
        elif running >= most:
            self._full = True
        if (self._full or not self._waiting) and self._cut is None:
            return []
        budget = self._budget()
        batch: list[tuple[Job, int]] = []
        if self._cut is not None:
            batch.append((self._cut, self._next_chunk(self._cut, budget)))
            self._cut = None
        skipped: list[Job] = []
        while self._waiting and budget.chunk > 0 and not self._full:
            if running + len(batch) >= most:
                self._full = True
                break
            job = self._waiting[0]
            if self._waits(job):
                skipped.append(self._waiting.popleft())
                continue
            new = self._admit(job, budget)
            if new:
                batch.append((self._waiting.popleft(), new))
            if not new or not budget.has_room:
                self._full = bool(batch or running)
                break
        self._waiting.extendleft(reversed(skipped))
        if skipped and self.engine.promotions is not None:
            self.wake_in(LOOK_AGAIN_S)
        return batch

    def _budget(self) -> PassBudget:
        """Of the next pass."""
        for _, _, job in self._running:
            self._see(job)
        expected = self._ratio.expected(job.output - job.made for _, _, job in self._running)
        return PassBudget(self.engine.hbm_tier, self._settings.chunk, expected)

    def _next_chunk(self, job: Job, budget: PassBudget) -> int:
        """The tokens that the next pass computes of a prompt that was cut."""
        left = job.length - job.computed
        new = min(left, budget.next_chunk)
        budget.take(new, job.output if new == left else 0)
        return new

    def _fetches(self, job: Job) -> bool:
        peers = self.engine.peers
        return peers is not None and peers.waits(job.namespace, job.key)

    def _waits(self, job: Job) -> bool:
        """Whether KV for the request is on its way."""
        if self._fetches(job):
            return True
        if self.engine.promotions is None:
            return False
        self._look(job)
        return not self.engine.promotions.ready(job)

    def _admit(self, job: Job, budget: PassBudget) -> int:
        """Lock a request's prefix, and load what of it is below HBM. Returns the tokens that the next pass is
        to compute of it; 0 while there is no room."""
        engine = self.engine
        tree, hbm = engine.tree, engine.hbm
        # The last token is always computed, for its logits.
        match = engine.store.match(job.namespace, job.text[: (job.length - 1) // BLOCK_TOKENS * BLOCK_BYTES])
        in_hbm, below = engine.dram.split(match.path)
        node = in_hbm[-1] if in_hbm else tree.root
        held = sum(each.blocks for each in in_hbm) * BLOCK_TOKENS
        tree.lock(node, hbm)
        # A replay follows SGLang's decision, which no estimate knows.
        answer = 0 if job.observed is not None else job.output - job.made
        if not budget.fits(job.length - held, answer):
            tree.unlock(node, hbm)
            return 0
        hits = {Tier.HBM: held}
        promised = sum(each.blocks for each in below) * BLOCK_TOKENS
        if promised >= LOAD_MIN_TOKENS:
            slots, last = engine.load_back.start(below[-1], promised, None)
            if slots is not None:
                tree.lock(last, hbm)
                tree.unlock(node, hbm)
                node = last
                hits[Tier.DRAM] = promised
                held += promised
        if not job.made:
            job.hits = hits
        job.node, job.computed, job.protected = node, held, held
        job.admitted_at = self._loop.time()
        new = min(budget.chunk, job.length - held)
        budget.take(new, job.output if answer and new == job.length - held else 0)
        if engine.peers is not None:
            engine.peers.admitted(job.namespace, job.key)
        if engine.promotions is not None:
            self._count_disk(job, promised)
            engine.promotions.release(job)
        return new

    def _admit_whole(self, job: Job) -> bool:
        """Give a request that no pass computes here its slots; False while there is no room."""
        tier = self.engine.hbm_tier
        if not self._admit(job, PassBudget(tier, self._settings.hbm * BLOCK_TOKENS, 0.0)):
            return False
        job.owned = job.tokens - job.computed + (0 if self._grows else job.output)
        if tier.allocate(job.owned) is None:
            raise InternalError(f"HBM has no room for {job.owned} tokens that were admitted")
        return True

    def _count_disk(self, job: Job, loaded: int) -> None:
        """Count tokens that a promotion has brought to DRAM for the request as found on disk."""
        assert self.engine.promotions is not None
        brought = self.engine.promotions.brought(job)
        if brought is not None and not job.made and job.hits.get(Tier.DRAM):
            start = job.computed - loaded
            tokens = min(brought.start + brought.tokens, job.computed) - max(brought.start, start)
            if tokens > 0:
                job.hits[Tier.DISK] = tokens
                job.hits[Tier.DRAM] -= tokens

    def _compute(self, batch: list[tuple[Job, int]]) -> None:
        """Run a pass."""
        engine = self.engine
        lengths = [(new, job.computed) for job, new in batch]
        tokens = sum(new for new, _ in lengths)
        if engine.hbm_tier.allocate(tokens) is None:
            raise InternalError(f"HBM has no room for {tokens} tokens that were admitted")
        engine.prefill_clock.prefill_begins(lengths, loads=engine.copier.loads_left_s() > 0)
        seconds = self._pass_s(lengths) + engine.copier.take_stall()
        self.work.passes += 1
        self.work.prompts += len(batch)
        self.work.computed_tokens += tokens
        self.work.busy_s += seconds
        self._computing = True
        now = self._loop.time()
        for job, _ in batch:
            job.began_at = job.began_at or now
        if self._turn_at is not None:
            self._turn_at.cancel()
        self._due = now + seconds
        self._turn_at = self._loop.call_at(self._due, self._computed, batch)

    def _pass_s(self, lengths: list[tuple[int, int]]) -> float:
        """Of a pass that computes so many tokens of each request, behind so many that have KV."""
        passes = self._model.passes(self._batching)
        for new, context in lengths:
            passes = passes.adding(new, context)
        # The work around a pass overlaps the next one; the router's part of the simulation has it.
        computing_s = passes.seconds - self._model.execution.around_s
        # The last layer's KV arrives when all is loaded, and that layer is still to be computed then.
        return max(computing_s, self.engine.copier.loads_left_s() + computing_s / self._settings.layers)

    def _computed(self, batch: list[tuple[Job, int]]) -> None:
        """A pass has ended."""
        self._turn_at = None
        self._computing = False
        self._since = self._loop.time()
        self.engine.prefill_clock.prefill_ended()
        self._pass_ended()
        for job, new in batch:
            job.computed += new
            job.owned += new
            self._keep(job, job.text, job.computed)
            if job.computed < job.length:
                self._cut, self._full = job, False
                continue
            job.made += 1
            self._has_result(job, job.first)
            if job.hands_over:
                self._full = False
                job.seen = self._step  # it may have decoded before, and this request has no steps here
                self._offered[job] = None
            else:
                self._go_on(job)
        self._turn()

    def _keep(self, job: Job, key: bytes, tokens: int) -> None:
        """The tree takes over the whole blocks of a request's first tokens (`RequestRows.keep_computed`)."""
        engine = self.engine
        whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        if whole <= job.protected or not self._keeps:
            return
        result = engine.store.insert(
            Tier.HBM, job.namespace, key[: whole * TOKEN_BYTES], range(whole), priority=job.priority
        )
        duplicates = max(0, result.held_blocks * BLOCK_TOKENS - job.protected)
        engine.slots.free_segment(range(duplicates), start_pos=0)
        job.owned -= whole - job.protected
        job.protected = whole
        assert job.node is not None
        engine.tree.move_lock(job.node, result.node, engine.hbm)
        job.node = result.node

    def _end(self, job: Job) -> None:
        """A request has its last token, of which there is no KV."""
        if job.observed is None:
            self._see(job)
        elif self.engine.hbm_tier.allocate(job.output - job.made) is not None:
            job.owned += job.output - job.made
            job.made = job.output
        self._keep(job, job.text, max(job.tokens, job.length - 1))
        if job.home and self._settings.pd_caching > 2:
            self._give_back(job)
        self._release(job)
        self.work.held_token_s += (job.tokens + job.output) * (self._loop.time() - job.admitted_at)
        self._has_result(job, job.last)

    def _has_result(self, job: Job, of: asyncio.Future[None]) -> None:
        """A request has its first token, or its last."""
        if self._model.late and job.observed is None:
            self._results.append((job, of))
        else:
            self._leave([(job, of)])

    def _leave(self, results: Sequence[tuple[Job, asyncio.Future[None]]]) -> None:
        for job, future in results:
            if not future.done():
                if future is job.first:
                    job.computed_at = self._loop.time()
                future.set_result(None)

    def _leave_next(self) -> None:
        if self._leaving:
            self._leave(self._leaving.popleft())

    def _release(self, job: Job) -> None:
        """Unlock a request's prefix, and free its own slots."""
        assert job.node is not None
        self.engine.tree.unlock(job.node, self.engine.hbm)
        self.engine.slots.free_segment(range(job.owned), start_pos=0)
        job.owned = 0

    def check(self) -> None:
        """Verify that each slot is free, the tree's, or a request's. Raises AssertionError."""
        engine = self.engine
        engine.check()
        for _, _, job in self._running:
            self._see(job)
        jobs = [job for _, _, job in self._running] + ([self._cut] if self._cut else [])
        jobs += [*self._replaying, *self._offered, *self.arrivals.coming]
        if not self._computing:
            owned = sum(job.owned for job in jobs)
            known = engine.slots.available_size() + engine.hbm_tier.total + owned
            assert known == engine.slots.size, f"{known} of {engine.slots.size} slots are accounted for"
