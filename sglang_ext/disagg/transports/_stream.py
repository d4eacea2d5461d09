"""The data connection of `tcp`: frames, and the loops on both sides that never take the GIL.

    reader -> owner   request   int64 x 6: magic, operation, number, ranges, bytes, grant slot | grant
    number << 16
                      ranges    int64 x 3 each: region, offset, bytes
                      WRITE     the bytes of all ranges, in order
    owner -> reader   reply     int64 x 4: magic, status, number, bytes
                      READ      the bytes of all ranges, in order

Bytes go from registered memory to the socket and from the socket to registered memory by sendmsg and
recvmsg with many ranges at a time; nothing is gathered in between. A connection that gets anything
unexpected is closed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.compiled import kernel, libc

MAGIC: Final = 0x4B5658444154413A
READ: Final = 1
WRITE: Final = 2
OK: Final = 0
BAD_REQUEST: Final = 1
BAD_RANGE: Final = 2
NO_GRANT: Final = 3

MAX_RANGES: Final = 1024
"""Ranges of one request; with the header before them they are one iovec of the kernel's limit."""
MAX_BYTES: Final = 4 << 20
"""Bytes of one request. Longer runs are asked for in parts."""
WINDOW: Final = 3
"""Requests on the way at a time: the owner never waits for the next one."""

CANCELLED: Final = -1
CLOSED: Final = -2
PROTOCOL: Final = -3
REFUSED: Final = -100
"""REFUSED - status: the owner's answer."""
ERRNO: Final = -1000

_sendmsg = libc("sendmsg", "int32", "intp", "int32")
_recvmsg = libc("recvmsg", "int32", "intp", "int32")
_errno = libc("__errno_location", result="int32*")


class Scratch:
    """Working memory of the loops of one connection. Not shared between threads."""

    def __init__(self) -> None:
        self.ranges: npt.NDArray[np.int64] = np.zeros((WINDOW + 1, MAX_RANGES, 3), np.int64)
        self.head: npt.NDArray[np.int64] = np.zeros((WINDOW + 1, 6), np.int64)
        self.iov: npt.NDArray[np.int64] = np.zeros((MAX_RANGES + 2, 2), np.int64)
        self.message: npt.NDArray[np.int64] = np.zeros(7, np.int64)
        self.state: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        """Odd while a request is being served; a fence waits until it is even."""


@kernel
def _pump(fd, iov, first, count, message, receive, flag):  # type: ignore[no-untyped-def]
    """Send or receive all of iov[first:count]. 0, CANCELLED, CLOSED or ERRNO - errno."""
    i = first
    while i < count:
        if iov[i, 1] == 0:
            i += 1
            continue
        if flag[0]:
            return -1
        message[2] = iov.ctypes.data + i * 16
        message[3] = min(count - i, 1024)
        if receive:
            moved = _recvmsg(fd, message.ctypes.data, 256)  # MSG_WAITALL
        else:
            moved = _sendmsg(fd, message.ctypes.data, 16384)  # MSG_NOSIGNAL
        if moved == 0:
            return -2
        if moved < 0:
            number = _errno()[0]
            if number == 4:  # EINTR
                continue
            if flag[0]:
                return -1
            if number == 32 or number == 104:  # EPIPE, ECONNRESET
                return -2
            return -1000 - number
        while moved > 0:
            if moved >= iov[i, 1]:
                moved -= iov[i, 1]
                i += 1
            else:
                iov[i, 0] += moved
                iov[i, 1] -= moved
                moved = 0
    return 0


@kernel
def _data_iov(iov, first, ranges, count, bases):  # type: ignore[no-untyped-def]
    for k in range(count):
        iov[first + k, 0] = bases[ranges[k, 0]] + ranges[k, 1]
        iov[first + k, 1] = ranges[k, 2]
    return first + count


@kernel
def serve(fd, bases, sizes, grants, ranges, head, iov, message, state, flag):  # type: ignore[no-untyped-def]
    """Answer requests until the connection ends. Returns why: CLOSED is the usual end.

    Runs for the life of a connection without the GIL: an owner that is busy in Python serves all the same.
    """
    while True:
        iov[0, 0] = head.ctypes.data
        iov[0, 1] = 48
        code = _pump(fd, iov, 0, 1, message, True, flag)
        if code:
            return code
        magic, operation, number = head[0, 0], head[0, 1], head[0, 2]
        count, total, grant = head[0, 3], head[0, 4], head[0, 5]
        if magic != 0x4B5658444154413A or (operation != 1 and operation != 2):
            return -3
        if count < 1 or count > 1024 or total < 1 or total > 4194304:
            return -3
        iov[0, 0] = ranges.ctypes.data
        iov[0, 1] = count * 24
        code = _pump(fd, iov, 0, 1, message, True, flag)
        if code:
            return code
        status = 0
        left = total
        for k in range(count):
            r, at, n = ranges[0, k, 0], ranges[0, k, 1], ranges[0, k, 2]
            if r < 0 or r >= sizes.shape[0] or n <= 0 or at < 0 or at > sizes[r] or n > sizes[r] - at:
                status = 2
                break
            left -= n
        if status == 0 and left != 0:
            return -3
        state[0] += 1
        slot = grant & 0xFFFF
        if operation == 2 and (
            slot >= grants.shape[0] or grant < 0 or grants[slot] != grant >> 16 or grant >> 16 == 0
        ):
            status = 3
        if status:
            total = 0
        elif operation == 2:
            # A write is cut into parts so that a grant that ends stops it soon.
            code = _pump(fd, iov, 0, _data_iov(iov, 0, ranges[0], count, bases), message, True, flag)
            if code == 0 and grants[slot] != grant >> 16:
                status = 3
            total = 0
        if code == 0:
            head[1, 0], head[1, 1], head[1, 2], head[1, 3] = 0x4B5658444154413A, status, number, total
            iov[0, 0] = head.ctypes.data + 48
            iov[0, 1] = 32
            last = 1
            if operation == 1 and status == 0:
                last = _data_iov(iov, 1, ranges[0], count, bases)
            code = _pump(fd, iov, 0, last, message, False, flag)
        state[0] += 1
        if code:
            return code
        if status:
            return -100 - status


@kernel
def _next_request(runs, at, ranges, remote, barrier):  # type: ignore[no-untyped-def]
    """Fill `ranges` from (row, bytes done) `at`; returns (ranges, bytes, row, bytes done) after it.

    barrier: a row that begins a request of its own: it is served after the rows before it.
    """
    row, done = at
    count = 0
    total = 0
    while row < runs.shape[0] and count < 1024 and total < 4194304:
        if row == barrier and count and done == 0:
            break
        take = min(runs[row, 4] - done, 4194304 - total)
        column = 0 if remote else 2
        ranges[count, 0] = runs[row, column]
        ranges[count, 1] = runs[row, column + 1] + done
        ranges[count, 2] = take
        count += 1
        total += take
        done += take
        if done == runs[row, 4]:
            row += 1
            done = 0
    return count, total, row, done


@kernel
def read(fd, runs, barrier, bases, ranges, head, iov, message, flag):  # type: ignore[no-untyped-def]
    """Ask for all runs, WINDOW requests ahead, and receive them in place. Rows from `barrier` on are loaded
    after those before it: the owner answers one request after the other.
    """
    ask = (0, 0)
    take = (0, 0)
    asked = 0
    taken = 0
    while take[0] < runs.shape[0]:
        while asked - taken < 3 and ask[0] < runs.shape[0]:
            count, total, row, done = _next_request(runs, ask, ranges[0], True, barrier)
            ask = (row, done)
            head[0, 0], head[0, 1], head[0, 2] = 0x4B5658444154413A, 1, asked
            head[0, 3], head[0, 4], head[0, 5] = count, total, 0
            iov[0, 0], iov[0, 1] = head.ctypes.data, 48
            iov[1, 0], iov[1, 1] = ranges.ctypes.data, count * 24
            code = _pump(fd, iov, 0, 2, message, False, flag)
            if code:
                return code
            asked += 1
        iov[0, 0], iov[0, 1] = head.ctypes.data + 48, 32
        code = _pump(fd, iov, 0, 1, message, True, flag)
        if code:
            return code
        if head[1, 0] != 0x4B5658444154413A:
            return -3
        if head[1, 1] != 0:
            return -100 - head[1, 1] if 0 < head[1, 1] < 100 else -3
        count, total, row, done = _next_request(runs, take, ranges[1], False, barrier)
        take = (row, done)
        if head[1, 2] != taken or head[1, 3] != total:
            return -3
        code = _pump(fd, iov, 0, _data_iov(iov, 0, ranges[1], count, bases), message, True, flag)
        if code:
            return code
        taken += 1
    return 0


@kernel
def write(fd, runs, bases, grant, ranges, head, iov, message, flag):  # type: ignore[no-untyped-def]
    """Send all runs, one request ahead of its acknowledgement."""
    at = (0, 0)
    sent = 0
    acknowledged = 0
    while at[0] < runs.shape[0] or acknowledged < sent:
        if at[0] < runs.shape[0]:
            _next_request(runs, at, ranges[1], False, -1)
            count, total, row, done = _next_request(runs, at, ranges[0], True, -1)
            at = (row, done)
            head[0, 0], head[0, 1], head[0, 2] = 0x4B5658444154413A, 2, sent
            head[0, 3], head[0, 4], head[0, 5] = count, total, grant
            iov[0, 0], iov[0, 1] = head.ctypes.data, 48
            iov[1, 0], iov[1, 1] = ranges.ctypes.data, count * 24
            last = _data_iov(iov, 2, ranges[1], count, bases)
            code = _pump(fd, iov, 0, last, message, False, flag)
            if code:
                return code
            sent += 1
        if sent - acknowledged > 1 or at[0] >= runs.shape[0]:
            iov[0, 0], iov[0, 1] = head.ctypes.data + 48, 32
            code = _pump(fd, iov, 0, 1, message, True, flag)
            if code:
                return code
            if head[1, 0] != 0x4B5658444154413A or head[1, 2] != acknowledged:
                return -3
            if head[1, 1] != 0:
                return -100 - head[1, 1] if 0 < head[1, 1] < 100 else -3
            acknowledged += 1
    return 0


def warm() -> None:
    """Load the compiled loops, or compile them where they are not cached: not while a peer waits."""
    s = Scratch()
    none = np.zeros((0, 5), np.int64)
    zero = np.zeros(1, np.int64)
    loops = (s.ranges, s.head, s.iov, s.message)
    serve(-1, zero, zero, zero, *loops, s.state, zero)
    read(-1, none, 0, zero, *loops, zero)
    write(-1, none, zero, 0, *loops, zero)
