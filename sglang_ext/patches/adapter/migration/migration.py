"""A running request goes on at another instance, with its KV (MemServe, table 3).

    router                        source                          target
    Park     ------------------>  stops it between two tokens
             <------------------  Parked: its state, and where its KV can be had
    Watch, with the state  ------------------------------------->  keeps it under a ticket
             <---------------------------------------------------  Expecting
    the request, with the ticket in its body ------------------->  takes the KV, goes on
             <---------------------------------------------------  Running
    Unpark   ------------------>  ends it, its blocks stay in the tree

Until `Unpark` the source keeps all it has: if the target dies, or takes nothing, the request goes on where it
was (``stay``), and its client has seen a pause. The target sends the answer from its beginning; the
router leaves out the part that the client has.

The KV moves by the means that each kind of instance has anyway:

    decode       the source gives it as a prefill server does (`engine/pd/prefill_sender.py`): all pages of
                 prompt and answer in a hand-over, which the target joins as if they were a prompt. It reads
                 the pages that it lacks, also where prefill pushes; nothing is computed again. The pages of a
                 window and a state come beside them.
    colocated    the source puts the whole blocks into its tree, waits for their copies in DRAM, and exports
                 them (`peers/export.py`; by name, with windows and states, `hybrid/exports.py`). The target
                 fetches them (`peers/fetches.py`, `hybrid/fetches.py`), and computes the rest: the end of the
                 last block, or all, if nothing was to be had.

Before, while the request runs, the router has its prompt fetched where there is DRAM
(``sglang_ext.router.dispatch.move_calls``).

All methods run in the scheduler's thread, on every rank between the same two passes. No method
that SGLang's loop calls raises: the request is aborted instead, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.patches.adapter.migration.moving import MovesFrom, MovingRank, Transfers
from sglang_ext.patches.adapter.migration.moving_in import MovingIn
from sglang_ext.patches.adapter.migration.moving_out import MovingOut
from sglang_ext.protocol.agent import Park, Unpark, Watch
from sglang_ext.wire import Message


class Migration:
    """See the module's docstring. Both ends, of one rank.

    Args:
        cache: the rank's, which has the scheduler.
    """

    def __init__(self, cache: MovesFrom, replies: Replies) -> None:
        self._rank = MovingRank(cache, replies)
        self.source = MovingOut(self._rank)
        self.target = MovingIn(self._rank)
        self.counts = self._rank.counts
        cache.ranks.add(self)

    def __repr__(self) -> str:
        return f"Migration(parked={len(self.source)}, arriving={len(self.target)}, {dict(self.counts)})"

    def transfer_by(self, manager: Transfers | None) -> None:
        """The server decodes from now on, with this transfer backend; or it does not any more."""
        self._rank.transfer_by(manager)

    def takes_command(self, message: Message, at: float) -> bool:
        """Carry out a command about a moved request; returns whether it was one. at: rank 0's time."""
        match message:
            case Park():
                self.source.park(message)
            case Unpark():
                self.source.unpark(message)
            case Watch():
                self.target.watch(message, at)
            case _:
                return False
        return True

    def aborted(self, rid: str, *, every: bool) -> None:
        """A client aborts the request of this name, or all."""
        self.source.aborted(rid, every=every)
        self.target.aborted(rid, every=every)

    def propose(self) -> Sequence[int]:
        """For each stopped request without a reply so far, whether DRAM has copies of its blocks here."""
        return self.source.propose()

    def act(self, agreed: Sequence[int]) -> None:
        """Once per pass."""
        if self.source:
            with self._rank.guarded():
                self.source.act(agreed)
        if self.target:
            with self._rank.guarded():
                self.target.report_running()
