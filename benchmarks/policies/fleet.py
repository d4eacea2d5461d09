"""Workloads of named blocks over the simulator (`sglang_ext.simulator`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.policies.workloads import BLOCK_TOKENS, Blocks, SimSession
from sglang_ext.cost_model import CostModel
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import simulate
from sglang_ext.simulator.settings import Settings
from sglang_ext.simulator.workload import Turn

ENOUGH = 1 << 17
"""Blocks of an instance that hold all of a workload."""
DEFAULTS = Settings()
_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class NamedSession:
    """A session of named blocks, as the simulator takes it."""

    session: SimSession

    @property
    def name(self) -> str:
        return self.session.name

    @property
    def tenant(self) -> int:
        return 0

    @property
    def start_s(self) -> float:
        return self.session.start_s

    def turns(self) -> Iterator[Turn]:
        """Answers are tokens of their own: the part of them that a next prompt has is in its names."""
        for number, request in enumerate(self.session.requests):
            mark = f"{self.session.name}/{number}".encode()
            answer = (mark * (request.output_tokens * TOKEN_BYTES // len(mark) + 1))[
                : max(1, request.output_tokens) * TOKEN_BYTES
            ]
            yield Turn(key_of(request.blocks), answer, request.think_s)


def key_of(blocks: Blocks) -> bytes:
    """The tokens of named blocks."""
    return b"".join(name.to_bytes(8, "little") * (_BLOCK_BYTES // 8) for name in blocks)


def run(
    sessions: Sequence[SimSession],
    policy: str,
    instances: int = 4,
    *,
    blocks: int = ENOUGH,
    model: CostModel | None = None,
    settings: Settings = DEFAULTS,
) -> Outcome:
    """Simulate a workload under a policy.

    Args:
        blocks: of HBM, of each instance; there is no DRAM below, and nothing is fetched.
        settings: of the policy.
    """
    settings = replace(
        settings,
        instances=instances,
        requests=sum(len(session.requests) for session in sessions),
        policy=policy,
        hbm=blocks,
        dram=1,
        fetch=False,
    )
    ordered = sorted(sessions, key=lambda session: session.start_s)
    return simulate(settings, model, sessions=map(NamedSession, ordered))
