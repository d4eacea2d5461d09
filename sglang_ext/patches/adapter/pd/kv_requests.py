"""Prefill's and decode's ends of one request, as SGLang's queues poll them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import (
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferDestination,
    KVTransferMetric,
)
from sglang.srt.disaggregation.common.conn import KVTransferError

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import ReceiverState, SenderState
from sglang_ext.engine.pd.landing import Wanted, pages_of
from sglang_ext.engine.pd.prompt_logprobs import MAX_BYTES, PromptLogprobs, too_large
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.patches.adapter.pd import prompt_logprobs
from sglang_ext.patches.adapter.pd.kv_manager import GlobalKVManager
from sglang_ext.patches.adapter.request_stages import request_stages
from sglang_ext.protocol.cluster import bootstrap_of_replica
from sglang_ext.stages import NO_STAGES, Handed

ABORTED = "the request was aborted on decode"
"""Why a request failed that decode's engine has given up."""

_SENDER_POLL = {
    SenderState.COMPUTING: KVPoll.WaitingForInput,
    SenderState.COMPLETE: KVPoll.Transferring,
    SenderState.OFFERED: KVPoll.Transferring,
    SenderState.WRITING: KVPoll.Transferring,
    SenderState.RELEASED: KVPoll.Success,
    SenderState.LOST: KVPoll.Failed,
}
_RECEIVER_POLL = {
    ReceiverState.JOINING: KVPoll.Bootstrapping,
    ReceiverState.WAITING: KVPoll.Bootstrapping,
    ReceiverState.READY: KVPoll.WaitingForInput,
    ReceiverState.GRANTED: KVPoll.Transferring,
    ReceiverState.READING: KVPoll.Transferring,
    # Its slots are in use until the transport has stopped, so SGLang must not take them back yet.
    ReceiverState.STOPPING: KVPoll.Transferring,
    ReceiverState.HELD: KVPoll.Success,
    ReceiverState.FAILED: KVPoll.Failed,
}


class GlobalKVSender(BaseKVSender):  # type: ignore[misc]
    """Prefill's end of one request."""

    def __init__(
        self,
        mgr: GlobalKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self._pages: list[Any] = []
        self._row: int | None = None
        self._last = False
        self._error = ""
        self.handover: SendingHandover | None = None
        self.req: Any = None
        """The request, once its KV is computed."""
        try:
            self.handover = mgr.agent.sender.open(bootstrap_room)
        except RefusedError as error:
            self._error = str(error)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._row = aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        self._last = last_chunk
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        """Pages of a chunk are computed; with the last one the request is offered, and with it the rows of
        its window or state."""
        self._pages.append(pages_of(kv_indices))
        if not self._last or self.handover is None:
            return
        assert self._row is not None
        logprobs = None if self.req is None else prompt_logprobs.of_request(self.req)
        if logprobs is not None and logprobs.nbytes > MAX_BYTES:
            self.handover.give_up(too_large(logprobs.nbytes))
            return
        self.kv_mgr.agent.sender.complete(
            self.handover,
            np.concatenate(self._pages),
            self.kv_mgr.buffers.read(self._row),
            NO_STAGES if self.req is None else request_stages(self.req),
            logprobs,
            self.kv_mgr.beside(state_indices),
        )

    def begin_again(self) -> None:
        """Discard the computed pages, none of which has been offered."""
        self._pages.clear()
        self._last = False

    def poll(self) -> int:
        if self.handover is None:
            return int(KVPoll.Failed)
        if self.handover.state is SenderState.COMPUTING and self.kv_mgr.pushes:
            # Push: prefill has to know decode's slots before it computes.
            granted = self.handover.granted() is not None
            return int(KVPoll.WaitingForInput if granted else KVPoll.Bootstrapping)
        return int(_SENDER_POLL[self.handover.state])

    def poll_pp_consensus(self) -> int:
        """The state of a request that waits to be computed. The first stage of a pipeline passes it to the
        others; a stage at which the hand-over is lost already computes the request all the same."""
        return self.poll()

    def pop_decode_prefix_len(self) -> int:
        """Tokens that decode has, which need not be sent. Pulling, decode leaves them out by itself."""
        if self.handover is None or not self.kv_mgr.pushes:
            return 0
        pages = self.handover.granted() or 0
        return int(pages * self.kv_mgr.kv_args.page_size)

    def get_transfer_metric(self) -> KVTransferMetric:
        pages = sum(len(part) for part in self._pages)
        return KVTransferMetric(transfer_total_bytes=pages * self.kv_mgr.page_bytes)

    def failure_exception(self) -> None:
        """Raise why it failed. SGLang frees the slots next, so no lease on them may be left."""
        self.clear()
        raise KVTransferError(
            self.bootstrap_room, self._error or (self.handover.reason if self.handover else "")
        )

    def clear(self) -> None:
        if self.handover is not None:
            self.kv_mgr.agent.sender.forget(self.handover)

    def abort(self) -> None:
        if self.handover is not None:
            self.handover.give_up("the request was aborted on prefill")


class GlobalKVReceiver(BaseKVReceiver):  # type: ignore[misc]
    """Decode's end of one request."""

    require_staging = False
    abort_notified = False

    def __init__(self, mgr: GlobalKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.handover: ReceivingHandover | None = None
        self._aborted = False

    def init(self, prefill_dp_rank: int) -> None:
        assert self.bootstrap_room is not None
        migration = self.kv_mgr.migration
        comes_over = migration is not None and migration.target.comes_over(self.bootstrap_room)
        address = bootstrap_of_replica(self.bootstrap_addr, prefill_dp_rank)
        self.handover = self.kv_mgr.agent.receiver.open(address, self.bootstrap_room, read=comes_over)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
    ) -> None:
        """Slots are there: read the KV after the prefix that is here already into them."""
        assert self.handover is not None
        assert aux_index is not None
        skip, rest = divmod(decode_prefix_len or 0, self.kv_mgr.kv_args.page_size)
        assert rest == 0, "a cached prefix is whole pages"
        beside = self.kv_mgr.beside(state_indices)
        wanted = Wanted(pages_of(kv_indices), skip, aux_index, self.kv_mgr.fence(), beside)
        if self.kv_mgr.store is not None:
            self.kv_mgr.store.transfer()
        self.kv_mgr.agent.receiver.read(self.handover, wanted)

    def poll(self) -> int:
        if self.handover is None:
            return int(KVPoll.Bootstrapping)
        if self.handover.state is ReceiverState.WAITING and not self.handover.read:
            # Push: decode allocates before prefill computes.
            return int(KVPoll.WaitingForInput)
        if self._aborted and self.handover.state is ReceiverState.HELD:
            # The KV came before the abort, and SGLang has not asked since.
            return int(KVPoll.Failed)
        return int(_RECEIVER_POLL[self.handover.state])

    @property
    def handed(self) -> Handed:
        """Measured stages of a request whose KV has just come."""
        handover = self.handover
        now = time.perf_counter()
        return (
            Handed(now)
            if handover is None
            else Handed(now, handover.stages, handover.waited, handover.seconds)
        )

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's log probabilities, computed by prefill for decode's answer."""
        return None if self.handover is None else self.handover.logprobs

    def failure_exception(self) -> None:
        """Raise why it failed, when nothing uses the slots any more: SGLang frees them next."""
        self.clear()
        reason = self.handover.reason if self.handover else "not started"
        raise KVTransferError(self.bootstrap_room, reason or ABORTED)

    def clear(self) -> None:
        if self.handover is not None:
            self.kv_mgr.agent.receiver.settle(self.handover)

    def abort(self) -> None:
        if self.handover is None:
            # It never began; from now on it polls as failed.
            assert self.bootstrap_room is not None
            self.handover = ReceivingHandover(
                self.bootstrap_addr, self.bootstrap_room, state=ReceiverState.FAILED, reason="aborted"
            )
            return
        self._aborted = True
        self.kv_mgr.agent.receiver.abort(self.handover, ABORTED)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """The agent notifies prefill."""
