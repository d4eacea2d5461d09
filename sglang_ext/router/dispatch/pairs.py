"""Prefill-decode disaggregation: a request goes to one instance of each role, and the answer is decode's.

Both get the same body. It has the address at which decode requests the KV from prefill (``bootstrap_host``
and ``bootstrap_port``) and a number that is unique to this request (``bootstrap_room``), as SGLang's own
balancer sets them. The prefill instance's answer is read and discarded. If prefill fails before the client
got anything, the request at the decode instance is aborted, because its KV would never arrive. After an
error of either instance (5xx), or the death of one, another pair is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from sglang_ext.ids import NewId, random_id
from sglang_ext.protocol.cluster import dp_rank_of
from sglang_ext.router.api.validation import Json
from sglang_ext.router.fleet.facts import InstanceFacts, bootstrap_of
from sglang_ext.router.http.types import ConnectionLost, RequestRefused

BOOTSTRAP_ROOMS = 1 << 62
"""SGLang counts upwards from the bootstrap_room for the prompts of a batch, and keeps it in 63 bits."""
MAX_ERROR_BYTES = 1000
"""Most bytes of an instance's error that the client gets."""


def meeting_point(prefill: str, facts: InstanceFacts | None, new_id: NewId = random_id) -> Json:
    """The fields by which both servers find each other.

    Args:
        prefill: URL of the prefill instance.
        new_id: the room is made of its id.
    """
    host, port = bootstrap_of(prefill, facts)
    rank = dp_rank_of(prefill)
    return ({} if rank is None else {"disagg_prefill_dp_rank": rank}) | {
        "bootstrap_host": host,
        "bootstrap_port": port,
        "bootstrap_room": 1 + int(new_id(), 16) % BOOTSTRAP_ROOMS,
    }


class HalfFailed(ConnectionLost):
    """One half of a pair answered with an error of its own (5xx): another pair may serve the request.

    The client gets the same, whichever half answers first: the answer of another pair, or this error.

    Args:
        instance: URL of the half that failed.
        does: ``"prefills"`` or ``"decodes"``.
        status: of its answer, 500 or above.
        answer: the body of that.
    """

    def __init__(self, instance: str, does: str, status: int, answer: bytes) -> None:
        text = answer[:MAX_ERROR_BYTES].decode("utf-8", "replace")
        super().__init__(f"{instance}, which {does}, answered {status}: {text}")
        self.status = status

    def refused(self) -> RequestRefused:
        """The error for the client when no other pair is left."""
        return RequestRefused(self.message, status=self.status, kind="server_error", code="pair_failed")


@asynccontextmanager
async def beside(
    half: Callable[[], Awaitable[None]], may_interrupt: Callable[[], bool]
) -> AsyncIterator[None]:
    """Run ``half`` beside the block; end it with the block.

    Args:
        half: the other half of the request.
        may_interrupt: whether the block may still be given up when ``half`` fails.

    Raises:
        Exception: ``half`` raised it before the block had ended, and ``may_interrupt`` allowed it.
    """
    block = asyncio.current_task()
    if block is None:
        raise ConnectionLost("not in a task")
    before = block.cancelling()
    task = asyncio.ensure_future(half())
    failed: list[BaseException] = []
    is_over = False

    def ended(task: asyncio.Future[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None or is_over or not may_interrupt():
            return
        failed.append(error)
        block.cancel()

    task.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if failed and block.uncancel() <= before:
            raise failed[0] from None
        raise
    finally:
        is_over = True  # removing the callback would not do: it may be on its way already
        task.cancel()
        await _wait(task, block, before, interrupted=bool(failed))


async def run_beside(
    half: Callable[[], Awaitable[None]],
    block: Callable[[], Awaitable[None]],
    may_interrupt: Callable[[], bool],
) -> None:
    """Like ``beside``, with the block as a function. Compiled modules cannot leave an ``async with`` by an
    exception: they must not await while they handle one.
    """
    async with beside(half, may_interrupt):
        await block()


async def _wait(
    task: asyncio.Future[None], block: asyncio.Task[object], before: int, *, interrupted: bool
) -> None:
    """Wait for a task that was cancelled. An interruption that comes too late is taken back."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        if not interrupted or block.cancelling() <= before or block.uncancel() > before:
            raise
        await asyncio.wait({task})
