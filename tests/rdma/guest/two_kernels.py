"""One of two guests, whose kernels share nothing: ``python3 two_kernels.py owner|reader``.

It reports on the console, in lines of ``@@SAYS`` and words; the test answers on the second serial port.
"""

import os
import sys
import time
from multiprocessing.connection import Client, Connection, Listener

import numpy as np

from sglang_ext.disagg.errors import TransferError
from sglang_ext.disagg.generations import HEADER_BYTES, header
from sglang_ext.disagg.memory import RegionTable, SharedMemory
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.connecting import offers_of, open_first
from sglang_ext.disagg.transfer.control import CurveKeys
from sglang_ext.disagg.transfer.verify import header_runs
from sglang_ext.disagg.transports import CancelToken, Channel, PeerInfo, Served, TransportName, host_identity
from sglang_ext.disagg.transports.select import make_transports
from sglang_ext.disagg.transports.verbs import VerbsTransport

OWNER, READER, PORT = "10.9.0.1", "10.9.0.2", 5000
SIZE = 4 << 20
ALL = np.array([(0, 0, 0, 0, SIZE)], np.int64)
TEST = open("/dev/ttyS1", encoding="ascii")  # noqa: SIM115


def say(*words: object) -> None:
    print("@@SAYS", *words, flush=True)


def wait_for(word: str) -> None:
    """Wait until the test has done its part, and sends this word."""
    while TEST.readline().strip() != word:
        pass


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


class Side:
    """One end's memory and its verbs."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.regions = memory, RegionTable()
        self.regions.add(memory.ctypes.data, memory.nbytes, keep=memory)
        self.transport = VerbsTransport(self.regions)

    def serve(self, wire: Connection) -> Served:
        answer, served = self.transport.accept(b"s" * 16, wire.recv(), np.zeros(4, np.int64))
        wire.send((answer, self.regions.metas()))
        return served

    def reach(self, wire: Connection) -> Channel:
        offer = self.transport.offer()
        wire.send(offer)
        answer, metas = wire.recv()
        peer = PeerInfo("owner", b"e" * 16, "", OWNER, 1, metas)
        return self.transport.open(peer, b"s" * 16, offer, answer)


# -- which transport -----------------------------------------------------------------------------------------


def meet(wire: Connection, host: str, peer: str, first: bool) -> None:
    """Each reads the other's memory as servers do when they connect: by the first transport that can."""
    epoch = os.urandom(16)
    memory, regions = SharedMemory(2 * HEADER_BYTES, "two"), RegionTable()
    memory.array[:HEADER_BYTES] = np.frombuffer(header(epoch), np.uint8)
    regions.add(memory.address, memory.nbytes, fd=memory.fd, keep=memory)
    keys = CurveKeys(b"-" * 40, b"-" * 40)  # beyond loopback no endpoint may be without
    transports = make_transports(EndpointConfig("two", "kernels", bind=host, keys=keys), regions)
    wire.send((host_identity(), os.getpid(), epoch, regions.metas()))
    other_host, other_pid, other_epoch, metas = wire.recv()
    say("identity", other_host == host_identity(), "pid", other_pid == os.getpid())

    def read(channel: Channel) -> bytes:
        channel.read(0, header_runs(HEADER_BYTES), CancelToken())
        return memory.array[HEADER_BYTES:].tobytes()

    served: list[Served] = []
    for turn in (first, not first):
        if turn:
            offers, reasons = offers_of(transports)
            wire.send(offers)
            answers, refused = wire.recv()
            info = PeerInfo("peer", other_epoch, other_host, peer, other_pid, metas)
            reasons |= refused
            channel = open_first(transports, info, b"s" * 16, offers, answers, reasons, read)
            chosen = channel.name if channel is not None else ""
            better = list(TransportName)[: list(TransportName).index(chosen)] if chosen else []
            say("chosen", chosen, {str(name): reasons[name] for name in better if name in reasons})
            if channel is not None:
                channel.close()
        else:
            answers, refused = {}, {}
            for name, offer in wire.recv().items():
                try:
                    answers[name], serving = transports[name].accept(
                        b"s" * 16, offer, np.zeros(1, np.int64)
                    )  # fmt: skip
                    served.append(serving)
                except TransferError as error:
                    refused[name] = str(error)
            wire.send((answers, refused))
    wire.send("done")
    wire.recv()
    for each in [*served, *transports.values()]:
        each.close()
    memory.close()


# -- what happens in the middle of a read, and of a write ---------------------------------------------------


def read_until_gone(channel: Channel, side: Side, seed: int) -> None:
    expected, count = content(seed), 0
    while True:
        side.memory[:] = 0
        begun = time.monotonic()
        try:
            channel.read(0, ALL, CancelToken())
        except TransferError as error:
            say("gone", type(error).__name__, f"{time.monotonic() - begun:.1f} s", channel.broken)
            return
        assert np.array_equal(side.memory, expected)
        count += 1
        if count == 2:
            say("reading")


def reader() -> None:
    while True:
        try:
            wire = Client((OWNER, PORT))
            break
        except OSError:  # it is not up yet
            time.sleep(0.1)
    meet(wire, READER, OWNER, first=True)

    # A partition in the middle of a READ.
    side, again = Side(np.zeros(SIZE, np.uint8)), Side(np.zeros(SIZE, np.uint8))
    channel = side.reach(wire)
    read_until_gone(channel, side, 1)
    kept = side.memory.copy()
    say("heal")
    wait_for("healed")
    fresh = again.reach(wire)
    fresh.read(0, ALL, CancelToken())
    say("again", np.array_equal(again.memory, content(1)), "untouched", np.array_equal(side.memory, kept))

    # The owner fences two writers: the first is connected, the cable of the second is cut.
    for _ in range(2):
        writer = Side(np.zeros(SIZE, np.uint8))
        writing = writer.reach(wire)
        try:
            for number in range(1 << 30):
                writer.memory[:] = number % 251
                writing.write(0, ALL, CancelToken(), (0, 0))
        except TransferError as error:
            say("fenced", type(error).__name__)
        wire.send("gone")

    # The owner's whole machine goes in the middle of a READ.
    last = Side(np.zeros(SIZE, np.uint8))
    read_until_gone(last.reach(wire), last, 1)


def owner() -> None:
    with Listener((OWNER, PORT)) as listener:
        wire = listener.accept()
    meet(wire, OWNER, READER, first=False)
    side = Side(content(1))
    kept = [side.serve(wire), side.serve(wire)]

    for cut in (False, True):
        target = Side(np.full(SIZE, 255, np.uint8))
        served = target.serve(wire)
        while target.memory.max() == 255:  # the first write
            time.sleep(0.01)
        before = target.memory.copy()
        while np.array_equal(target.memory, before):  # the twin: it goes on, until the owner fences it
            time.sleep(0.01)
        if cut:
            say("cut")
            wait_for("cut")
        barred = served.fence()
        before = target.memory.copy()
        if cut:
            say("heal")
            wait_for("healed")
        wire.recv()  # the writer has seen it
        say("barred", barred, "unchanged", np.array_equal(target.memory, before))

    kept.append(side.serve(wire))
    wait_for("never")  # this machine ends


{"owner": owner, "reader": reader}[sys.argv[1]]()
