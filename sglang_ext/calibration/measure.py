"""Measuring a running instance: prefills of chosen (x, y), their operators, steps of generation."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.calibration import trace
from sglang_ext.calibration.instance import Facts, Instance
from sglang_ext.calibration.plan import Point, Tokens, shuffled
from sglang_ext.cost_model.fitting import Shape, Timed, TimedStep, fit_decode
from sglang_ext.cost_model.profile import Decode
from sglang_ext.errors import ConfigError, PeerError

SAFE_VOCABULARY = 1000
"""Every model has these ids; used where its configuration cannot be read."""
TRACE_WAIT_S = 30.0
DECODE_TOKENS = 24
DECODE_BATCHES = (1, 2, 3, 4, 6, 8, 16, 32)
"""Requests that are generated for side by side."""
DECODE_PROMPT = 32
LONG_BATCH = 4
"""Of these, the requests that also get long prompts."""
LATE_ROUNDS = 5
OVERLAP_ROUNDS = 9
OVERLAP_ANSWER = 48
"""Tokens of an answer whose steps another prompt delays, and of that prompt."""
OVERLAP_PROMPT = 64
POLL_S = 0.05
LOAD_AGE_S = 2.0
CHECK_S = 5.0
"""How often the instance is asked whether it works for others."""

Progress = Callable[[str, int, int], None]
"""(what, done, of how many)."""


class BusyError(PeerError):
    """The instance serves other requests meanwhile: measured times would include theirs."""


@dataclass(frozen=True)
class ModelShape:
    """Shape of a model, from its configuration file."""

    shape: Shape
    kv_bytes_per_token: int
    vocabulary: int


@dataclass
class Measured:
    """Results of a calibration's measurements."""

    samples: list[Timed] = field(default_factory=list)
    steps: list[TimedStep] = field(default_factory=list)
    units: int = 1
    decode: Decode | None = None
    overlap_s: float | None = None
    """The part of a time to first token that overlaps the next pass."""
    disturbed: int = 0
    """How often the instance was found working for others."""
    notes: list[str] = field(default_factory=list)


def read_model(path: str, dtype: str) -> ModelShape | None:
    """The shape of a model from its ``config.json``; None where there is none on this machine."""
    try:
        config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text("utf-8"))
        config = config.get("text_config") or config
        if dtype == "auto":
            dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        number_bytes = 4 if "32" in dtype else 2
        layers = int(config["num_hidden_layers"])
        hidden = int(config["hidden_size"])
        if "kv_lora_rank" in config:
            numbers = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
        else:
            heads = int(config["num_attention_heads"])
            width = int(config.get("head_dim") or hidden // heads)
            numbers = 2 * width * int(config.get("num_key_value_heads") or heads)
        return ModelShape(
            Shape(layers, hidden, number_bytes),
            layers * numbers * number_bytes,
            int(config["vocab_size"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class Bench:
    """Sends prompts with a controlled cached prefix to one instance.

    Args:
        tokens: fresh prompts.
        longest: tokens of the longest prompt.
        patience_s: how long to wait for others' requests to end.
    """

    def __init__(self, instance: Instance, tokens: Tokens, longest: int, patience_s: float = 30.0) -> None:
        self._instance = instance
        self._tokens = tokens
        self._patience_s = patience_s
        self._base = tokens.fresh(longest)
        """Tokens of which cached prefixes are cut."""
        self._cached = 0
        self.disturbed = 0
        self._checked = -CHECK_S

    def sample(self, point: Point) -> Timed:
        """One prefill of a point. Its ``context`` is the number of cached tokens that the instance reports.

        Raises:
            BusyError: others keep the instance busy.
            PeerError: the instance does not keep the prefix.
        """
        for _ in range(3):
            if point.context > self._cached:
                self._instance.prefill(self._base[: point.context])
                self._cached = point.context
            self.require_idle()
            timed = self._instance.prefill(self._base[: point.context] + self._tokens.fresh(point.new))
            if timed.context == point.context:
                return timed
            self._cached = 0  # it was evicted, or not inserted yet
        raise PeerError(
            f"of a prefix of {point.context} tokens that was just computed, {timed.context} are cached",
            hint="Calibrate a server whose radix cache is on and large enough, "
            "or measure shorter prompts with --measure longest",
        )

    def warm_up(self, points: Sequence[Point]) -> None:
        """Send some points once, so that the instance allocates and compiles before it is measured."""
        for point in points:
            self.sample(point)

    def require_idle(self) -> None:
        """Wait until the instance does nothing; it is asked every few seconds.

        Raises:
            BusyError: it goes on working for others.
        """
        begin = time.monotonic()
        if begin - self._checked < CHECK_S:
            return
        seen = False
        while not (load := self._instance.load()).idle:
            # The reported load is up to a second old, and may count the previous prompt.
            waited = time.monotonic() - begin
            if waited > LOAD_AGE_S and not seen:
                seen = True
                self.disturbed += 1
            if waited > self._patience_s:
                raise BusyError(
                    f"{self._instance.url} works for others: {load.running} requests run, "
                    f"{load.waiting} wait",
                    hint="Drain it first, or calibrate a server of its own",
                )
            time.sleep(POLL_S)
        self._checked = time.monotonic()


def prefills(bench: Bench, grid: Sequence[Point], rounds: int, progress: Progress) -> list[Timed]:
    """Times to first token of every point, so many times each."""
    samples = []
    of = len(grid) * rounds
    for number, point in enumerate(shuffled(grid, rounds)):
        progress("prefill", number, of)
        samples.append(bench.sample(point))
    progress("prefill", of, of)
    return samples


def operators(
    bench: Bench,
    instance: Instance,
    facts: Facts,
    grid: Sequence[Point],
    rounds: int,
    hidden: int,
    progress: Progress,
) -> tuple[list[TimedStep], int]:
    """Forward passes of every point, by operator, and the device's units.

    Raises:
        PeerError: the instance's profiler does not report it.
    """
    gpu = facts.device not in ("cpu", "unknown")
    seen = []
    units = 1
    with _folder() as folder:
        for number, point in enumerate(grid):
            progress("operators", number, len(grid))
            bench.sample(point)  # its prefix is cached now, so that the profile has its prefills alone
            name = f"calibrate-{number}"
            bench.require_idle()
            instance.start_profile(str(folder), name, gpu=gpu)
            try:
                timed = [bench.sample(point) for _ in range(rounds)]
            finally:
                instance.stop_profile()
            found = trace.read(_await(folder, name))
            units = found.units
            seen += trace.passes(found.events, [(one.new, one.context) for one in timed])
    progress("operators", len(grid), len(grid))
    return trace.condensed(seen, hidden), units


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder with an unguessable name that a server of another user can write to."""
    with tempfile.TemporaryDirectory(prefix="sglang-ext-calibrate-") as name:
        os.chmod(name, 0o733)
        yield Path(name)


def _await(folder: Path, name: str) -> Path:
    """The first rank's trace, once it is there."""
    deadline = time.monotonic() + TRACE_WAIT_S
    while time.monotonic() < deadline:
        found = sorted(path for path in folder.glob(f"{name}*.trace.json*") if "TP-0" in path.name)
        if found:
            return found[0]
        time.sleep(POLL_S)
    raise PeerError(
        "the instance's profiler wrote nothing that can be read here",
        hint="Run calibrate on the instance's machine to measure operators",
    )


def decode(
    bench: Bench,
    instance: Instance,
    facts: Facts,
    tokens: Tokens,
    longest: int,
    rounds: int,
    progress: Progress,
) -> Decode:
    """Steps of generation of batches of several sizes, with short prompts and with long ones.

    Args:
        longest: tokens of the longest prompt.
    """
    fits = facts.capacity // (2 * (DECODE_PROMPT + DECODE_TOKENS))
    sizes = [size for size in DECODE_BATCHES if size <= min(fits, facts.running or fits)]
    batch = min(LONG_BATCH, sizes[-1])
    long = min(longest, facts.capacity // (4 * batch) - DECODE_TOKENS)
    cases = [*((size, DECODE_PROMPT) for size in sizes), (batch, long)]
    prompts = {(size, length): [tokens.fresh(length) for _ in range(size)] for size, length in cases}
    for prompt in itertools.chain(*prompts.values()):
        # With these in its cache, the instance begins to generate for a whole batch in one pass.
        instance.prefill(prompt)
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    of = rounds * len(cases) + LATE_ROUNDS
    for number, case in enumerate(cases * rounds):
        progress("decode", number, of)
        bench.require_idle()
        seconds[case].append(instance.decode_step(prompts[case], DECODE_TOKENS))
    gaps = []
    for number in range(LATE_ROUNDS):
        progress("decode", rounds * len(cases) + number, of)
        gaps.append(instance.last_gap(tokens.fresh(DECODE_PROMPT)))
    progress("decode", of, of)
    middle = {case: statistics.median(times) for case, times in seconds.items()}
    return fit_decode(
        {size: middle[size, DECODE_PROMPT] for size in sizes},
        DECODE_PROMPT + DECODE_TOKENS // 2,
        (batch, long + DECODE_TOKENS // 2, middle[batch, long]),
        # The first token of two is late, and the last one is not: no step follows that it could wait for.
        late=statistics.median(gaps) < middle[1, DECODE_PROMPT] / 2,
    )


def overlap(
    bench: Bench, instance: Instance, facts: Facts, tokens: Tokens, progress: Progress
) -> float | None:
    """The part of a prompt's time to first token that overlaps the steps of another request: its time alone,
    less the delay of the other request's steps. None for an instance of one request at a time."""
    if facts.running == 1:
        return None
    alone, delays = [], []
    for number in range(OVERLAP_ROUNDS):
        progress("overlap", number, OVERLAP_ROUNDS)
        bench.require_idle()
        alone.append(instance.prefill(tokens.fresh(OVERLAP_PROMPT)).seconds)
        prompt, other = tokens.fresh(DECODE_PROMPT), tokens.fresh(OVERLAP_PROMPT)
        delays.append(instance.delay(prompt, OVERLAP_ANSWER, other))
    progress("overlap", OVERLAP_ROUNDS, OVERLAP_ROUNDS)
    return max(0.0, statistics.median(alone) - statistics.median(delays))


def longest_prompt(facts: Facts, wanted: int) -> int:
    """Tokens of the longest prompt to measure: the requested number, limited by the instance's KV pool.

    Raises:
        ConfigError: the instance is too small to measure anything, or keeps no prefixes.
    """
    if not facts.caches:
        raise ConfigError(
            "the instance keeps no prefixes",
            field="--url",
            hint="Start it without --disable-radix-cache",
        )
    # The base, one prompt beside it, and room for earlier prompts that are not evicted yet.
    fits = facts.capacity // 3
    if facts.chunk is not None:
        fits = min(fits, facts.chunk)
    if fits < 256:
        raise ConfigError(
            f"a KV pool of {facts.capacity} tokens and pieces of {facts.chunk} are too small to measure",
            field="--url",
            hint="Start it with a larger --max-total-tokens or --chunked-prefill-size",
        )
    return min(wanted, fits) // 16 * 16
