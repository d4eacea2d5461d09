"""A command of ours as one of SGLang's requests: from rank 0 to the schedulers of all ranks, and there."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol

from sglang.srt.managers.io_struct import BaseReq

from sglang_ext.engine.cache.listeners import Listeners
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.pd.messages import RANK_COMMANDS, RankCommand
from sglang_ext.engine.planners import Planner
from sglang_ext.patches.adapter.migration.migration import Migration
from sglang_ext.wire import WireError

logger = logging.getLogger(__name__)


class KvCommand(BaseReq, kw_only=True, tag=True):  # type: ignore[misc, call-arg]
    """See `sglang_ext.engine.commands.Command`. SGLang encodes and broadcasts it."""

    payload: bytes
    at: float = 0.0


class TakesCommands(Protocol):
    """The cache, as commands need it."""

    planners: Sequence[Planner]
    listeners: Listeners
    command_queue: RankCommandQueue | None

    @property
    def alarm(self) -> float: ...

    def expire(self, now: float) -> None: ...


class RankCommands:
    """Carries out commands, on every rank between the same two passes.

    Args:
        cache: has the planners and listeners that take commands.
        migration: takes those about moved requests; None where none are moved.
    """

    def __init__(self, cache: TakesCommands, migration: Migration | None = None) -> None:
        self._cache = cache
        self._migration = migration

    def handle(self, payload: bytes, at: float) -> None:
        """Carry out a command.

        Args:
            payload: one of ``RANK_COMMANDS``; empty where only the time is sent.
            at: rank 0's time, by which everything expires.
        """
        if self._migration is not None:
            self._migration.target.tickets.expire(at)
        self._cache.expire(at)
        if payload:
            try:
                self._carry_out(RANK_COMMANDS.decode(payload), at)
            except WireError as error:
                logger.warning("ignored a command for the KV cache: %s", error)
        self.broadcast_time()

    def _carry_out(self, message: RankCommand, at: float) -> None:
        if self._cache.listeners.takes_command(message):
            return
        if self._migration is not None and self._migration.takes_command(message, at):
            return
        for planner in self._cache.planners:
            if planner.takes_command(message, at):
                return

    def broadcast_time(self) -> None:
        """Have rank 0 broadcast its time when something is to expire, or becomes due."""
        if self._cache.command_queue is not None:
            migration = self._migration
            next_expiry = math.inf if migration is None else migration.target.tickets.next_expiry
            self._cache.command_queue.broadcast_time_at(min(next_expiry, self._cache.alarm))
