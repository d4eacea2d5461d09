"""The cost to decoding of writing through to disk: tokens per second of two servers that differ in that
alone."""

from __future__ import annotations

import random
import statistics
from functools import partial

from benchmarks.lib.common import SEED, Report, paired
from benchmarks.tiers.servers import BLOCK_TOKENS, Client, Prompts, WrongTierError

PROMPT_TOKENS = 2 * BLOCK_TOKENS
ANSWER_TOKENS = (96, 160)
"""Answers end one after the other, so that their KV is written while others still decode."""
AT_ONCE = 8
WRITTEN_SHARE = 0.9
"""Of the blocks that came about which must have been written, or nothing has been measured."""


def measure_decode(
    report: Report,
    writing: Client,
    off: Client,
    prompts: Prompts,
    *,
    answers: int,
    rounds: int,
    seconds: float,
) -> None:
    """Rows for both, and `write_through_decode_cost`: the share of tokens per second lost.

    Args:
        writing, off: servers with `--kv-durability disk` and `off`, otherwise the same.
        answers: per run.
        seconds: after which no further round starts.
    """
    lengths = [random.Random(SEED).randrange(*ANSWER_TOKENS) for _ in range(answers)]
    total = sum(lengths)

    def answer(client: Client) -> None:
        client.generate([prompts.new(PROMPT_TOKENS) for _ in lengths], lengths, at_once=AT_ONCE)

    clients = {"disk": writing, "off": off}
    before = {client: client.written_blocks() for client in clients.values()}
    times = paired(
        {name: partial(answer, client) for name, client in clients.items()},
        rounds=rounds,
        # The other server must not still be writing KV of the run before. Writes that a server leaves to
        # itself are its own cost.
        before={"off": writing.wait_until_written},
        deadline=seconds,
    )
    writing.wait_until_written()
    runs = len(times.seconds["disk"]) + 1
    blocks = runs * sum((PROMPT_TOKENS + length - 1) // BLOCK_TOKENS for length in lengths)
    wrote = {name: client.written_blocks() - before[client] for name, client in clients.items()}
    if wrote["disk"] < WRITTEN_SHARE * blocks or wrote["off"]:
        raise WrongTierError(
            f"{blocks} blocks were to be written by one server and none by the other: {wrote}"
        )
    for name in clients:
        report.add(
            f"decode, --kv-durability {name}",
            tokens_s=total / times.median(name),
            p99_s=times.p(name, 99),
            runs=len(times.seconds[name]),
            blocks_written=int(wrote[name]),
        )
    ratios = [b / a for a, b in zip(times.seconds["disk"], times.seconds["off"], strict=True)]
    report.summary["write_through_decode_cost"] = 1 - statistics.median(ratios)
