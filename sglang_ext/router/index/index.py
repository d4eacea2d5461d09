"""The index: who holds how much of a prompt, in which tier. True where instances tell, believed where not.

    instance                  what is known of it                                trusted
    ------------------------  -------------------------------------------------  ----------------------------
    with an agent             a copy of what it tells (`radix_global.replica`),   while its agent is heard and
                              one tree per role                                  nothing of it is missing
    stock SGLang with         a copy of what its events tell (`stock_replica`),  while no event is missing;
    KV events                 in the same tree                                   beside it, while that is
                                                                                 partial, what passes by
    any other SGLang          what passes by (`prompt_trees`)                     always, for what it is worth

Until the first snapshot of an instance that tells is in, or for as long as it takes to give that up, the
instance is *awaited*: what it has told so far is used, and nobody knows what else it holds.

Guesses, made when a request is routed, are the same for all and live 2 s. What the engine knows and the
router does not (prompts matched by text; adapters, whose ids the router is not told) is believed, not known.

Memory is bounded over all of it. What is too much goes: the coldest ends of prefixes of the instance that has
most, then names of its blocks below memory. Its index is *partial* then: it tells less than there is, never
more.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

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
from sglang_ext.router.index.prompt_trees import MANY_CHILDREN, SLICE_BLOCKS, PromptTrees
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
"""At least this part of the memory is left for what is only believed, guesses among it."""
STOCK_SHARE: Final = 4
"""Names of stock instances' pages take at most this part."""
GIVE_UP_BLOCKS: Final = 256
WAIT_S: Final = 15.0
MODES: Final = ("auto", "exact", "approximate")
_TRUE: Final = (State.LIVE, State.FILLING)


@dataclass(eq=False, slots=True)
class _Known:
    """An instance that tells."""

    replica: Replica | StockReplica
    role: Role
    heard: bool = False
    size_bytes: int = 0
    """Estimated memory of the copy, when it changed last."""
    complete: bool = False
    """A stock instance's copy is complete."""
    mixed: set[str | None] = field(default_factory=set)
    """Salts under which a stock instance was sent prompts that its events do not tell from others."""

    def covers(self, tenant: Tenant) -> bool:
        """Whether what is told of a tenant's prompts can be told from what is told of others'."""
        return isinstance(self.replica, Replica) or (tenant[0] is None and tenant[1] not in self.mixed)


class _RoleTree:
    """The tree of the instances of one role, and what is still to be taken out of it."""

    def __init__(self, block_size: int, clock: Clock) -> None:
        self.tree = RadixTree(block_size, clock=clock.monotonic)
        self.size = TreeSize(self.tree)
        self.dead: deque[Holder] = deque()
        self.live: dict[Holder, _Known] = {}
        self.name_tellers: dict[Holder, _Known] = {}
        """Those that tell names of blocks below memory, and perhaps some that no more do."""


class Index(PromptTrees):
    """See the module's docstring. Names of instances are the fleet's. Lives on the event loop's thread.

    Args:
        clock: seconds.
        block_size: tokens per block, as the instances have it.
        ttl_s: seconds after which what was only believed is believed no more.
        max_bytes: estimated memory of everything.
        mode: ``auto``; ``exact``: instances without an agent are known to hold nothing; ``approximate``: what
            agents tell is not looked at.
        wait_s: how long an instance is awaited of which nothing has come yet.
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
    ) -> None:
        super().__init__(clock, block_size=block_size, ttl_s=ttl_s, max_bytes=max_bytes)
        self.mode = mode
        self._trees = {role: _RoleTree(block_size, clock) for role in Role}
        self._known: dict[str, _Known] = {}
        self._replica_bytes = 0
        """Of all copies together, as ``_Known.size_bytes`` has them."""
        self._stock: set[str] = set()
        """Instances whose events are followed: what is known of them changes without a word."""
        self._wait_s = wait_s
        self._awaited: dict[str, float] = {}
        """Instances of which the first snapshot is not in -> until when it is awaited; ``monotonic``."""
        self._numbers = itertools.count()
        self._past = History(max_bytes // HISTORY_SHARE, self._tree.block_bytes)
        self.given_up_blocks = 0
        """Blocks that instances hold and that were forgotten for lack of memory, since the start."""

    def measure(self, metrics: RouterMetrics) -> None:
        super().measure(metrics)
        blocks = metrics.gauge("index_blocks", "Blocks that an instance tells to hold", "instance", "where")
        partial = metrics.gauge(
            "index_partial", "1 when the instance holds more than the index could keep", "instance"
        )

        def refresh() -> None:
            blocks.clear()
            partial.clear()
            for name, known in self._known.items():
                blocks.labels(name, "memory").set(known.replica.blocks)
                for tier, names in known.replica.named.items():
                    blocks.labels(name, tier.name).set(len(names))
                partial.labels(name).set(known.replica.partial)

        metrics.refreshing.subscribe(refresh)

    # -- instances that tell ----------------------------------------------------------------------

    def attach(self, name: str, role: Role) -> None:
        """An instance has an agent: from now on what it tells is believed, and nothing else."""
        known = self._known.get(name)
        if known is not None and known.role is role and isinstance(known.replica, Replica):
            return
        self._make(name, role, Replica)
        super().forget(name)

    def attach_stock(self, name: str, role: Role) -> StockReplica:
        """A stock instance publishes its KV events: what they tell is believed from now on, and where that is
        not all, what passes by as well. Whatever was known of it is dropped."""
        return self._make(name, role, StockReplica)

    def _make(self, name: str, role: Role, kind: type[R]) -> R:
        self.detach(name)
        place = self._trees[role]

        def abandon(holder: Holder) -> None:
            place.live.pop(holder, None)
            place.name_tellers.pop(holder, None)
            place.dead.append(holder)

        def left(node: Node, blocks: int, left: int, kept: int) -> None:
            self._past.left(name, self._clock.wall(), node, blocks, left, kept)

        replica = kind(place.tree, name, serial=self._numbers, abandon=abandon, left=left)
        self._known[name] = _Known(replica, role)
        if isinstance(replica, StockReplica):
            self._stock.add(name)
        self._retold.add(name)
        return replica

    def expect(self, name: str) -> None:
        """An instance has begun that tells, or will: what it holds is awaited from now on."""
        known = self._known.get(name)
        if self.mode != "approximate" and (known is None or not self._is_trusted(known)):
            self._awaited[name] = self._clock.monotonic() + self._wait_s
            self._retold.add(name)

    def awaited(self, name: str) -> bool:
        """Whether the first snapshot of an instance is expected and not in, or one is just coming in."""
        if self.mode == "approximate":
            return False
        known = self._known.get(name)
        state = known.replica.state if known is not None and known.heard else None
        if state is State.FILLING:
            return True
        until = self._awaited.get(name)
        if until is None or state is State.LIVE:
            return False
        if self._clock.monotonic() < until:
            return True
        del self._awaited[name]
        self._retold.add(name)
        return False

    def detach(self, name: str) -> None:
        """An instance has no agent any more, or is gone."""
        self._awaited.pop(name, None)
        self._stock.discard(name)
        self._retold.add(name)
        known = self._known.pop(name, None)
        if known is not None:
            self._replica_bytes -= known.size_bytes
            known.replica.forget()
            self._trees[known.role].live.pop(known.replica.holder, None)
            self._trees[known.role].name_tellers.pop(known.replica.holder, None)

    def replica(self, name: str) -> Replica | None:
        """The copy of what an instance's agent tells; ``None`` when it has none."""
        known = self._known.get(name)
        return known.replica if known is not None and isinstance(known.replica, Replica) else None

    def stock(self, name: str) -> StockReplica | None:
        """The copy of what a stock instance's events tell; ``None`` when nobody follows them."""
        known = self._known.get(name)
        return known.replica if known is not None and isinstance(known.replica, StockReplica) else None

    def tells(self, name: str) -> bool:
        """Whether an instance tells what it holds, by an agent or by events."""
        return name in self._known

    def began(self, name: str, epoch: bytes, naming: Naming | None) -> None:
        """An instance's agent said in which epoch it is."""
        if (replica := self.replica(name)) is not None:
            replica.began(epoch, naming)
            self._changed(name)

    def lost_touch(self, name: str) -> None:
        """Nobody knows what an instance with an agent does now."""
        if (replica := self.replica(name)) is not None:
            replica.lost_touch()
            self._changed(name)

    def _changed(self, name: str) -> None:
        """A copy is not what it was."""
        known = self._known[name]
        before, known.size_bytes = known.size_bytes, known.replica.size_bytes
        self._replica_bytes += known.size_bytes - before
        self._retold.add(name)
        tellers = self._trees[known.role].name_tellers
        if known.replica.named:
            tellers[known.replica.holder] = known
        else:
            tellers.pop(known.replica.holder, None)

    def apply(self, name: str, message: IndexMessage) -> Outcome:
        """An instance tells of placements."""
        known = self._known.get(name)
        if known is None or not isinstance(known.replica, Replica):
            return Outcome.IGNORED
        if isinstance(message, Events):
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
        """What the events of a stock instance tell has changed. Returns whether they are still wanted: not
        when the names of such instances' pages take more than a quarter of the memory."""
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

    def heard(self, name: str, *, alive: bool) -> None:
        """Whether the agent of an instance is heard."""
        if (known := self._known.get(name)) is not None:
            known.heard = alive
            self._retold.add(name)

    def told(self, name: str) -> tuple[int, bool, bool]:
        """``tokens_of``, ``trusted`` and ``awaited`` of an instance, as every request asks of each."""
        if name not in self._known and name not in self._awaited:
            return self._blocks.get(name, 0) * self.block_size, self.mode != "exact", False
        return self.tokens_of(name), self.trusted(name), self.awaited(name)

    def retold(self) -> set[str]:
        found = super().retold()
        return found.union(self._stock, self._awaited) if self._stock or self._awaited else found

    def trusted(self, name: str) -> bool:
        """Whether what is known of an instance is believed, and is all: its cache attracts only then, or for
        what it has told while it is awaited."""
        known = self._known.get(name)
        if known is None:
            return self.mode != "exact" and not self.awaited(name)
        return self._is_trusted(known) if self.mode != "approximate" else True

    @staticmethod
    def _is_trusted(known: _Known) -> bool:
        return known.heard and known.replica.trusted

    @staticmethod
    def _tells_truth(known: _Known) -> bool:
        """Whether what was told holds, be it all or a part of a snapshot."""
        return known.heard and known.replica.state in _TRUE

    # -- what requests tell -------------------------------------------------------------------------

    def confirm(self, namespace: Hashable, key: bytes, instance: str) -> None:
        """``instance`` has computed these tokens: of no interest where it tells by itself."""
        if self.learns_of(namespace, instance):
            super().confirm(namespace, key, instance)

    def guess(self, namespace: Any, key: bytes, instance: str) -> None:
        """See ``PromptTrees.guess``. A stock instance's events leave out adapters and ``extra_key``: from now
        on nobody knows whose the prompts are that they tell of under the same salt."""
        known = self._known.get(instance)
        if known is not None and len(namespace) == 4 and (namespace[1] or namespace[2]):
            known.mixed.add(namespace[3] or None)
        super().guess(namespace, key, instance)

    def learns_of(self, namespace: Hashable, instance: str) -> bool:
        """See ``PromptTrees.learns_of``."""
        if self.mode == "exact":
            return False
        known = self._known.get(instance)
        if known is None or self.mode == "approximate" or (tenant := tenant_of(namespace)) is None:
            return True
        return not known.covers(tenant) or (isinstance(known.replica, StockReplica) and known.replica.partial)

    # -- what routing asks ----------------------------------------------------------------------------

    def match(self, namespace: Hashable, key: bytes) -> dict[str, Match]:
        """What each instance holds of ``key``; who holds nothing, or is not trusted, is left out."""
        believed = super().match(namespace, key)
        if not self._known or self.mode == "approximate" or (tenant := tenant_of(namespace)) is None:
            return believed
        found: dict[str, Match] = {}
        names: dict[Naming, list[bytes]] = {}
        for place in self._trees.values():
            if place.live:
                self._match_in(place, tenant, key, names, found)
        for name, guess in believed.items():
            known = found.get(name)
            if known is None or guess.tokens > known.tokens:
                found[name] = guess
        return found

    def _match_in(
        self,
        place: _RoleTree,
        tenant: Tenant,
        key: bytes,
        names: dict[Naming, list[bytes]],
        found: dict[str, Match],
    ) -> None:
        """One role's instances: a walk over the tree, which is not changed, then their tiers below memory."""
        tree = place.tree
        size = tree.block_size
        whole = len(key) // tree.block_bytes
        now = self._clock.monotonic()
        path = list(walk(tree.roots.get(tenant), key, tree.block_bytes))
        nodes = [node for _, node in path]
        for node in nodes:
            node.last_access = now
        groups = ends(nodes)
        # Who is not on the way may hold the prompt on a disk only.
        first = nodes[0].placements if nodes else {}
        if named := [holder for holder in place.name_tellers if holder not in first]:
            groups.append((-1, named))
        live, hbm, complete = place.live, Tier.HBM.bit, State.LIVE
        nothing: dict[Tier, int] = {}
        for end, holders in groups:
            blocks, node = path[end] if end >= 0 else (0, tree.root)
            further = None if blocks == whole else _further(path, end, holders)
            alike: dict[bool, Match] = {}
            for holder in holders:
                known = live.get(holder)
                if known is None or not self._tells_truth(known) or not known.covers(tenant):
                    continue
                replica = known.replica
                held = blocks
                below = nothing
                # Of most instances, all that matches is in HBM.
                piece: Piece | None = node.placements.get(holder)
                if piece is not None and not piece.run.tiers & hbm:
                    below = {}
                    held = _in_memory(path[: end + 1], holder, below)
                if replica.named:
                    below = below or {}
                    held += self._by_name(replica, tenant, key, held, names, below)
                most = whole
                if isinstance(replica, StockReplica):
                    held -= held % replica.page_blocks
                    most -= most % replica.page_blocks
                if not held:
                    continue
                # What a disk has after the last block that matches, nobody can say; nor what is yet to come.
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
        names: dict[Naming, list[bytes]],
        below: dict[Tier, int],
    ) -> int:
        """How many blocks, after the first ``start``, the instance has below memory; ``below`` is told of
        the nearest tier of each."""
        naming = replica.naming
        if naming is None or (naming.adapters and tenant[0]):
            return 0
        if naming not in names:
            names[naming] = names_of(naming, tenant, key, self.block_size)
        count = 0
        places = sorted(replica.named.items())
        for name in itertools.islice(names[naming], start, None):
            tier = next((tier for tier, known in places if name in known), None)
            if tier is None:
                break
            below[tier] = below.get(tier, 0) + 1
            count += 1
        return count

    def durable(self, namespace: Hashable, key: bytes) -> int:
        """How many leading blocks of a prompt some instance has below memory, as it tells."""
        tenant = tenant_of(namespace)
        if tenant is None or self.mode == "approximate":
            return 0
        names: dict[Naming, list[bytes]] = {}
        counts = (
            self._by_name(known.replica, tenant, key, 0, names, {})
            for known in self._known.values()
            if known.replica.named and self._tells_truth(known)
        )
        return max(counts, default=0)

    def history(self, namespace: Hashable, key: bytes) -> list[Departure]:
        """What left tiers of a prompt's blocks, oldest first, as far as it is remembered."""
        tenant = tenant_of(namespace)
        if tenant is None:
            return []
        namings = {known.replica.naming for known in self._known.values()} - {None}
        names = [name for n in namings if n is not None for name in names_of(n, tenant, key, self.block_size)]
        return self._past.of(tenant, key, names)

    def tokens_of(self, instance: str) -> int:
        """Tokens that ``instance`` holds in memory, as far as is known."""
        known = self._known.get(instance)
        if known is None or self.mode == "approximate":
            return self._blocks.get(instance, 0) * self.block_size
        return known.replica.blocks * self.block_size

    # -- memory and time ------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Estimated memory of everything."""
        return super().size_bytes + self._told_bytes

    @property
    def _told_bytes(self) -> int:
        trees = sum(place.size.size_bytes for place in self._trees.values())
        return trees + self._replica_bytes + self._past.size_bytes

    @property
    def blocks(self) -> int:
        """Different blocks, per role."""
        return self._unique_blocks + sum(place.size.blocks for place in self._trees.values())

    @property
    def nodes(self) -> int:
        return self._tree.node_count + sum(place.tree.node_count for place in self._trees.values())

    def tidy(self) -> bool:
        """Take a slice of what is of no use out of the trees. Returns whether there is more to do."""
        more = super().tidy()
        for place in self._trees.values():
            if place.dead and not place.tree.evict(place.dead[0], SLICE_BLOCKS):
                place.tree.drop_holder(place.dead.popleft())
            more = more or bool(place.dead)
        return more

    def _bound(self) -> None:
        """Keep within the memory: first what is dead, then what is cold; then what was only believed."""
        limit = self._max_bytes - self._max_bytes // BELIEVED_SHARE
        while self._told_bytes > limit:
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
        told = ", ".join(repr(known.replica) for known in self._known.values())
        return f"Index({self.mode}, bytes={self.size_bytes}, [{told}], believed={super().__repr__()})"

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            AssertionError: names the first that does not hold.
        """
        super().check()
        for place in self._trees.values():
            place.tree.check()
            place.size.check()
        for name, known in self._known.items():
            known.replica.check()
            place = self._trees[known.role]
            if known.replica.named and known.replica.holder in place.live.keys() - place.name_tellers.keys():
                raise AssertionError(f"{name} tells of names, and is not asked for them")
            if name not in self._stock and known.size_bytes != known.replica.size_bytes:
                raise AssertionError(f"{name} takes {known.replica.size_bytes} bytes, not {known.size_bytes}")
        if self._replica_bytes != sum(known.size_bytes for known in self._known.values()):
            raise AssertionError(f"all copies do not take {self._replica_bytes} bytes")


def tenant_of(namespace: Any) -> Tenant | None:
    """Whose prompts a namespace of the router has, as the engine knows them. ``None`` where that cannot be
    told: for a prompt that is matched by its text, and for one with an adapter.
    """
    kind, *rest = namespace
    if kind != "tokens" or len(rest) not in (0, 3) or (rest and rest[0]):
        return None
    return (rest[1] or None, rest[2] or None) if rest else (None, None)


def names_of(naming: Naming, tenant: Tenant, key: bytes, block_size: int) -> list[bytes]:
    """Names of the blocks of a prompt on disks of this naming."""
    namespace = Namespace(
        naming.model, naming.weights, naming.dtype, naming.geometry, naming.shard, tenant_salt(*tenant)
    )
    return block_keys(namespace.digest(), key, block_size)


def _in_memory(path: Sequence[tuple[int, Node]], holder: Holder, below: dict[Tier, int]) -> int:
    """Blocks that a holder has in memory, of a path of which it has all; ``below`` is told how many of them
    have which nearest tier below HBM. A tier that has a block has all before it, so sets of tiers only lose
    members along the way. One of which nothing is known here, from a newer peer, ends what is held."""
    held = 0
    beyond: dict[int, int] = {}
    """By set of tiers without HBM: where the prefix that is in those ends, in blocks."""
    for blocks, node in path:
        bits = node.placements[holder].run.tiers
        if bits & Tier.HBM.bit:
            held = blocks
        else:
            beyond[bits] = blocks
    for bits, end in beyond.items():
        tier = nearest_in(bits)
        if tier is None:
            break
        if end > held:
            below[tier] = below.get(tier, 0) + end - held
            held = end
    return held


def _further(path: Sequence[tuple[int, Node]], end: int, holders: Sequence[Holder]) -> set[Holder] | None:
    """Those of the holders who have something that goes on after a place on the path; None where nobody's
    prompt ends: in the midst of a node, or after one with many continuations, which is a common beginning."""
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
