"""Reading SGLang's profiler traces: how long each kind of operator took in each forward pass.

``/start_profile`` of any SGLang server writes what torch's profiler saw, in Chrome's trace format: every
operator with its shapes and duration, and around each forward pass a mark such as
``step[EXTEND bs=1 toks=512]``. On a GPU the operators are where kernels were launched from; each kernel's
own time is counted for the operator with the same ``External id`` or the one around it.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.cost_model.fitting import TimedLinear, TimedStep, typical
from sglang_ext.errors import PeerError

_STEP = re.compile(r"step\[EXTEND bs=1 toks=(\d+)")
_LINEAR = re.compile(r"::(linear|mm|addmm|matmul|_scaled_mm|\w*scaled_mm\w*)$")
_ATTENTION = re.compile(r"attention|flash|fmha|attn|::fwd|paged|ragged", re.IGNORECASE)
_MOST_BYTES = 512 << 20
_LEAST_ATTRIBUTED = 0.8
"""Of a GPU's time in a step, the least share that must belong to operators that were seen."""
_COMMUNICATION = re.compile(r"all_?reduce|all_?gather|c10d|nccl|gloo|::recv|::send", re.IGNORECASE)

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """An outermost operator of a forward pass."""

    name: str
    dims: list[Any]
    seconds: float
    begin: float
    """Microseconds, by the trace's clock."""


@dataclass(frozen=True)
class Trace:
    """A trace file."""

    events: list[Event]
    units: int
    """Streaming multiprocessors of the GPU; 1 on a CPU, whose threads share each product evenly."""


def read(path: Path) -> Trace:
    """Read a trace file, gzipped or not.

    Raises:
        PeerError: it is no trace.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        if len(text) > _MOST_BYTES:
            raise PeerError(f"{path} has {len(text)} bytes; profile fewer tokens at once")
        content = json.loads(text)
        events = [e for e in content["traceEvents"] if isinstance(e, dict) and e.get("ph") == "X"]
        devices = content.get("deviceProperties") or [{}]
        return Trace(events, int(devices[0].get("numSms") or 1))
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError) as error:
        raise PeerError(f"{path} is no trace of torch's profiler: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a prefill, as it was seen."""

    new: int
    context: int
    operators: tuple[Operator, ...]
    between: tuple[float, ...]
    """Seconds before each operator, and behind the last, in which none ran; empty for a GPU, where the next
    operator's kernels wait already."""


def passes(events: Sequence[Event], contexts: Sequence[tuple[int, int]]) -> list[Pass]:
    """The prefill steps of a trace.

    Args:
        contexts: (new, context) of the prefills, in the order in which they were asked for; warm-up and
            requests of others have no place in it.

    Raises:
        PeerError: the steps are not those that were asked for, or a GPU's kernels cannot be attributed.
    """
    marks = [
        (event, int(match[1]))
        for event in sorted(events, key=lambda e: float(e["ts"]))
        if event.get("cat") == "user_annotation" and (match := _STEP.match(event["name"]))
    ]
    if [tokens for _, tokens in marks] != [new for new, _ in contexts]:
        raise PeerError(
            f"the profile has prefills of {[t for _, t in marks]} tokens, {[n for n, _ in contexts]} were "
            "sent: other requests ran, or the server cuts prompts into smaller pieces"
        )
    kernels = _kernels(events)
    cpu = sorted(
        (event for event in events if event.get("cat") == "cpu_op"),
        key=lambda e: (float(e["ts"]), -float(e["dur"])),
    )
    starts = [float(event["ts"]) for event in cpu]
    found = []
    for (mark, _), (new, context) in zip(marks, contexts, strict=True):
        begin, end = float(mark["ts"]), float(mark["ts"]) + float(mark["dur"])
        inside = cpu[bisect.bisect_left(starts, begin) : bisect.bisect_right(starts, end)]
        inside = [event for event in inside if event.get("tid") == mark.get("tid")]
        outermost = tuple(_outermost(inside, kernels))
        if kernels is None:
            between = _between(outermost, begin, end)
        else:
            between = ()
            _require_attributed(outermost, kernels, events, begin, end)
        found.append(Pass(new, context, outermost, between))
    return found


def _between(operators: Sequence[Operator], begin: float, end: float) -> tuple[float, ...]:
    gaps, last = [], begin
    for operator in operators:
        gaps.append(max(0.0, operator.begin - last) * 1e-6)
        last = operator.begin + operator.seconds * 1e6
    return (*gaps, max(0.0, end - last) * 1e-6)


def condensed(seen: Sequence[Pass], hidden: int) -> list[TimedStep]:
    """One step per (new, context): each operator with its typical time over the repetitions.

    The same prefill runs the same operators in the same order, so that each operator can be compared with
    itself: different disturbances of single repetitions do not affect the result.
    """
    groups: dict[tuple[int, int], list[Pass]] = {}
    for one in seen:
        groups.setdefault((one.new, one.context), []).append(one)
    return [_step(_typical(group), hidden) for _, group in sorted(groups.items())]


def _typical(group: Sequence[Pass]) -> Pass:
    first = group[0]
    names = [operator.name for operator in first.operators]
    alike = [one for one in group if [operator.name for operator in one.operators] == names]
    operators = tuple(
        Operator(ours.name, ours.dims, typical(one.operators[place].seconds for one in alike), ours.begin)
        for place, ours in enumerate(first.operators)
    )
    between = tuple(typical(one.between[place] for one in alike) for place in range(len(first.between)))
    return Pass(first.new, first.context, operators, between)


def _outermost(events: Sequence[Event], kernels: dict[int, float] | None) -> Iterator[Operator]:
    """Operators that are inside no other. With kernels, an operator's time is that of those it launched."""
    group: list[Event] = []
    end = -1.0
    for event in [*events, None]:
        if event is not None and group and float(event["ts"]) < end:
            group.append(event)
            continue
        if group:
            first = group[0]
            if kernels is None:
                seconds = float(first["dur"]) * 1e-6
            else:
                seconds = sum(kernels.get(_id(inner), 0.0) for inner in group)
            dims = first.get("args", {}).get("Input Dims") or []
            yield Operator(first["name"], dims, seconds, float(first["ts"]))
        if event is not None:
            group = [event]
            end = float(event["ts"]) + float(event["dur"])


def _id(event: Event) -> int:
    return int(event.get("args", {}).get("External id", -1))


def _kernels(events: Sequence[Event]) -> dict[int, float] | None:
    """Seconds of a GPU by the id of the operator that launched them; None where there is no GPU."""
    seconds: dict[int, float] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            seconds[_id(event)] = seconds.get(_id(event), 0.0) + float(event["dur"]) * 1e-6
    return seconds or None


def _require_attributed(
    operators: Sequence[Operator],
    kernels: dict[int, float],
    events: Sequence[Event],
    begin: float,
    end: float,
) -> None:
    """Check that a GPU's time in a step belongs to operators that were seen.

    Raises:
        PeerError: most of it does not.
    """
    seen = sum(operator.seconds for operator in operators)
    # Kernels run behind the step that launched them; those within its time are near enough for a share.
    busy = sum(
        float(event["dur"]) * 1e-6
        for event in events
        if event.get("cat") == "kernel" and begin <= float(event["ts"]) < end
    )
    if seen <= 0 or seen < _LEAST_ATTRIBUTED * busy:
        raise PeerError(
            f"of {busy:.4f} s of a GPU's time, {seen:.4f} s belong to operators that the profiler saw",
            hint="CUDA graphs hide them: start the server with --cuda-graph-backend-prefill disabled",
        )


def _step(one: Pass, hidden: int) -> TimedStep:
    linears = []
    attention = rest = split = whole = 0.0
    for operator in one.operators:
        product = _product(operator)
        if product is not None:
            linears.append(product)
        elif _COMMUNICATION.search(operator.name):
            continue
        elif _ATTENTION.search(operator.name):
            attention += operator.seconds
        else:
            rest += operator.seconds
            rows, last = _rows_and_last(operator.dims)
            if rows == one.new and last is not None:
                split += operator.seconds * (last not in (hidden, 1))
                whole += operator.seconds * (last in (hidden, 1))
    share = split / (split + whole) if split + whole > 0 else 0.0
    return TimedStep(one.new, one.context, tuple(linears), attention, rest + sum(one.between), share)


def _product(operator: Operator) -> TimedLinear | None:
    """The operator as a matrix product, if it is one: weights come as [columns, inner] to ``linear``."""
    match = _LINEAR.search(operator.name)
    dims = [dim for dim in operator.dims if isinstance(dim, list) and len(dim) >= 2]
    if match is None or len(dims) < 2 or not all(isinstance(n, int) for d in dims[:2] for n in d):
        return None
    left, right = dims[-2:] if match[1] == "addmm" else dims[:2]
    rows, inner = left[-2], left[-1]
    if len(left) > 2:
        for more in left[:-2]:
            rows *= more
    if match[1] == "linear":
        columns = right[0]
    else:
        columns = right[1] if right[0] == inner else right[0]
    return TimedLinear(rows, inner, columns, operator.seconds)


def _rows_and_last(dims: Sequence[Any]) -> tuple[int | None, int | None]:
    """First and last dimension of an operator's first input."""
    first = dims[0] if dims else None
    while isinstance(first, list) and first and isinstance(first[0], list):
        first = first[0]
    if not isinstance(first, list) or len(first) < 2 or not all(isinstance(n, int) for n in first):
        return None, None
    return first[0], first[-1]
