"""The load of agents: runs of calls in which agents wait for the answers of other agents.

A graph gives the possible successors of each agent. Hints go along its edges: when an agent is called, to
every agent that may be called next and has been called before (nothing of another's KV could be moved).

- `logged`: ChatDev's runs in their logged order. Hints go to the one agent that is called next, as if the
  path were known, or along all edges that any logged run has taken, as from a client that knows the graph.
- `fan_out`: as MetaGPT works: a lead publishes to several agents, which read and answer at the same time, and
  goes on when it has read all of them. No log of such runs is at hand: the calls are scripted here, and their
  lengths are drawn from those of ChatDev's agents in like roles.

The logs have lengths and no text. `benchmarks/advisory/talks.py` says how answers and pauses are shortened.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.advisory.talks import Shape, fresh
from benchmarks.lib.traces import AgentCall, agent_runs

NEW_TOKENS = 64
"""Least number of tokens that a call adds to its session."""
LEAD_BEGINS, LEAD = "Coding", "CodeReviewModification"
"""ChatDev's phases whose lengths a lead's first call has, and its others."""
READERS = ("CodeReviewComment", "TestErrorSummary", "EnvironmentDoc")
"""The phases of the agents that read a lead's publications: a reviewer, a tester, and a writer of
requirements."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An agent's session that may be called next. earliest_s: after this call at least, from profiling."""

    session: str
    earliest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an agent in a run.

    keeps: leading tokens of its session that it repeats. new: tokens that follow. after: places in the run of
    the calls whose answers it waits for. pause_s: since the last of these. edges: the agents that may be
    called next.
    """

    session: str
    keeps: int
    new: tuple[int, ...]
    answer: int
    pause_s: float = 0.0
    after: tuple[int, ...] = ()
    edges: tuple[Edge, ...] = ()


def logged(
    folder: Path, runs: int, calls: int, seed: int, shape: Shape, *, all_edges: bool = False
) -> list[list[Call]]:
    """So many of ChatDev's runs of at most so many calls each, the longest runs first; from the first again
    where the log has fewer. Of each, the calls from where agents begin to take turns: the cycles of review
    and revision (Symphony, section 4.4), before which each agent is asked once and nothing can be kept.

    A call repeats its session's tokens, as far as its length goes.

    Args:
        all_edges: hints go to all agents that a logged run has called after this one, the most frequent
            first.
    """
    rng = random.Random(f"{seed}/agents")
    runs_of_log = sorted(agent_runs(folder), key=len, reverse=True)
    graph = _graph(runs_of_log)
    found = []
    for number, run in enumerate(itertools.islice(itertools.cycle(runs_of_log), runs)):
        lengths: dict[str, int] = {}
        begin = _taking_turns(run)
        played = run[begin : begin + calls]
        ended = run[begin].send_s
        chain = []
        for place, (call, following) in enumerate(itertools.zip_longest(played, played[1:])):
            before = lengths.get(call.session, 0)
            prompt = min(call.prompt_tokens, shape.most_past)
            keeps = max(0, min(before, prompt - NEW_TOKENS))
            answer = max(4, call.completion_tokens // shape.answer_scale)
            edges: tuple[Edge, ...] = ()
            if following is not None:
                earliest = following.earliest_s / shape.pace / shape.answer_scale
                of_run = call.session.removesuffix(call.phase)
                # An agent that is at work has its KV in HBM without a hint.
                others = [of_run + phase for phase in graph[call.phase] if phase != call.phase]
                sessions = others if all_edges else [following.session]
                edges = tuple(Edge(f"{number}/{session}", earliest) for session in sessions)
            chain.append(
                Call(
                    f"{number}/{call.session}",
                    keeps,
                    fresh(rng, max(prompt - keeps, 1)),
                    answer,
                    pause_s=min(max(0.0, call.send_s - ended) / shape.pace, shape.longest_pause_s),
                    after=(place - 1,) if place else (),
                    edges=edges,
                )
            )
            lengths[call.session] = keeps + len(chain[-1].new) + answer
            ended = call.receive_s
        found.append(chain)
    return found


def fan_out(folder: Path, runs: int, rounds: int, seed: int, shape: Shape) -> list[list[Call]]:
    """So many runs of so many rounds: a lead is called, then all ``READERS`` at once behind it; a last call
    of the lead reads the last answers.

    An agent's prompt is its whole session followed by its new input: at first its instructions, of a logged
    prompt's length, then the answers that it waited for, of their logged lengths.
    """
    logged_calls: dict[str, list[AgentCall]] = {}
    for call in itertools.chain.from_iterable(agent_runs(folder)):
        logged_calls.setdefault(call.phase, []).append(call)
    return [
        _fan_out(str(number), logged_calls, rounds, random.Random(f"{seed}/fan-out/{number}"), shape)
        for number in range(runs)
    ]


def _fan_out(
    name: str, calls: dict[str, list[AgentCall]], rounds: int, rng: random.Random, shape: Shape
) -> list[Call]:
    run: list[Call] = []
    lengths: dict[str, int] = {}
    shortest = {
        phase: min(call.receive_s - call.send_s for call in calls[phase]) / shape.pace / shape.answer_scale
        for phase in (LEAD, *READERS)
    }

    def call(role: str, phase: str, read: int, after: Iterable[int], edges: Sequence[Edge]) -> int:
        """Add a call; the logged length of its answer, which others read in full."""
        session, drawn = f"{name}/{role}", rng.choice(calls[phase])
        before = lengths.get(session, 0)
        new = min(max(read, NEW_TOKENS) if before else drawn.prompt_tokens, shape.most_past)
        keeps = min(before, shape.most_past - new)
        answer = max(4, drawn.completion_tokens // shape.answer_scale)
        run.append(Call(session, keeps, fresh(rng, new), answer, after=tuple(after), edges=tuple(edges)))
        lengths[session] = keeps + new + answer
        return drawn.completion_tokens

    read, waits_for = 0, range(0)
    for turn in range(rounds):
        readers = [Edge(f"{name}/{phase}", shortest[LEAD]) for phase in READERS]
        published = call("lead", LEAD if turn else LEAD_BEGINS, read, waits_for, readers)
        at = len(run) - 1
        read = sum(
            call(phase, phase, published, (at,), [Edge(f"{name}/lead", shortest[phase])]) for phase in READERS
        )
        waits_for = range(at + 1, len(run))
    call("lead", LEAD, read, waits_for, ())
    return run


def _graph(runs: Iterable[Sequence[AgentCall]]) -> dict[str, list[str]]:
    """Of each phase, those that any run has gone on to, the most frequent one first."""
    edges: dict[str, Counter[str]] = {}
    for run in runs:
        for call, following in itertools.zip_longest(run, run[1:]):
            found = edges.setdefault(call.phase, Counter())
            if following is not None:
                found[following.phase] += 1
    return {phase: [each for each, _ in found.most_common()] for phase, found in edges.items()}


def _taking_turns(run: Sequence[AgentCall]) -> int:
    """Where the first agent is asked that is asked again after another one; 0 where there is none."""
    for at, call in enumerate(run):
        others = False
        for later in run[at + 1 :]:
            if later.session != call.session:
                others = True
            elif others:
                return at
    return 0
