"""Same-answer checks: greedy tokens equal, log probabilities close."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

from sglang_ext.stages import StageTimes


@dataclass(frozen=True)
class Answer:
    """A server's answer to one prompt: the generated tokens and the reused KV."""

    tokens: list[int]
    logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int
    hbm_tokens: int
    dram_tokens: int
    disk_tokens: int
    seconds: float
    """End to end, as the server measured it."""
    stages: StageTimes | None = None
    """The parts of ``seconds``, if the server reports them."""
    durability: str | None = None
    """The durability reported with the answer's end, if that waited for the disk."""
    margins: list[float] = field(default_factory=list)
    """How far each token's log probability is above the second best; empty when that was not asked for."""

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> Answer:
        """From the JSON of ``/generate`` with ``return_logprob``."""
        meta = response["meta_info"]
        details = meta.get("cached_tokens_details") or {}

        def logprob(entry: Sequence[Any]) -> float:
            return nan if entry[0] is None else entry[0]  # JSON has no NaN: SGLang sends null

        return cls(
            tokens=[entry[1] for entry in meta["output_token_logprobs"]],
            logprobs=[logprob(entry) for entry in meta["output_token_logprobs"]],
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            hbm_tokens=details.get("device", 0),
            dram_tokens=details.get("host", 0),
            disk_tokens=details.get("storage", 0),
            seconds=meta["e2e_latency"],
            stages=StageTimes.of_details(details),
            durability=details.get("durability_end"),
            margins=[
                logprob(best) - logprob(second) for best, second in meta.get("output_top_logprobs") or ()
            ],
        )

    def is_tie(self, place: int, atol: float) -> bool:
        """Whether another token was as good at this place, but for rounding."""
        return place < len(self.margins) and self.margins[place] <= atol


def assert_same(expected: Answer, got: Answer, *, atol: float = 1e-4) -> int:
    """Fail unless both have the same tokens and log probabilities within ``atol``.

    Rounding may decide where the best two tokens are equally good, to ``atol`` in both answers; tokens after
    such a place have no meaning and are not compared. A random model comes to one in about 30,000 tokens.

    Returns:
        How many tokens were compared: all of them, unless there is a tie.

    Raises:
        AssertionError: shows where they part, and the reuse of each.
    """
    both = f"expected: {_reuse(expected)}\ngot:      {_reuse(got)}"
    if len(expected.tokens) != len(got.tokens):
        raise AssertionError(f"{len(got.tokens)} tokens instead of {len(expected.tokens)}\n{both}")
    for place, (a, b) in enumerate(zip(expected.tokens, got.tokens, strict=True)):
        off = abs(expected.logprobs[place] - got.logprobs[place])
        if a != b:
            if expected.is_tie(place, atol) and got.is_tie(place, atol) and off <= atol:
                return place
            raise AssertionError(
                f"token {place} is {b}, not {a} (log probabilities {got.logprobs[place]:.6f} and "
                f"{expected.logprobs[place]:.6f})\n{both}"
            )
        # Written so that NaN fails.
        if not off <= atol:
            raise AssertionError(
                f"the log probability of token {place} differs by {off:.2e}, more than {atol:.0e}\n{both}"
            )
    return len(expected.tokens)


def _reuse(answer: Answer) -> str:
    return (
        f"{answer.prompt_tokens} prompt tokens, {answer.hbm_tokens} from HBM, "
        f"{answer.dram_tokens} from DRAM, {answer.disk_tokens} from disk: {answer.tokens}"
    )


def random_conversations(
    *,
    seed: int,
    count: int,
    turns: tuple[int, int],
    tokens: tuple[int, int],
    system_tokens: int,
    systems: int = 2,
    vocabulary: tuple[int, int] = (100, 30_000),
) -> list[list[list[int]]]:
    """Conversations as the token ids that the user adds in each turn.

    Args:
        seed: same seed, same conversations.
        count: how many.
        turns: least and most turns of one.
        tokens: least and most tokens that a turn adds.
        system_tokens: length of the beginning that the first turn shares with other conversations.
        systems: how many different such beginnings there are.
        vocabulary: token ids to draw from, half-open.
    """
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(*vocabulary) for _ in range(length)]

    beginnings = [text(system_tokens) for _ in range(systems)]
    conversations: list[list[list[int]]] = []
    for _ in range(count):
        added = [text(rng.randint(*tokens)) for _ in range(rng.randint(*turns))]
        added[0] = rng.choice(beginnings) + added[0]
        conversations.append(added)
    return conversations
