"""The index: how much of a prompt each instance holds, by tier. Reported by the instances, or inferred.

    instance                  source                                             trusted
    ------------------------  -------------------------------------------------  ----------------------------
    with an agent             a replica of the agent's reports                   while the agent is alive and
                              (`radix_global.sync.replica`), one tree per role   no report is missing
    stock SGLang with         a replica of its KV events (`stock_replica`),      while no event is missing;
    KV events                 in the same tree                                   a partial replica is combined
                                                                                 with inferred prefixes
    any other SGLang          inferred from responses (`prompt_trees`)           always, as an approximation

Until the first snapshot of a reporting instance has arrived, or the wait for it has timed out, the instance
is *awaited*: the index uses its reports so far, and the instance may hold more.

Guesses, made when a request is routed, apply to all instances and live 2 s. Prompts that the router cannot
map to the engine's tokens and namespaces (prompts matched by text; adapters, whose engine ids the router
lacks) are inferred, never reported. Of prompts with pictures, the tokens before the first one are reported.

Memory is bounded over the whole index. Above the bound, the index drops the coldest ends of prefixes of the
instance with the most blocks, then names of its blocks below memory. The index of that instance is *partial*
then: it shows less than the instance holds, never more.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from sglang_ext.clock import Clock
from sglang_ext.keys import Namespace, block_keys, tenant_salt
from sglang_ext.protocol.agent import (
    Events,
    NamesRemoved,
    Naming,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotPart,
)
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.radix_global.edges import ends, walk
from sglang_ext.radix_global.sync.events import Tenant
from sglang_ext.radix_global.sync.replica import Outcome, Replica, State
from sglang_ext.radix_global.sync.runs import Piece, names_in
from sglang_ext.router.index.history import Departure, History
from sglang_ext.router.index.memory import TreeSize
from sglang_ext.router.index.page_names import PageNames
from sglang_ext.router.index.prompt_trees import BEGINNING, MANY_CHILDREN, SLICE_BLOCKS, PromptTrees
from sglang_ext.router.index.stock_replica import StockReplica
from sglang_ext.router.policies import Match
from sglang_ext.router.policies.base import Role
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.tiers import Tier, nearest_in

R = TypeVar("R", Replica, StockReplica)
IndexMessage = Events | SnapshotBegin | SnapshotPart | SnapshotEnd
HISTORY_SHARE: Final = 16
"""The history takes at most this part of the memory."""
BELIEVED_SHARE: Final = 8
"""At least this part of the memory is left for inferred prefixes, including guesses."""
STOCK_SHARE: Final = 4
"""Names of stock instances' pages take at most this part."""
GIVE_UP_BLOCKS: Final = 256
WAIT_S: Final = 15.0
MODES: Final = ("auto", "exact", "approximate")
_TRUE: Final = (State.LIVE, State.FILLING)
_HBM: Final = Tier.HBM.bit
_NamesOf: TypeAlias = dict[Naming, list[bytes] | PageNames]


@dataclass(eq=False, slots=True)
class _Known:
    """An instance that reports its cache."""

    replica: Replica | StockReplica
    role: Role
    alive: bool = False
    size_bytes: int = 0
    """Estimated memory of the replica at its last change."""
    complete: bool = False
    """The replica of a stock instance is complete."""
    mixed: set[str | None] = field(default_factory=set)
    """Salts with prompts that a stock instance's events do not distinguish from others under that salt."""

    def covers(self, tenant: Tenant) -> bool:
        """Whether the replica distinguishes the tenant's prompts from those of other tenants."""
        return isinstance(self.replica, Replica) or (tenant[0] is None and tenant[1] not in self.mixed)

    @property
    def is_plain(self) -> bool:
        """Whether it is not ``_RoleTree.odd``."""
        replica = self.replica
        return (
            isinstance(replica, Replica) and self.alive and replica.state is State.LIVE and not replica.named
        )


class _RoleTree:
    """The tree of the instances of one role, and the holders to be removed from it."""

    def __init__(self, block_size: int, clock: Clock) -> None:
        self.tree = RadixTree(block_size, clock=clock.monotonic)
        self.size = TreeSize(self.tree)
        self.dead: deque[Holder] = deque()
        self.live: dict[Holder, _Known] = {}
        self.odd: set[Holder] = set()
        """Holders in the tree that are not as almost all are: alive, their reports complete and up to date,
        and nothing named below memory. A popular beginning has up to a thousand holders that are."""
        self.name_tellers: dict[Holder, _Known] = {}
        """Instances that report names of blocks below memory; may include former ones."""

    def drop(self, holder: Holder) -> None:
        """A holder does not stand for an instance any more, and has nothing in the tree."""
        self.live.pop(holder, None)
        self.name_tellers.pop(holder, None)
        self.odd.discard(holder)

    def abandon(self, holder: Holder) -> None:
        """A holder does not stand for an instance any more; it is to be removed from the tree."""
        self.drop(holder)
        self.odd.add(holder)
        self.dead.append(holder)

    def note(self, known: _Known) -> None:
        """An instance has changed."""
        replica = known.replica
        holder = replica.holder
        if replica.named:
            self.name_tellers[holder] = known
        else:
            self.name_tellers.pop(holder, None)
        if known.is_plain:
            self.odd.discard(holder)
        else:
            self.odd.add(holder)


class Index(PromptTrees):
    """See the module's docstring. Names of instances are the fleet's. Lives on the event loop's thread.

    Args:
        clock: seconds.
        block_size: tokens per block, the same as at the instances.
        ttl_s: seconds after which an inferred prefix expires.
        max_bytes: estimated memory of the whole index.
        mode: ``auto``; ``exact``: instances without an agent count as empty; ``approximate``: reports of
            agents are ignored.
        wait_s: how long an instance without any report is awaited.
        history: remember which blocks left which tiers, for `history`.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        block_size: int = 16,
        ttl_s: float = 600.0,
        max_bytes: int = 1 << 28,
        mode: str = "auto",
        wait_s: float = WAIT_S,
        history: bool = True,
    ) -> None:
        super().__init__(clock, block_size=block_size, ttl_s=ttl_s, max_bytes=max_bytes)
        self.mode = mode
        self._trees = {role: _RoleTree(block_size, clock) for role in Role}
        self._known: dict[str, _Known] = {}
        self._replica_bytes = 0
        """Sum of ``_Known.size_bytes`` over all replicas."""
        self._stock: set[str] = set()
        """Instances with a KV event subscription: their replicas change without a call of ``_changed``."""
        self._wait_s = wait_s
        self._awaited: dict[str, float] = {}
        """Instance whose initial snapshot has not arrived -> end of the wait for it; ``monotonic``."""
        self._numbers = itertools.count()
        self._past = History(max_bytes // HISTORY_SHARE if history else 0, self._tree.block_bytes)
        self._remembers = history
        self.given_up_blocks = 0
        """Held blocks that the index dropped for lack of memory, since the start."""

    def measure(self, metrics: RouterMetrics) -> None:
        super().measure(metrics)
        blocks = metrics.gauge("index_blocks")
        partial = metrics.gauge("index_partial")

        def refresh() -> None:
            blocks.clear()
            partial.clear()
            for name, known in self._known.items():
                blocks.labels(name, "memory").set(known.replica.blocks)
                for tier, names in known.replica.named.items():
                    blocks.labels(name, tier.name).set(len(names))
                partial.labels(name).set(known.replica.partial)

        metrics.refreshing.subscribe(refresh)

    # -- instances that report --------------------------------------------------------------------

    def attach(self, name: str, role: Role) -> None:
        """Begin a replica of an instance with an agent. Its inferred prefixes are dropped."""
        known = self._known.get(name)
        if known is not None and known.role is role and isinstance(known.replica, Replica):
            return
        self._make(name, role, Replica)
        super().forget(name)

    def attach_stock(self, name: str, role: Role) -> StockReplica:
        """Begin a replica of a stock instance that publishes KV events, and drop its former replica. While
        the new one is partial, inferred prefixes are used, too."""
        return self._make(name, role, StockReplica)

    def _make(self, name: str, role: Role, kind: type[R]) -> R:
        self.detach(name)
        place = self._trees[role]

        def left(node: Node, blocks: int, left: int, kept: int) -> None:
            self._past.left(name, self._clock.wall(), node, blocks, left, kept)

        replica = kind(
            place.tree,
            name,
            serial=self._numbers,
            abandon=place.abandon,
            left=left if self._remembers else None,
        )
        self._known[name] = known = _Known(replica, role)
        place.note(known)
        if isinstance(replica, StockReplica):
            self._stock.add(name)
        self._dirty.add(name)
        return replica

    def expect(self, name: str) -> None:
        """Await the snapshot of an instance that reports or soon will."""
        known = self._known.get(name)
        if self.mode != "approximate" and (known is None or not self._is_trusted(known)):
            self._awaited[name] = self._clock.monotonic() + self._wait_s
            self._dirty.add(name)

    def awaited(self, name: str) -> bool:
        """Whether an instance's first snapshot is still expected, or a snapshot is arriving."""
        if self.mode == "approximate":
            return False
        known = self._known.get(name)
        state = known.replica.state if known is not None and known.alive else None
        if state is State.FILLING:
            return True
        until = self._awaited.get(name)
        if until is None or state is State.LIVE:
            return False
        if self._clock.monotonic() < until:
            return True
        del self._awaited[name]
        self._dirty.add(name)
        return False

    def detach(self, name: str) -> None:
        """Drop the replica of an instance that has no agent any more, or is gone."""
        self._awaited.pop(name, None)
        self._stock.discard(name)
        self._dirty.add(name)
        known = self._known.pop(name, None)
        if known is not None:
            self._replica_bytes -= known.size_bytes
            known.replica.forget()
            self._trees[known.role].drop(known.replica.holder)

    def replica(self, name: str) -> Replica | None:
        """The replica of an instance's agent; ``None`` without an agent."""
        known = self._known.get(name)
        return known.replica if known is not None and isinstance(known.replica, Replica) else None

    def stock(self, name: str) -> StockReplica | None:
        """The replica of a stock instance's KV events; ``None`` without a subscription."""
        known = self._known.get(name)
        return known.replica if known is not None and isinstance(known.replica, StockReplica) else None

    def reports(self, name: str) -> bool:
        """Whether an instance reports its cache, by an agent or by KV events."""
        return name in self._known

    def began(self, name: str, epoch: bytes, naming: Naming | None) -> None:
        """Handle the announcement of an agent's epoch."""
        if (replica := self.replica(name)) is not None:
            replica.began(epoch, naming)
            self._changed(name)

    def lost_touch(self, name: str) -> None:
        """Mark the replica of an agent stale after its connection was lost."""
        if (replica := self.replica(name)) is not None:
            replica.lost_touch()
            self._changed(name)

    def _changed(self, name: str) -> None:
        """Update the sizes and the name holders after a replica has changed."""
        known = self._known[name]
        before, known.size_bytes = known.size_bytes, known.replica.size_bytes
        self._replica_bytes += known.size_bytes - before
        self._dirty.add(name)
        self._trees[known.role].note(known)

    def apply(self, name: str, message: IndexMessage) -> Outcome:
        """Apply an agent's message about placements."""
        known = self._known.get(name)
        if known is None or not isinstance(known.replica, Replica):
            return Outcome.IGNORED
        if self._remembers and isinstance(message, Events):
            for event in message.events:
                if isinstance(event, NamesRemoved):
                    self._past.left_names(name, self._clock.wall(), event.level, names_in(event.names))
        outcome = known.replica.apply(message)
        if known.replica.trusted:
            self._awaited.pop(name, None)
        self._trees[known.role].live[known.replica.holder] = known
        self._changed(name)
        self._bound()
        return outcome

    def stock_changed(self, name: str, replica: StockReplica) -> bool:
        """Handle a change of a stock instance's replica. Returns False to end its KV event subscription: when
        the page names of all stock instances take more than a quarter of the memory."""
        known = self._known.get(name)
        if known is None or known.replica is not replica:
            return False
        stock = (k.replica.size_bytes for k in self._known.values() if isinstance(k.replica, StockReplica))
        if sum(stock) > self._max_bytes // STOCK_SHARE:
            self.detach(name)
            return False
        if replica.trusted:
            self._awaited.pop(name, None)
            if not replica.partial and not known.complete:
                super().forget(name)
        known.complete = replica.trusted and not replica.partial
        self._trees[known.role].live[replica.holder] = known
        self._changed(name)
        self._bound()
        return True

    def on_heartbeat(self, name: str, *, alive: bool) -> None:
        """Record whether the agent of an instance is alive."""
        if (known := self._known.get(name)) is not None:
            if known.alive != alive:
                known.alive = alive
                self._trees[known.role].note(known)
            self._dirty.add(name)

    def holdings_of(self, name: str) -> tuple[int, bool, bool]:
        """``tokens_of``, ``trusted`` and ``awaited`` of an instance, which each request needs of all."""
        if name not in self._known and name not in self._awaited:
            return self._blocks.get(name, 0) * self.block_size, self.mode != "exact", False
        return self.tokens_of(name), self.trusted(name), self.awaited(name)

    def take_changed(self) -> set[str]:
        found = super().take_changed()
        return found.union(self._stock, self._awaited) if self._stock or self._awaited else found

    def trusted(self, name: str) -> bool:
        """Whether the index of an instance is complete and up to date. Routing counts the matches of an
        instance only if it is trusted or awaited."""
        known = self._known.get(name)
        if known is None:
            return self.mode != "exact" and not self.awaited(name)
        return self._is_trusted(known) if self.mode != "approximate" else True

    @staticmethod
    def _is_trusted(known: _Known) -> bool:
        return known.alive and known.replica.trusted

    @staticmethod
    def _tells_truth(known: _Known) -> bool:
        """Whether the replica is up to date, be it complete or a part of a snapshot."""
        return known.alive and known.replica.state in _TRUE

    # -- prefixes inferred from requests ------------------------------------------------------------

    def confirm(self, namespace: Hashable, key: bytes, instance: str) -> None:
        """Record that ``instance`` has computed these tokens, unless it reports its cache itself."""
        if self.learns_of(namespace, instance):
            super().confirm(namespace, key, instance)

    def guess(self, namespace: Any, key: bytes, instance: str) -> None:
        """See ``PromptTrees.guess``. A stock instance's events leave out adapters and ``extra_key``: after a
        prompt with either, its events under the same salt are ambiguous."""
        known = self._known.get(instance)
        if known is not None and len(namespace) == 4 and (namespace[1] or namespace[2]):
            known.mixed.add(namespace[3] or None)
        super().guess(namespace, key, instance)

    def learns_of(self, namespace: Any, instance: str) -> bool:
        """See ``PromptTrees.learns_of``."""
        if self.mode == "exact":
            return False
        known = self._known.get(instance)
        if known is None or self.mode == "approximate" or (tenant := tenant_of(namespace)) is None:
            return True
        if namespace[0] == BEGINNING:
            return True  # reports do not have the text behind the first picture
        return not known.covers(tenant) or (isinstance(known.replica, StockReplica) and known.replica.partial)

    # -- queries of routing ---------------------------------------------------------------------------

    def match(self, namespace: Hashable, key: bytes) -> dict[str, Match]:
        """Each instance's match with ``key``; instances without a match, or with stale replicas, are left
        out."""
        found: dict[str, Match] = {}
        if self._known and self.mode != "approximate" and (tenant := tenant_of(namespace)) is not None:
            names: _NamesOf = {}
            for place in self._trees.values():
                if place.live:
                    self._match_in(place, tenant, key, names, found)
        self._add_inferred(namespace, key, found)
        return found

    def _match_in(
        self,
        place: _RoleTree,
        tenant: Tenant,
        key: bytes,
        names: _NamesOf,
        found: dict[str, Match],
    ) -> None:
        """Match one role's instances: a walk over the tree, without changing it, then tiers below memory."""
        tree = place.tree
        size = tree.block_size
        whole = len(key) // tree.block_bytes
        now = self._clock.monotonic()
        path = list(walk(tree.roots.get(tenant), key, tree.block_bytes))
        nodes = [node for _, node in path]
        for node in nodes:
            node.last_access = now
        groups = ends(nodes)
        # An instance without a node on the path may hold the prompt on a disk only.
        first = nodes[0].placements if nodes else {}
        if named := [holder for holder in place.name_tellers if holder not in first]:
            groups.append((-1, named))
        live, hbm, complete = place.live, _HBM, State.LIVE
        nothing: dict[Tier, int] = {}
        for end, holders in groups:
            blocks, node = path[end] if end >= 0 else (0, tree.root)
            further = None if blocks == whole else _further(path, end, holders)
            alike: dict[bool, Match] = {}
            # A stock instance's copy may change its holder before the index knows it.
            if end >= 0 and not self._stock:
                inside = Match(blocks * size, False)
                ended = inside if further is None and blocks < whole else Match(blocks * size, True)
                alike = {False: inside, ended.own: ended}
                holders = _match_plain(node, holders, place.odd, further or (), (inside, ended), found)
            for holder in holders:
                known = live.get(holder)
                if known is None or not self._tells_truth(known) or not known.covers(tenant):
                    continue
                replica = known.replica
                held = blocks
                below = nothing
                # At most instances, the whole match is in HBM.
                piece: Piece | None = node.placements.get(holder)
                if piece is not None and not piece.run.tiers & hbm:
                    below = {}
                    held = _in_memory(path, end + 1, holder, below)
                if replica.named:
                    below = below or {}
                    held += self._by_name(replica, tenant, key, held, names, below)
                most = whole
                if isinstance(replica, StockReplica):
                    held -= held % replica.page_blocks
                    most -= most % replica.page_blocks
                if not held:
                    continue
                # `own` stays False where a continuation may exist unseen: on a disk, or in a snapshot that
                # is still arriving.
                own = held == most or (
                    further is not None
                    and held == blocks
                    and holder not in further
                    and replica.state is complete
                )
                if below or held != blocks:
                    counts = {tier: count * size for tier, count in sorted(below.items())}
                    found[replica.instance] = Match(held * size, own, counts)
                else:
                    if own not in alike:
                        alike[own] = Match(held * size, own)
                    found[replica.instance] = alike[own]

    def _by_name(
        self,
        replica: Replica | StockReplica,
        tenant: Tenant,
        key: bytes,
        start: int,
        names: _NamesOf,
        below: dict[Tier, int],
    ) -> int:
        """How many blocks, after the first ``start``, the instance has below memory. Adds each to ``below``
        under its nearest tier."""
        naming = replica.naming
        if naming is None or (naming.adapters and tenant[0]):
            return 0
        if naming not in names:
            names[naming] = (
                names_of(naming, tenant, key, self.block_size)
                if naming.pages is None
                else PageNames(tenant, key, naming.pages)
            )
        these = names[naming]
        if isinstance(these, PageNames):
            return self._by_page(replica, these, start, below)
        count = 0
        places = sorted(replica.named.items())
        for name in itertools.islice(these, start, None):
            tier = next((tier for tier, known in places if name in known), None)
            if tier is None:
                break
            below[tier] = below.get(tier, 0) + 1
            count += 1
        return count

    def _by_page(
        self,
        replica: Replica | StockReplica,
        names: PageNames,
        start: int,
        below: dict[Tier, int],
    ) -> int:
        """Like `_by_name`, up to the last place where a model with windows or states can be resumed."""
        places = sorted(replica.named.items())
        found = names.resumable(
            self.block_size, start, lambda name: any(name in known for _, known in places)
        )
        for name in names.ends(self.block_size, start, found):
            tier = next(tier for tier, known in places if name in known)
            below[tier] = below.get(tier, 0) + 1
        return found - start

    def durable(self, namespace: Hashable, key: bytes) -> int:
        """The most leading blocks of a prompt that one instance reports below memory."""
        tenant = tenant_of(namespace)
        if tenant is None or self.mode == "approximate":
            return 0
        names: _NamesOf = {}
        counts = (
            self._by_name(known.replica, tenant, key, 0, names, {})
            for known in self._known.values()
            if known.replica.named and self._tells_truth(known)
        )
        return max(counts, default=0)

    def history(self, namespace: Hashable, key: bytes) -> list[Departure]:
        """Remembered departures of a prompt's blocks from tiers, oldest first."""
        tenant = tenant_of(namespace)
        if tenant is None:
            return []
        namings = {known.replica.naming for known in self._known.values()} - {None}
        by_block = [naming for naming in namings if naming is not None and naming.pages is None]
        names = [name for naming in by_block for name in names_of(naming, tenant, key, self.block_size)]
        return self._past.of(tenant, key, names)

    def tokens_of(self, instance: str) -> int:
        """Tokens that ``instance`` holds in memory according to the index."""
        known = self._known.get(instance)
        if known is None or self.mode == "approximate":
            return self._blocks.get(instance, 0) * self.block_size
        return known.replica.blocks * self.block_size

    # -- memory and time ------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Estimated memory of the whole index."""
        return super().size_bytes + self._reported_bytes

    @property
    def _reported_bytes(self) -> int:
        trees = 0
        for place in self._trees.values():
            if place.size.placements:
                trees += place.size.size_bytes
        return trees + self._replica_bytes + self._past.size_bytes

    @property
    def blocks(self) -> int:
        """Different blocks, per role."""
        return self._unique_blocks + sum(place.size.blocks for place in self._trees.values())

    @property
    def nodes(self) -> int:
        return self._tree.node_count + sum(place.tree.node_count for place in self._trees.values())

    def tidy(self) -> bool:
        """Remove a slice of dead placements from the trees. Returns whether there is more to do."""
        more = super().tidy()
        for place in self._trees.values():
            if place.dead and not place.tree.evict(place.dead[0], SLICE_BLOCKS):
                holder = place.dead.popleft()
                place.tree.drop_holder(holder)
                place.odd.discard(holder)
            more = more or bool(place.dead)
        return more

    def _bound(self) -> None:
        """Enforce the memory bound: drop dead placements, then cold blocks, then inferred prefixes."""
        limit = self._max_bytes - self._max_bytes // BELIEVED_SHARE
        reported = self._reported_bytes
        if reported <= limit and reported + super().size_bytes <= self._max_bytes:
            return  # as after almost every message
        while self._reported_bytes > limit:
            if any(place.dead for place in self._trees.values()):
                self.tidy()
                continue
            most = max(self._known.values(), key=lambda k: (k.replica.blocks, k.replica.names))
            gone = most.replica.give_up(GIVE_UP_BLOCKS)
            count = sum(evicted.blocks for evicted in gone)
            if not count:
                most = max(self._known.values(), key=lambda k: k.replica.names)
                count = most.replica.give_up_names(GIVE_UP_BLOCKS)
            self._changed(most.replica.instance)
            if not count:
                break
            self.given_up_blocks += count
        while self.size_bytes > self._max_bytes and self._make_room():
            pass

    # -- seeing -----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        replicas = ", ".join(repr(known.replica) for known in self._known.values())
        return f"Index({self.mode}, bytes={self.size_bytes}, [{replicas}], believed={super().__repr__()})"

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            AssertionError: names the first violated invariant.
        """
        super().check()
        for place in self._trees.values():
            place.tree.check()
            place.size.check()
            held = {holder for node in place.tree.nodes() for holder in node.placements}
            odd = held - {holder for holder, known in place.live.items() if known.is_plain}
            if odd != held & place.odd and not self._stock:
                raise AssertionError(f"{held & place.odd} are odd, instead of {odd}")
        for name, known in self._known.items():
            known.replica.check()
            place = self._trees[known.role]
            if known.replica.named and known.replica.holder in place.live.keys() - place.name_tellers.keys():
                raise AssertionError(f"{name} reports names, and was not asked for them")
            if name not in self._stock and known.size_bytes != known.replica.size_bytes:
                raise AssertionError(f"{name} takes {known.replica.size_bytes} bytes, not {known.size_bytes}")
        if self._replica_bytes != sum(known.size_bytes for known in self._known.values()):
            raise AssertionError(f"all copies do not take {self._replica_bytes} bytes")


def _match_plain(
    node: Node,
    holders: Sequence[Holder],
    odd: set[Holder],
    further: Container[Holder],
    matches: tuple[Match, Match],
    found: dict[str, Match],
) -> list[Holder]:
    """Add to ``found`` the holders of a node that have all of it in HBM and are not odd.

    Args:
        further: holders with a continuation.
        matches: of holders in ``further``, and of all others.

    Returns:
        The other holders.
    """
    others: list[Holder] = []
    hbm, ended = _HBM, matches[1]
    placements = node.placements
    piece: Piece | None
    if len(holders) == len(placements) and not further:
        for holder, piece in placements.items():
            if piece is not None and piece.run.tiers & hbm and holder not in odd:
                found[holder.instance] = ended
            else:
                others.append(holder)
        return others
    for holder in holders:
        piece = placements[holder]
        if piece is not None and piece.run.tiers & hbm and holder not in odd:
            found[holder.instance] = matches[0] if holder in further else ended
        else:
            others.append(holder)
    return others


def tenant_of(namespace: Any) -> Tenant | None:
    """The engine's tenant for a namespace of the router. ``None`` for prompts without a known one: prompts
    that are matched by text alone, and prompts with an adapter.
    """
    kind, *rest = namespace
    if kind not in ("tokens", BEGINNING) or len(rest) not in (0, 3) or (rest and rest[0]):
        return None
    return (rest[1] or None, rest[2] or None) if rest else (None, None)


def names_of(naming: Naming, tenant: Tenant, key: bytes, block_size: int) -> list[bytes]:
    """Names of a prompt's blocks on disks with this naming."""
    namespace = Namespace(
        naming.model, naming.weights, naming.dtype, naming.geometry, naming.shard, tenant_salt(*tenant)
    )
    return block_keys(namespace.digest(), key, block_size)


def _in_memory(path: Sequence[tuple[int, Node]], count: int, holder: Holder, below: dict[Tier, int]) -> int:
    """Blocks that a holder of the first ``count`` nodes of a path has in memory. Adds to ``below`` the number
    of blocks by nearest tier below HBM.

    A tier with a block has all blocks before it, so sets of tiers only lose members along the path. A popular
    beginning has many nodes and many holders, so it is not walked for each of them. An unknown tier, from a
    newer peer, ends the count.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if path[middle][1].placements[holder].run.tiers & _HBM:
            low = middle + 1
        else:
            high = middle
    held = path[low - 1][0] if low else 0
    while low < count:
        bits = path[low][1].placements[holder].run.tiers
        tier = nearest_in(bits)
        if tier is None:
            break
        high = count
        if path[count - 1][1].placements[holder].run.tiers == bits:
            low = count  # as nearly always
        while low < high:
            middle = (low + high) // 2
            if path[middle][1].placements[holder].run.tiers == bits:
                low = middle + 1
            else:
                high = middle
        end = path[low - 1][0]
        below[tier] = below.get(tier, 0) + end - held
        held = end
    return held


def _further(path: Sequence[tuple[int, Node]], end: int, holders: Sequence[Holder]) -> set[Holder] | None:
    """The holders that have a continuation behind a place on the path. None where no prompt ends: inside a
    node, or behind a node with many continuations, which is a common beginning."""
    if end < 0:
        return None
    blocks, node = path[end]
    before = path[end - 1][0] if end else 0
    if blocks - before < node.blocks or len(node.children) > MANY_CHILDREN:
        return None
    if not node.children:
        return set()
    these = set(holders)
    return set().union(*[child.placements.keys() & these for child in node.children.values()])
