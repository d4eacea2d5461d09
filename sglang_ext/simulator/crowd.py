"""A closed loop of agents: each sends a turn, waits for the answer, runs its tool, and sends the next turn.

An agent goes from one session to the next without end. A session begins behind one of a few long texts of
instructions and tools, and with a text of its own; its turns add to it. Tools take times of a long-tailed
distribution. The number of agents is given in times the sessions that HBM holds.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.simulator.outcome import Served, percentile
from sglang_ext.simulator.settings import BLOCK_TOKENS, Settings
from sglang_ext.simulator.workload import Session, Turn

SHARED: Final = 6
SHARED_TOKENS: Final = 512
OWN_TOKENS: Final = (500, 4500)
NEW_TOKENS: Final = (20, 200)
ANSWER_TOKENS: Final = (20, 120)
TURNS: Final = (6, 24)
LONGEST_PAUSE_S: Final = 240.0
STAGGER_S: Final = 0.05
WITHIN: Final = 4.0
"""A turn is in time whose time to first token is at most so many times the unloaded one."""
MEAN_TOKENS: Final = (
    SHARED_TOKENS + sum(OWN_TOKENS) / 2 + sum(TURNS) / 4 * (sum(NEW_TOKENS) + sum(ANSWER_TOKENS)) / 2
)
"""Of a session in the middle of its life."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A `Session` of an agent. round: of the agent's sessions, from 0."""

    settings: Settings
    agent: int
    round: int
    start_s: float

    @property
    def name(self) -> str:
        return f"{self.agent}/{self.round}"

    @property
    def tenant(self) -> int:
        return self.agent % self.settings.tenants

    def turns(self) -> Iterator[Turn]:
        settings = self.settings
        draw = random.Random(f"agent {settings.seed} {self.name}")
        shared = random.Random(f"tools {settings.seed} {draw.randrange(SHARED)}")
        text = shared.randbytes(SHARED_TOKENS * TOKEN_BYTES)
        text += draw.randbytes(draw.randint(*OWN_TOKENS) * TOKEN_BYTES)
        median, spread = math.log(settings.pause_s), settings.pause_spread
        for number in range(draw.randint(*TURNS)):
            text += draw.randbytes(draw.randint(*NEW_TOKENS) * TOKEN_BYTES)
            answer = draw.randbytes(draw.randint(*ANSWER_TOKENS) * TOKEN_BYTES)
            pause_s = min(LONGEST_PAUSE_S, draw.lognormvariate(median, spread))
            yield Turn(text, answer, pause_s if number or self.round else 0.0, tool="tool")
            text += answer


def after(session: Session) -> Session | None:
    """The session that an agent begins when one has ended."""
    assert isinstance(session, AgentSession)
    return dataclasses.replace(session, round=session.round + 1)


def alone(settings: Settings) -> Settings:
    """The same with one agent whose tools are fast: for the unloaded time to first token."""
    return dataclasses.replace(
        settings, instances=1, crowd=1e-9, program_share=0.0, learnt_hints=0.0, pause_s=0.3, seconds=100.0
    )


def agents_of(settings: Settings) -> int:
    """The number of agents."""
    held = settings.instances * settings.hbm * BLOCK_TOKENS / MEAN_TOKENS
    return max(1, round(settings.crowd * held))


def crowd(settings: Settings) -> Iterator[AgentSession]:
    """The first session of each agent."""
    for agent in range(agents_of(settings)):
        yield AgentSession(settings, agent, 0, STAGGER_S * agent)


def median_s(served: Iterable[Served]) -> float:
    """Of the times to first token, but for those of the first turns of sessions."""
    return percentile((each.ttft_s for each in served if not each.begins), 50)


def goodput(served: Sequence[Served], unloaded_s: float, until_s: float) -> dict[str, float]:
    """Goodput and waits. Turns count that were sent after the first quarter of the time, but for the first of
    each session.

    Args:
        unloaded_s: the time to first token of one agent alone.
    """
    since_s = until_s / 4
    counted = [each for each in served if since_s <= each.sent_s < until_s and not each.begins]
    good = [each for each in counted if each.ttft_s <= WITHIN * unloaded_s]
    seconds = max(1e-9, until_s - since_s)
    waited = defaultdict[str, float](float)
    for each in served:
        waited[each.session.partition("/")[0]] += each.ttft_s
    mean = sum(waited.values()) / max(1, len(waited))
    return {
        "goodput": sum(each.answer for each in good) / seconds,
        "tokens_per_s": sum(each.answer for each in counted) / seconds,
        "turns": len(counted),
        "in_time": len(good) / max(1, len(counted)),
        "in_hbm": sum(each.in_hbm for each in counted) / max(1, len(counted)),
        "ttft_p50_s": median_s(counted),
        "ttft_p90_s": percentile((each.ttft_s for each in counted), 90),
        "longest_wait_vs_mean": max(waited.values(), default=0.0) / mean if mean else 0.0,
    }
