"""Reading profiler traces: synthetic ones, built as torch's profiler and SGLang's scheduler write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sglang_ext.calibration.trace import condensed, passes, read
from sglang_ext.errors import PeerError

HIDDEN = 64


class Writer:
    """Builds a trace: operators one behind the other, on one thread."""

    def __init__(self, *, gpu: bool = False) -> None:
        self.events: list[dict] = []
        self.now = 1_000_000.0
        self._gpu = gpu
        self._ids = 0
        self._gpu_now = 0.0

    def event(self, cat: str, name: str, ts: float, dur: float, tid: int = 7, **args) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}
        )

    def op(self, name: str, us: float, dims, inner: str = "", gap: float = 0.0) -> None:
        """An operator of ``us`` microseconds, with one inside it that takes nearly all of that."""
        self.now += gap
        self._ids += 2
        launch = 2.0 if self._gpu else us
        self.event("cpu_op", name, self.now, launch, **{"External id": self._ids, "Input Dims": dims})
        if inner:
            inside = {"External id": self._ids + 1, "Input Dims": dims}
            self.event("cpu_op", inner, self.now + 0.1, launch - 0.2, **inside)
        if self._gpu:
            self._gpu_now = max(self._gpu_now, self.now)
            of = self._ids + bool(inner)
            self.event("kernel", "some_kernel", self._gpu_now, us, tid=99, **{"External id": of})
            self._gpu_now += us
        self.now += launch

    def prefill(self, new: int, context: int, slow: float = 1.0) -> None:
        """A forward pass of one layer."""
        begin = self.now
        self.op("aten::embedding", 5, [[1000, HIDDEN], [new]])
        self.op("aten::linear", 10 * new * slow, [[new, HIDDEN], [192, HIDDEN], []], "aten::mm", gap=3.0)
        self.op(
            "aten::scaled_dot_product_attention",
            0.01 * new * (new + context),
            [[1, 4, new, 16], [1, 2, new + context, 16]],
            "aten::_scaled_dot_product_flash_attention_for_cpu",
        )
        self.op("c10d::allreduce_", 1000, [[new, HIDDEN]])
        self.op("aten::silu", 3 * new, [[new, 256]])
        self.op("aten::add", 1 * new, [[new, HIDDEN], [new, HIDDEN], []])
        self.op("aten::mm", 20, [[1, HIDDEN], [HIDDEN, 1000]])
        end = max(self.now, self._gpu_now) if self._gpu else self.now
        self.event("user_annotation", f"step[EXTEND bs=1 toks={new}]", begin, end - begin)
        self.now = end + 10
        self.event("user_annotation", "step[DECODE bs=1]", self.now, 5)
        self.event(
            "cpu_op", "aten::mm", self.now + 1, 3, **{"External id": 0, "Input Dims": [[1, 2], [2, 3]]}
        )
        self.now += 20

    def save(self, path: Path, *, zipped: bool = True, **more) -> Path:
        data = json.dumps({"traceEvents": [{"ph": "M", "name": "meta"}, *self.events], **more}).encode()
        path.write_bytes(gzip.compress(data) if zipped else data)
        return path


@pytest.mark.parametrize("gpu", [False, True])
def test_operators_are_sorted_by_kind(tmp_path, gpu) -> None:
    writer = Writer(gpu=gpu)
    writer.prefill(100, 0)
    writer.prefill(50, 150)
    trace = read(writer.save(tmp_path / "t.json.gz", deviceProperties=[{"numSms": 132}] if gpu else []))
    assert trace.units == (132 if gpu else 1)
    steps = condensed(passes(trace.events, [(100, 0), (50, 150)]), HIDDEN)
    by_point = {(step.new, step.context): step for step in steps}
    step = by_point[(50, 150)]
    assert [(run.rows, run.inner, run.columns) for run in step.linears] == [(50, 64, 192), (1, 64, 1000)]
    assert [run.seconds for run in step.linears] == pytest.approx([500e-6, 20e-6])
    assert step.attention_s == pytest.approx(0.01 * 50 * 200 * 1e-6)
    gaps = 0.0 if gpu else 3.0
    assert step.rest_s == pytest.approx((5 + 3 * 50 + 50 + gaps) * 1e-6, abs=1e-7)
    assert step.split_share == pytest.approx(3 / 4)
    assert by_point[(100, 0)].linears[0].seconds == pytest.approx(1000e-6)


def test_repetitions_are_compared_operator_by_operator(tmp_path) -> None:
    writer = Writer()
    for slow in (1.0, 8.0, 1.0, 5.0, 1.0):
        writer.prefill(100, 0, slow)
    trace = read(writer.save(tmp_path / "t.json", zipped=False))
    (step,) = condensed(passes(trace.events, [(100, 0)] * 5), HIDDEN)
    assert step.linears[0].seconds == pytest.approx(1000e-6)


@pytest.mark.parametrize("asked", [[(100, 0)], [(100, 0), (60, 0)], [(100, 0), (50, 0), (50, 0)], []])
def test_prefills_of_others_are_noticed(tmp_path, asked) -> None:
    writer = Writer()
    writer.prefill(100, 0)
    writer.prefill(50, 0)
    with pytest.raises(PeerError, match="other requests ran"):
        passes(read(writer.save(tmp_path / "t.json.gz")).events, asked)


def test_kernels_without_a_launch_are_refused(tmp_path) -> None:
    writer = Writer(gpu=True)
    writer.prefill(100, 0)
    for event in writer.events:
        if event["cat"] == "kernel":
            event["args"]["External id"] = 999_999
    with pytest.raises(PeerError, match="CUDA graphs hide them"):
        passes(read(writer.save(tmp_path / "t.json.gz")).events, [(100, 0)])


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\x1f\x8bnot gzip", b'{"traceEvents": 5}'])
def test_what_is_no_trace_is_refused(tmp_path, content) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(PeerError, match="no trace"):
        read(path)
