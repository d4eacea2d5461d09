"""Prefill and decode apart: a request goes to one instance of each, and the answer is decode's.

Both get the same body, with where the prefill instance is asked for the KV (``bootstrap_host`` and
``bootstrap_port``) and a number that only this request has (``bootstrap_room``), as SGLang's own balancer
puts them in. What the prefill instance answers is read and thrown away; if it fails while the client has
been sent nothing, what runs at the decode instance is given up, because it would wait for the KV in vain.
After a half that answers with an error of its own (5xx) the request is tried at another pair, as after one
that dies.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from sglang_ext.router.api.validation import Json
from sglang_ext.router.fleet.facts import InstanceFacts, bootstrap_of
from sglang_ext.router.http.types import ConnectionLost, RequestRefused

BOOTSTRAP_ROOMS = 1 << 62
"""SGLang counts upwards from the bootstrap_room for the prompts of a batch, and keeps it in 63 bits."""
MAX_ERROR_BYTES = 1000
"""Of an instance's error, so much is told to the client."""


def meeting_point(prefill: str, facts: InstanceFacts | None) -> Json:
    """What tells both servers where to meet.

    Args:
        prefill: URL of the prefill instance.
        facts: what it has told of itself.
    """
    host, port = bootstrap_of(prefill, facts)
    return {
        "bootstrap_host": host,
        "bootstrap_port": port,
        "bootstrap_room": 1 + secrets.randbelow(BOOTSTRAP_ROOMS),
    }


class HalfFailed(ConnectionLost):
    """One half of a pair answered with an error of its own (5xx): another pair may serve the request.

    Whichever half is heard first, the client hears the same: the answer of another pair, or this error.

    Args:
        instance: URL of the half that failed.
        does: ``"prefills"`` or ``"decodes"``.
        status: what it answered, 500 or above.
        answer: the body of that.
    """

    def __init__(self, instance: str, does: str, status: int, answer: bytes) -> None:
        text = answer[:MAX_ERROR_BYTES].decode("utf-8", "replace")
        super().__init__(f"{instance}, which {does}, answered {status}: {text}")
        self.status = status

    def refused(self) -> RequestRefused:
        """What the client is told when no other pair was left."""
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
