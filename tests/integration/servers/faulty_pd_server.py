"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose hand-overs can be stopped and damaged.

Files in its folder (`hooked_server`) switch faults on. `hooked_server.holding` has hand-overs wait at one of
``STEPS``. On a prefill server ``reading`` is the read of a return, and ``layers`` the forward pass, when the
first layer has been sent (push by layer). ``generating`` holds a decode server's requests from their first
``HELD_TOKENS`` tokens on: its scheduler goes on and obeys, but runs no batch. With a file ``damage``, one bit
of the last page that was read is inverted before the KV is reported to SGLang. With a file
``zero-POOL``, the last block that was read into a pool beside it is filled with zeros; with ``zero-draft``,
the draft model's part of every page that was read, of a model with windows or states, and with ``zero-hbm``
all of these pages. With ``zero-returned``, the blocks that come back to prefill by name are filled with
zeros. With a file
``damage-kept``, one bit of the last page that was computed or read is inverted when the server changes its
role. With a file
``no-layers``, no layer is sent ahead of the others (push by layer). With a file ``damage-logprobs``, one bit
of the log probabilities of a prompt is inverted when they come to decode. With a file ``late-abort``, an
abort does not end a request whose KV has come. With a file ``slow``, each pass of the scheduler takes longer,
so that requests run for a while.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from hooked_server import change_spawned, is_held, serve
from huge_values import make_last_huge

STEPS = (
    *("joining", "waiting", "ready", "reading", "held", "granted", "layers", "writing", "computed"),
    "generating",
)
SLOW_PASS_SECONDS = 0.05
HELD_TOKENS = 4


def make_faulty(folder: Path) -> None:
    """Disturb the hand-overs of this process."""
    from sglang.srt.managers.schedule_batch import NextBatchPlan
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_ext.disagg.transfer.instance import Instance
    from sglang_ext.engine.cache.listeners import Listeners
    from sglang_ext.engine.hybrid.fetches import NamedFetches
    from sglang_ext.engine.pd.granting import Granting
    from sglang_ext.engine.pd.landing import Landing
    from sglang_ext.engine.pd.peers import PrefillPeer, PrefillPeers
    from sglang_ext.engine.pd.prefill_sender import PrefillSender
    from sglang_ext.engine.pd.pushing import LayerFeed, Writing
    from sglang_ext.engine.pd.reading import Reading
    from sglang_ext.patches.adapter.pd.kv_requests import GlobalKVReceiver, GlobalKVSender
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

    async def gate(step: str) -> None:
        while is_held(folder, step):  # noqa: ASYNC110 - the test is another process
            await asyncio.sleep(0.02)

    def held(step: str, function: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await gate(step)
            return await function(*args, **kwargs)

        return call

    PrefillPeers.get = held("joining", PrefillPeers.get)  # type: ignore[method-assign]
    PrefillPeer.join = held("waiting", PrefillPeer.join)  # type: ignore[method-assign]
    PrefillPeer.push = held("granted", PrefillPeer.push)  # type: ignore[method-assign]
    Instance.finish = held("reading", Instance.finish)  # type: ignore[method-assign]
    Writing.finish = held("writing", Writing.finish)  # type: ignore[method-assign]

    layer_begins = LayerFeed.layer_begins

    def held_layer(self: LayerFeed, layer: int) -> None:
        layer_begins(self, layer)
        while self._now and layer == self._first + 1 and is_held(folder, "layers"):
            time.sleep(0.02)

    send_layers = LayerFeed._send

    def send_unless_told(self: LayerFeed, computing: Any, layers: range) -> None:
        if not (folder / "no-layers").exists():
            send_layers(self, computing, layers)

    LayerFeed.layer_begins = held_layer  # type: ignore[method-assign]
    LayerFeed._send = send_unless_told  # type: ignore[method-assign]

    send, poll = GlobalKVSender.poll, GlobalKVReceiver.poll

    def sender_poll(self: GlobalKVSender) -> int:
        found = send(self)
        if found == 3:
            is_held(folder, "computed")
        return found

    def generates(receiver: GlobalKVReceiver) -> bool:
        """Whether a request generates tokens; a request that fills the prefix of several samples does not."""
        from sglang_ext.patches.process import PROCESS

        queue = PROCESS.scheduler.disagg_decode_transfer_queue.queue
        return any(each.kv_receiver is receiver and each.req.sampling_params.max_new_tokens for each in queue)

    abort = GlobalKVReceiver.abort

    def receiver_abort(self: GlobalKVReceiver) -> None:
        abort(self)
        self._aborted &= not (folder / "late-abort").exists()

    def receiver_poll(self: GlobalKVReceiver) -> int:
        found = poll(self)
        if found == 2 and is_held(folder, "ready"):
            # To SGLang the request is not ready yet, so nothing is allocated.
            return 1
        if found == 4 and generates(self) and is_held(folder, "held"):
            # The KV has arrived; SGLang does not learn it yet.
            return 3
        return found

    GlobalKVSender.poll = sender_poll  # type: ignore[method-assign]
    GlobalKVReceiver.poll = receiver_poll  # type: ignore[method-assign]
    GlobalKVReceiver.abort = receiver_abort  # type: ignore[method-assign]

    read, let_write = Reading.receive, Granting.receive

    async def read_and_damage(self: Reading, handover: Any, *args: Any) -> None:
        await read(self, handover, *args)
        damage(handover)

    async def let_write_and_damage(self: Granting, handover: Any, *args: Any) -> None:
        await let_write(self, handover, *args)
        damage(handover)

    keep = Landing.keep

    def keep_damaged(self: Landing, wanted: Any, ready: Any) -> Any:
        if ready.logprobs is not None and (folder / "damage-logprobs").exists():
            ready = with_damaged_logprobs(ready)
        return keep(self, wanted, ready)

    Landing.keep = keep_damaged  # type: ignore[method-assign]

    kept: list[int] = []

    def damage(handover: Any) -> None:
        if not handover.wanted.pages.size:
            return
        kept[:] = [int(handover.wanted.pages[-1])]
        if (folder / "damage").exists():
            flip(*kept)
        if (folder / "zero-hbm").exists():
            for page in handover.wanted.pages:
                zero("hbm", int(page))
        for each in handover.wanted.beside:
            if (folder / f"zero-{each.pool}").exists():
                zero(each.pool, int(each.rows[-1]))
        if (folder / "zero-draft").exists():
            for page in handover.wanted.pages:
                zero("hbm", int(page), of_draft=True)

    complete, role_changed = PrefillSender.complete, Listeners.role_changed

    def complete_and_note(self: PrefillSender, handover: Any, pages: Any, *args: Any, **kwargs: Any) -> None:
        if pages.size:  # A push has none where decode has all of the prompt's.
            kept[:] = [int(pages[-1])]
        complete(self, handover, pages, *args, **kwargs)

    def damage_kept(self: Listeners, role: str) -> None:
        if (folder / "damage-kept").exists():
            flip(*kept)
        role_changed(self, role)

    PrefillSender.complete = complete_and_note  # type: ignore[assignment,method-assign]
    Listeners.role_changed = damage_kept  # type: ignore[method-assign]

    def flip(page: int) -> None:
        from sglang_ext.patches.process import PROCESS

        scheduler = PROCESS.scheduler
        allocator = scheduler.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        values = (pool.v_buffer if hasattr(pool, "v_buffer") else pool.kv_buffer)[-1]  # latents have one
        make_last_huge(values[page * allocator.page_size].view(-1).numpy())

    def zero(pool: str, block: int, *, of_draft: bool = False) -> None:
        from sglang_ext.patches.process import PROCESS

        component = PROCESS.manager._components[pool]
        layers = component.planes_by_layer
        if of_draft:
            layers = layers[-sum(runner.token_to_kv_pool.layer_num for runner in PROCESS.drafts) :]
        for plane in (plane for layer in layers for plane in layer):
            plane[block * component.block_rows : (block + 1) * component.block_rows] = 0

    ended = NamedFetches.ended

    def ended_and_zeroed(self: NamedFetches, move: Any, *args: Any) -> None:
        parts = list(move.parts)
        ended(self, move, *args)
        if (folder / "zero-returned").exists():
            for each in parts:
                each.part.memory.arena.blocks[each.ids] = 0

    NamedFetches.ended = ended_and_zeroed  # type: ignore[method-assign]

    next_batch = Scheduler.get_next_disagg_decode_batch_to_run

    def next_batch_unless_held(self: Any, running_batch: Any) -> Any:
        has_generated = any(len(req.output_ids) >= HELD_TOKENS for req in running_batch.reqs)
        if has_generated and is_held(folder, "generating"):
            # SGLang waits like this when memory is short: its next pass asks again.
            time.sleep(0.005)
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return next_batch(self, running_batch)

    Scheduler.get_next_disagg_decode_batch_to_run = next_batch_unless_held

    events = GlobalRadixCache.check_hicache_events

    def each_pass(self: GlobalRadixCache) -> None:
        if (folder / "slow").exists():
            time.sleep(SLOW_PASS_SECONDS)
        events(self)

    GlobalRadixCache.check_hicache_events = each_pass  # type: ignore[method-assign]
    Reading.receive = read_and_damage  # type: ignore[assignment,method-assign]
    Granting.receive = let_write_and_damage  # type: ignore[assignment,method-assign]


def with_damaged_logprobs(ready: Any) -> Any:
    """A message from prefill, with another log probability of the prompt's middle token."""
    from msgspec.structs import replace

    tokens = ready.logprobs.tokens
    values = bytearray(tokens.values)
    # The highest bit of the exponent of a float32.
    values[len(values) // 8 * 4 + 3] ^= 0x40
    damaged = replace(ready.logprobs, tokens=replace(tokens, values=bytes(values)))
    return replace(ready, logprobs=damaged)


if __name__ == "__main__":
    serve(make_faulty)
elif __name__ == "__mp_main__":
    change_spawned(make_faulty)
