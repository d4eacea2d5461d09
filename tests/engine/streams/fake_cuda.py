"""torch.cuda on a CPU for the stream checker: device tensors, streams, events, reuse of freed memory.

Every operation on a device tensor is carried out when it is called, in program order, and is recorded on
the current stream with the cells that it reads and writes. An access that is right by the order of
the program alone shows as a race in the trace.

The caching allocator gives freed memory to later work of the stream on which it was allocated: freeing is
recorded as a write there. For a tensor with `record_stream`, the write comes after the earlier work of
those streams. Pinned memory is freed after the copies that read it. An event's `query` may be true or
false while its work is under way: a draw decides, and true is an order.
"""

from __future__ import annotations

import ctypes
import random
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from stream_trace import Access, Clock, Memory, Timeline, Trace, join
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_ext.engine.movers.row_copies import Launch

DEVICE = torch.device("cuda", 0)
POISON = 0xA5
_ROWS = ("index_select", "index_copy_", "index_fill_")
_ELEMENTS = ("index", "index_put_")


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a GPU. The bytes are in ``inner``; ``lives`` keeps its memory taken."""

    inner: torch.Tensor
    lives: Lives

    @staticmethod
    def __new__(cls, inner: torch.Tensor, lives: Lives) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )

    def __init__(self, inner: torch.Tensor, lives: Lives) -> None:
        self.inner, self.lives = inner, lives

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a device tensor outside of the fake")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.lives.memory.pinned else DEVICE

    @property
    def is_cuda(self) -> bool:
        return not self.lives.memory.pinned

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def is_pinned(self, *_: Any) -> bool:
        return self.lives.memory.pinned

    def record_stream(self, stream: FakeStream) -> None:
        self.lives.streams.add(stream.timeline)

    def cpu(self) -> torch.Tensor:
        cuda = self.lives.cuda
        cuda.trace.run(cuda.current.timeline, "copy to the host", reads=[cuda.access(self)])
        cuda.trace.wait(cuda.current.timeline.clock, caller())
        return self.inner.clone()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        if not self.lives.memory.pinned:
            return self.cpu().numpy()
        trace = self.lives.cuda.trace
        trace.run(trace.host, "look of the host", reads=[self.lives.cuda.access(self)])
        return self.inner.numpy()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        devices = [a for a in (*args, kwargs.get("device")) if isinstance(a, (str, torch.device))]
        dtypes = [a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)]
        host = bool(devices) and torch.device(devices[0]).type == "cpu"
        if host and not self.lives.memory.pinned:
            found = self.cpu()
            return found.to(dtypes[0]) if dtypes else found
        moves = bool(devices) and not host and self.lives.memory.pinned
        if not moves and not kwargs.get("copy") and (not dtypes or dtypes[0] == self.dtype):
            return self
        about = {"dtype": dtypes[0]} if dtypes else {}
        about |= {"device": DEVICE, "non_blocking": kwargs.get("non_blocking", False)} if moves else {}
        return torch.ops.aten._to_copy.default(self, **about)

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.lives.memory.name}, {tuple(self.shape)}, {self.dtype})"


class Lives:
    """Ownership of memory, shared by the views of it. ``streams``: those of `record_stream`."""

    def __init__(self, cuda: FakeCuda, memory: Memory, owner: Timeline, inner: torch.Tensor) -> None:
        self.cuda, self.memory, self.owner = cuda, memory, owner
        self.streams: set[Timeline] = set()
        self._free = weakref.finalize(self, cuda.freed, memory, owner, self.streams, inner)
        self._free.atexit = False


class FakeStream:
    """``torch.cuda.Stream``."""

    def __init__(self, cuda: FakeCuda, name: str, priority: int = 0) -> None:
        self._cuda, self.priority, self.device = cuda, priority, DEVICE
        self.timeline = cuda.trace.timeline(name)
        self.cuda_stream = self.timeline.number

    def wait_stream(self, other: FakeStream) -> None:
        join(self.timeline.clock, self._cuda.trace.host.clock)
        join(self.timeline.clock, other.timeline.clock)

    def wait_event(self, event: FakeEvent) -> None:
        join(self.timeline.clock, event.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or self._cuda.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._cuda.trace.wait(self.timeline.clock, caller())

    def query(self) -> bool:
        return self._cuda.has_ended(self.timeline.clock)

    def __enter__(self) -> FakeStream:
        self._cuda.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._cuda.entered.pop() is self


class FakeEvent:
    """``torch.cuda.Event``. An event that was never recorded is complete."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False) -> None:
        self._cuda, self.timing = cuda, enable_timing
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        timeline = (stream or self._cuda.current).timeline
        join(timeline.clock, self._cuda.trace.host.clock)
        self.clock = dict(timeline.clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self._cuda.current).wait_event(self)

    def query(self) -> bool:
        return self._cuda.has_ended(self.clock)

    def synchronize(self) -> None:
        self._cuda.trace.wait(self.clock, caller())

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.timing, "an event was made without timing"
        assert other.timing, "an event was made without timing"
        for event in (self, other):
            if not event.clock:
                raise RuntimeError("invalid resource handle")
            if not precedes(event.clock, self._cuda.trace.host.clock):
                raise RuntimeError("device not ready")
        assert not precedes(other.clock, self.clock), "the beginning was recorded after the end"
        return 1.0


class FakeRuntime:
    """Calls of CUDA's runtime, of registered memory; one from before batches of copies."""

    batch = None

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def mapped(self, address: int) -> int:
        memory = self._cuda.at(address)
        assert memory is not None, "memory that is not registered"
        assert memory.pinned, "memory that is not pinned"
        return address

    def copy_2d(
        self, to: int, to_pitch: int, at: int, pitch: int, width: int, rows: int, stream: int
    ) -> None:
        cuda = self._cuda
        into, of = cuda.at(to), cuda.at(at)
        assert into is not None, "a copy to memory that is not registered"
        assert of is not None, "a copy of memory that is not registered"
        wrote = into.at(to - into.address, (rows, width), (to_pitch, 1), 1)
        read = of.at(at - of.address, (rows, width), (pitch, 1), 1)

        def act() -> None:
            for row in range(rows):
                ctypes.memmove(to + row * to_pitch, at + row * pitch, width)

        timeline = next(t for t in cuda.trace.timelines if t.number == stream)
        cuda.launches.append("cudaMemcpy2DAsync")
        cuda.trace.run(timeline, "cudaMemcpy2DAsync", reads=[(of, read)], writes=[(into, wrote)], action=act)


def bare(of: Launch) -> Launch:
    """The same with the memory of its tables, which it does not keep taken."""
    source, target = (replace(side, pieces=_inner(side.pieces)) for side in (of.source, of.target))
    units = {name: _inner(getattr(of, name)) for name in ("source_units", "target_units")}
    return replace(of, source=source, target=target, **units)


def moves_of(of: Launch) -> Iterator[tuple[int, int, int]]:
    """The copies of a kernel's launch, one row of a piece after the other: from, to, bytes."""
    word = of.tile.word.itemsize
    ends = [(side, side.pieces.tolist()) for side in (of.source, of.target)]
    units = [each.tolist() for each in (of.source_units, of.target_units)]
    for token in range(of.tokens):
        for piece in range(len(ends[0][1])):
            found = []
            for (side, pieces), unit in zip(ends, units, strict=True):
                address, _, unit_words, token_words = pieces[piece]
                at, rest = divmod(token, side.unit_tokens)
                found.append(address + word * (unit[at] * unit_words + rest * token_words))
            yield found[0], found[1], word * ends[0][1][piece][1]


def joined(accesses: Sequence[Access]) -> list[Access]:
    """One access for each memory."""
    by_memory: dict[int, tuple[Memory, list[np.ndarray]]] = {}
    for memory, cells in accesses:
        by_memory.setdefault(id(memory), (memory, []))[1].append(cells)
    return [(memory, np.unique(np.concatenate(parts))) for memory, parts in by_memory.values()]


def precedes(clock: Clock, other: Clock) -> bool:
    """Whether all before the one is before the other."""
    return all(other.get(timeline, 0) >= count for timeline, count in clock.items())


class FakeCuda:
    """The device. ``pace`` is the share of queries of unfinished work that find it finished."""

    def __init__(self, seed: int = 0, pace: float = 0.5) -> None:
        self.trace = Trace()
        self.pace = pace
        self._rng = random.Random(seed)
        self.default = FakeStream(self, "scheduler")
        self.entered: list[FakeStream] = []
        self.launches: list[str] = []
        self._memories: list[Memory] = []
        self._starts: list[int] = []
        self._kept: list[torch.Tensor] = []
        self._snapshots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._streams = 0
        self._open = False
        self.mode = _Mode(self)

    # -- torch.cuda ------------------------------------------------------------------------------

    @property
    def current(self) -> FakeStream:
        return self.entered[-1] if self.entered else self.default

    def stream(self, device: Any = None, priority: int = 0, *, name: str = "") -> FakeStream:
        self._streams += 1
        return FakeStream(self, name or f"stream {self._streams}", priority)

    def event(self, enable_timing: bool = False, **_: Any) -> FakeEvent:
        return FakeEvent(self, enable_timing)

    def has_ended(self, clock: Clock) -> bool:
        """A query's answer. Work that has ended is before all later work of the host."""
        if not precedes(clock, self.trace.host.clock):
            if self._rng.random() >= self.pace:
                return False
            join(self.trace.host.clock, clock)
        return True

    def synchronize(self, *_: Any) -> None:
        for timeline in self.trace.timelines:
            join(self.trace.host.clock, timeline.clock)
        self.trace.synchronizations.append(caller())

    @contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        """Stand for torch.cuda, and record the operations on device tensors of this thread."""
        with standing_for_cuda(lambda: self), self.recording():
            yield self

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations on device tensors of this thread."""
        self._open = True
        try:
            with self.mode:
                yield
        finally:
            self._open = False

    # -- memory ----------------------------------------------------------------------------------

    def register(
        self,
        inner: torch.Tensor,
        name: str,
        cells: np.ndarray | None = None,
        *,
        pinned: bool = False,
        fresh: bool = False,
    ) -> Memory:
        """Know the memory of a tensor by its address.

        Args:
            cells: of each byte, int32.
            fresh: an operation makes its content.
        """
        storage = inner.untyped_storage()
        self._kept.append(inner)
        memory = Memory(name, storage.data_ptr(), storage.nbytes(), cells, pinned)
        at = bisect_right(self._starts, memory.address)
        self._starts.insert(at, memory.address)
        self._memories.insert(at, memory)
        whole = bytes_of(inner)
        self._snapshots[id(memory)] = whole, torch.full_like(whole, POISON) if fresh else whole.clone()
        return memory

    def adopt(self, inner: torch.Tensor, name: str, cells: np.ndarray | None = None) -> DeviceTensor:
        """A device tensor with the bytes of a tensor of the host, which stays the test's view of them."""
        memory = self.register(inner, name, cells)
        return DeviceTensor(inner, Lives(self, memory, self.current.timeline, inner))

    def rows(self, inner: torch.Tensor, name: str) -> DeviceTensor:
        """As `adopt`; each row of the first dimension is a cell."""
        row = inner[0].numel() * inner.element_size()
        return self.adopt(inner, name, np.repeat(np.arange(len(inner), dtype=np.int32), row))

    def at(self, address: int) -> Memory | None:
        """The memory of an address."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._memories[at].address + self._memories[at].nbytes:
            return None
        return self._memories[at]

    def freed(self, memory: Memory, owner: Timeline, streams: set[Timeline], inner: torch.Tensor) -> None:
        """Its memory may be given to others: record that they write to it."""
        timeline = owner
        if streams:
            timeline = self.trace.timeline("later owner", [owner, *streams])
        if not self._open:
            return
        with _disable_current_modes():
            whole = bytes_of(inner)
        cells = np.zeros(1, np.int64) if memory.cells is None else np.unique(memory.cells).astype(np.int64)
        self.trace.run(
            timeline,
            f"reuse of {memory.name}",
            writes=[(memory, cells)],
            action=unseen(lambda: whole.fill_(POISON)),
        )

    def access(self, tensor: torch.Tensor) -> Access:
        """The cells of a tensor."""
        if isinstance(tensor, DeviceTensor):
            return self._cells(tensor.lives.memory, tensor.inner)
        memory = self.at(tensor.data_ptr())
        assert memory is not None, "memory of the host that was not registered"
        return self._cells(memory, tensor)

    @staticmethod
    def _cells(memory: Memory, inner: torch.Tensor) -> Access:
        size = inner.element_size()
        offset = inner.data_ptr() - memory.address if inner.numel() else 0
        return memory, memory.at(offset, inner.shape, [s * size for s in inner.stride()], size)

    # -- work ------------------------------------------------------------------------------------

    def launch(
        self,
        name: str,
        action: Callable[[], None],
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        stream: FakeStream | None = None,
    ) -> None:
        """Work that no operator of torch does: a kernel, a pass, a replayed graph."""
        self.launches.append(name)
        timeline = (stream or self.current).timeline
        self.trace.run(timeline, name, reads=reads, writes=writes, action=unseen(action))

    def runtime(self) -> FakeRuntime:
        """In place of `CudaRuntime`."""
        return FakeRuntime(self)

    def launcher(self) -> Callable[[Launch], None]:
        """In place of `row_copies.launcher`: the kernel's copies, by the tables and units of a launch."""
        return self._copy_rows

    def _copy_rows(self, asked: Launch) -> None:
        of = bare(asked)
        with _disable_current_modes():
            moves = list(moves_of(of))
            reads = [self._bytes_at(source, size) for source, _, size in moves]
            writes = [self._bytes_at(target, size) for _, target, size in moves]
        tables = (asked.source.pieces, asked.source_units, asked.target.pieces, asked.target_units)
        reads += [self.access(table) for table in tables if table.numel()]

        def again() -> None:
            # Freed memory may have been in a table; the GPU would end with an error.
            for source, target, size in moves_of(of):
                if self.at(source) is not None and self.at(target) is not None:
                    ctypes.memmove(target, source, size)

        self.launch("copy_rows", again, joined(reads), joined(writes))

    def _bytes_at(self, address: int, size: int) -> Access:
        memory = self.at(address)
        assert memory is not None, "memory that is not registered"
        return memory, memory.at(address - memory.address, (size,), (1,), 1)

    def replay(self, seed: int) -> None:
        """Carry everything out again from the beginning, in another order that the clocks allow."""
        order = self.trace.orders(seed)
        with _disable_current_modes():
            for whole, before in self._snapshots.values():
                whole.copy_(before)
        for operation in order:
            if operation.action is not None:
                operation.action()


def caller() -> str:
    """The product's line that makes the host wait, or else the nearest outside of torch and this file."""
    frame, nearest = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__ and not path.endswith("stream_trace.py"):
            place = f"{path.rpartition('/')[2]}:{frame.f_code.co_name}"
            if "/sglang_ext/" in path:
                return f"ours: {place}"
            nearest = nearest or place
        frame = frame.f_back
    return nearest


@contextmanager
def standing_for_cuda(of: Callable[[], FakeCuda]) -> Iterator[None]:
    """Replace torch.cuda by the device that ``of`` returns to the thread that calls."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "Stream": lambda *args, **about: of().stream(*args, **about),
            "Event": lambda *args, **about: of().event(*args, **about),
            "stream": lambda stream: stream,
            "device": lambda device: nullcontext(),
            "current_stream": lambda device=None: of().current,
            "default_stream": lambda device=None: of().default,
            "synchronize": lambda *args: of().synchronize(*args),
            "_lazy_init": lambda: None,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "tensor", _to_device(torch.tensor))
        yield


class _Mode(TorchDispatchMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wrapped = [each for each in tensors if isinstance(each, DeviceTensor)]
        device = kwargs.get("device")
        made_here = device is not None and torch.device(device).type == "cuda"
        if not (wrapped or made_here or any(self._known(each) for each in tensors)):
            return self._pin(args) if func is torch.ops.aten._pin_memory.default else func(*args, **kwargs)
        if func is torch.ops.aten._pin_memory.default or func is torch.ops.aten.is_pinned.default:
            return args[0] if func is torch.ops.aten._pin_memory.default else True
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return self._record(func, args, kwargs, tensors, made_here)

    def _known(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and self._cuda.at(tensor.data_ptr()) is not None

    def _pin(self, args: Any) -> DeviceTensor:
        inner = args[0].clone()
        memory = self._cuda.register(inner, f"pinned {tuple(inner.shape)}", pinned=True)
        lives = Lives(self._cuda, memory, self._cuda.trace.host, inner)
        return DeviceTensor(inner, lives)

    def _record(self, func: Any, args: Any, kwargs: Any, tensors: list[Any], made_here: bool) -> Any:
        cuda, name = self._cuda, func.overloadpacket.__name__
        bare_args, bare_kwargs = mapped(_inner, (args, kwargs))
        if name == "_to_copy" and made_here and not self._known(bare_args[0]):
            bare_args = (bare_args[0].clone(),)  # memory of the host, which may change it
        out = func(*bare_args, **bare_kwargs)
        outs = [leaf for leaf in leaves_of(out) if isinstance(leaf, torch.Tensor)]
        sources = {each.untyped_storage().data_ptr(): each for each in map(_inner, tensors) if each.numel()}
        owners = {_inner(each).untyped_storage().data_ptr(): each for each in tensors}
        mutated = self._mutated(func, args, kwargs)
        if not mutated and outs and all(each.untyped_storage().data_ptr() in sources for each in outs):
            return mapped(lambda leaf: self._view(leaf, owners), out)  # a view
        on_device = made_here or any(isinstance(each, DeviceTensor) and each.is_cuda for each in tensors)
        timeline = cuda.current.timeline if on_device else cuda.trace.host
        known = [each for each in tensors if isinstance(each, DeviceTensor) or self._known(each)]
        blind = mutated if name in ("copy_", "fill_", "zero_", *_ROWS[1:], *_ELEMENTS[1:]) else []
        some = {"index_select": self._rows, "index": self._elements}.get(name)
        reads = [
            some(name, args) if some and each is args[0] else cuda.access(each)
            for each in known
            if not any(each is target for target in blind) and each.numel()
        ]
        some = self._rows if name in _ROWS else self._elements if name in _ELEMENTS else None
        writes = [
            some(name, args) if some else cuda.access(each)
            for each in mutated
            if each.numel() and (isinstance(each, DeviceTensor) or self._known(each))
        ]
        made = [] if mutated else [self._new(leaf, name) for leaf in outs if on_device]
        writes += [] if name == "empty" else [cuda.access(each) for each in made if each.numel()]
        self._copies(name, args, kwargs, tensors, timeline)
        if name != "empty" and on_device:
            cuda.launches.append(name)
        kept = list(outs)

        def again() -> None:
            found = func(*bare_args, **bare_kwargs)
            if not mutated:
                for before, now in zip(kept, leaves_of(found), strict=False):
                    before.copy_(now)

        operation = cuda.trace.run(timeline, name, reads=reads, writes=writes, site=caller())
        operation.action = None if name == "empty" else unseen(again)
        sizes_on_host = name in ("nonzero", "_unique2", "masked_select", "equal")
        if (on_device and (not outs or sizes_on_host)) or self._host_waits(name, args, kwargs, tensors):
            cuda.trace.wait(timeline.clock, caller())
        if mutated:
            return args[0] if outs else out
        return mapped(lambda leaf: _of(leaf, made), out)

    @staticmethod
    def _mutated(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        found = []
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[at] if at < len(args) else kwargs.get(argument.name)
                found += [value] if isinstance(value, torch.Tensor) else []
        return found

    def _rows(self, name: str, args: Any) -> Access:
        """Of the first argument, the rows of an index."""
        target, dim, index = args[:3]
        memory, inner = target.lives.memory, target.inner
        parts = [self._cuda._cells(memory, inner.select(dim, row))[1] for row in _inner(index).tolist()]
        return memory, np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)

    def _elements(self, name: str, args: Any) -> Access:
        """Of the first argument, what tensors of indices select."""
        target, indices = args[:2]
        if not isinstance(target, DeviceTensor) or target.lives.memory.cells is None:
            return self._cuda.access(target)
        memory, inner = target.lives.memory, target.inner
        size = inner.element_size()
        first = inner.data_ptr() - memory.address
        strides = [s * size * 4 for s in inner.stride()]
        found = []
        for at in (first, first + size - 1):
            cells = np.lib.stride_tricks.as_strided(memory.cells[at:], inner.shape, strides)
            chosen = tuple(slice(None) if each is None else _inner(each).numpy() for each in indices)
            found.append(cells[chosen].ravel())
        return memory, np.unique(np.concatenate(found)).astype(np.int64)

    def _new(self, inner: torch.Tensor, name: str) -> DeviceTensor:
        cuda = self._cuda
        memory = cuda.register(inner, f"{name} {tuple(inner.shape)} of {caller()}", fresh=True)
        if name == "empty":
            bytes_of(inner).fill_(POISON)
        return DeviceTensor(inner, Lives(cuda, memory, cuda.current.timeline, inner))

    def _view(self, leaf: Any, owners: dict[int, Any]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        owner = owners[leaf.untyped_storage().data_ptr()]
        return DeviceTensor(leaf, owner.lives) if isinstance(owner, DeviceTensor) else leaf

    def _copies(self, name: str, args: Any, kwargs: Any, tensors: list[Any], timeline: Timeline) -> None:
        """The allocator of pinned memory keeps the source of a copy until the copy has ended."""
        for each in tensors if name in ("copy_", "_to_copy") else ():
            if isinstance(each, DeviceTensor) and each.lives.memory.pinned:
                each.lives.streams.add(timeline)

    def _host_waits(self, name: str, args: Any, kwargs: Any, tensors: list[Any]) -> bool:
        """Whether a copy is one for which CUDA makes the host wait."""
        if name not in ("copy_", "_to_copy"):
            return False
        places = [_place(self, each) for each in tensors]
        if name == "_to_copy":
            places.append("device")
        if set(places) == {"device"}:
            return False
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        return waits or "pageable" in places


def _place(mode: _Mode, tensor: torch.Tensor) -> str:
    if isinstance(tensor, DeviceTensor):
        return "pinned" if tensor.lives.memory.pinned else "device"
    memory = mode._cuda.at(tensor.data_ptr())
    return "pinned" if memory is not None and memory.pinned else "pageable"


def _to_device(tensor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.tensor`` makes its result on the host, unseen by a mode; the copy is seen."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        found = tensor(data, *args, **kwargs)
        return found.to(device) if device is not None else found

    return made


def mapped(act: Callable[[Any], Any], tree: Any) -> Any:
    """Arguments or results of an operator, each leaf replaced."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(act, each) for each in tree)
    if isinstance(tree, dict):
        return {name: mapped(act, each) for name, each in tree.items()}
    return act(tree)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves."""
    found: list[Any] = []
    mapped(found.append, tree)
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def unseen(action: Callable[[], Any]) -> Callable[[], None]:
    """Carry out again without being recorded."""

    def quiet() -> None:
        with _disable_current_modes():
            action()

    return quiet


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, DeviceTensor) else leaf


def _of(leaf: Any, made: list[DeviceTensor]) -> Any:
    return next((each for each in made if each.inner is leaf), leaf)
