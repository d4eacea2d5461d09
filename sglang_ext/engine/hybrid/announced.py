"""The tree that routers get of a model with windows or states: prefixes after which a prompt can be resumed.

SGLang's tree and the store below it keep components apart, each by its own rules. Here is a record of all
pages that any of them has, and for each page which component lies in which tier. From it follow the *resume
points* of each prompt, and the tree to publish: for each tier, the paths up to the last resume point, in
whole blocks. A place before that point may lack a window or a state; a prompt that ends there finds less.

    tier   a prefix can be resumed
    HBM    from SGLang's tree alone
    DRAM   from DRAM alone, or from DRAM behind a prefix in HBM
    DISK   the same with blocks of the disk, which are brought to DRAM first

Pages are recorded by the ids of their tokens, and encoded when they are published: in an encoded prompt with
a picture, four tokens are one group, and a page may end within it.

Work is done once per pass and for prompts of which something has changed. No SGLang, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_ext.engine.hybrid.components import Component, Flags, resume_points
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.keys import TOKEN_BYTES, TokenIds, encode_tokens
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiers import Tier

Ids = npt.NDArray[np.int64]
Below: TypeAlias = Mapping[tuple[Tier, Component], Callable[[Sequence[Name]], Flags]]
"""For each name, whether a tier below HBM has a component of its page."""
NOWHERE = -1
"""In place of a row: the page's component is not in HBM."""

_PAGES = Holder.of("pages", 0, Tier.HBM)
"""Holder of all recorded pages, whose addresses are their numbers."""
_FIRST_PAGES = 1024
_RECORDED = np.dtype("<i8")
"""A token's id among recorded pages."""
_WORDS = _RECORDED.itemsize // TOKEN_BYTES


class Announced:
    """See the module's docstring. In the scheduler's thread.

    Args:
        tree: to publish; empty, of blocks of whole pages.
        holders: of the published tiers.
        components: of the model.
        page_tokens: tokens of a page.
        below: the places of pages below HBM, as of now.
    """

    def __init__(
        self,
        tree: RadixTree,
        holders: Mapping[Tier, Holder],
        components: Sequence[Component],
        page_tokens: int,
        below: Below | None = None,
    ) -> None:
        if tree.block_size % page_tokens:
            raise ValueError(f"blocks of {tree.block_size} tokens are not whole pages of {page_tokens}")
        self.tree = tree
        self.holders = dict(holders)
        self.page_tokens = page_tokens
        self._components = tuple(components)
        places = [(tier, component) for tier in holders for component in components]
        self._below = {} if below is None else below
        self._bits = {place: np.uint16(1 << number) for number, place in enumerate(places)}
        self._forget_pages()

    def _forget_pages(self) -> None:
        self._known = RadixTree(self.page_tokens * _WORDS)
        self._known.observer = self
        self._flags = np.zeros(_FIRST_PAGES, np.uint16)
        """By page: in which tiers it has which component. Page 0 does not exist."""
        self._node_of = np.empty(_FIRST_PAGES, object)
        self._names: list[Name | None] = [None] * _FIRST_PAGES
        self._free = list(range(_FIRST_PAGES - 1, 0, -1))
        self._page_of: dict[Name, int] = {}
        self._in_rows: dict[Component, Ids] = {
            component: np.zeros(_FIRST_PAGES, np.int64) for component in self._components
        }
        """The page in each row of a component's memory in HBM; 0 for none."""
        self._changed: set[Node] = set()
        """Nodes of recorded pages of which something has come or gone."""
        self._pins: dict[Node, dict[Holder, Node]] = {}
        """For each end of recorded pages, the locked end of its published path in each tier."""
        self._extended: set[Node] = set()
        """Nodes that were ends, and have a continuation now."""

    # -- arrivals and departures --------------------------------------------------------------------

    def in_hbm(
        self, namespace: Hashable, tokens: TokenIds, names: Sequence[Name], rows: Mapping[Component, Ids]
    ) -> None:
        """SGLang's tree has a path.

        Args:
            namespace: of the published tree.
            tokens: of the path, whole pages.
            names: of its pages; empty without tiers below HBM.
            rows: of each component, for each page its row in HBM or `NOWHERE`.
        """
        pages = len(tokens) // self.page_tokens
        if not pages:
            return
        path = self._record(namespace, np.asarray(tokens).astype(_RECORDED).tobytes(), names, pages)
        before = self._flags[path].copy()
        for component, of_pages in rows.items():
            there = of_pages >= 0
            self._enter_rows(component, of_pages[there], path[there])
        self._touch(path[before != self._flags[path]])

    def _enter_rows(self, component: Component, rows: Ids, pages: Ids) -> None:
        if not len(rows):
            return
        in_rows = self._in_rows[component]
        if rows.max() >= len(in_rows):
            grown = np.zeros(2 * int(rows.max()) + 1, np.int64)
            grown[: len(in_rows)] = in_rows
            in_rows = self._in_rows[component] = grown
        bit = self._bits[Tier.HBM, component]
        former = in_rows[rows]
        former = former[(former != pages) & (former > 0)]
        if len(former):
            self._flags[former] &= ~bit
            self._touch(former)
        in_rows[rows] = pages
        self._flags[pages] |= bit

    def left_hbm(self, component: Component, rows: Ids) -> None:
        """SGLang's tree has given up rows of a component; some may not have been a page's."""
        in_rows = self._in_rows[component]
        rows = rows[rows < len(in_rows)]
        pages = in_rows[rows]
        in_rows[rows] = 0
        pages = pages[pages > 0]
        if len(pages):
            self._flags[pages] &= ~self._bits[Tier.HBM, component]
            self._touch(pages)

    def below(self, tier: Tier, component: Component, names: Sequence[Name], held: bool) -> None:
        """A tier below HBM has a component of pages of these names, or no longer has it."""
        bit = self._bits.get((tier, component))
        if bit is None:
            return
        found = [page for name in names if (page := self._page_of.get(name)) is not None]
        if not found:
            return
        pages = np.array(found, np.int64)
        if held:
            self._flags[pages] |= bit
        else:
            self._flags[pages] &= ~bit
        self._touch(pages)

    def _touch(self, pages: Ids) -> None:
        self._changed.update(self._node_of[pages].tolist())

    # -- recorded pages ------------------------------------------------------------------------------

    def _record(self, namespace: Hashable, key: bytes, names: Sequence[Name], pages: int) -> Ids:
        """The numbers of a path's pages. Those of which nothing was recorded get new ones."""
        found = self._known.match(namespace, key)
        if found.path:
            last = found.path[-1]
            if last in self._pins and found.blocks < pages:
                self._extended.add(last)
        new = self._take(pages - found.blocks)
        address = np.concatenate([np.zeros(found.blocks, np.int64), new])
        node = self._known.insert(namespace, key, _PAGES, address).node
        if len(new):
            self._node_of[new] = node
            self._changed.add(node)
            self._name(new, names[found.blocks :])
        return self._path(node)

    def _name(self, pages: Ids, names: Sequence[Name]) -> None:
        if not len(names):
            return
        for page, name in zip(pages.tolist(), names, strict=True):
            self._names[page] = name
            self._page_of[name] = page
        for place, held in self._below.items():
            self._flags[pages[held(names)]] |= self._bits[place]

    def _take(self, count: int) -> Ids:
        if count > len(self._free):
            size = len(self._flags)
            more = max(size, count)
            self._flags = np.concatenate([self._flags, np.zeros(more, np.uint16)])
            self._node_of = np.concatenate([self._node_of, np.empty(more, object)])
            self._names += [None] * more
            self._free += range(size + more - 1, size - 1, -1)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken, np.int64)

    def _path(self, node: Node) -> Ids:
        """The pages from the start to the end of a node."""
        parts = []
        while node.parent is not None:
            parts.append(node.placements[_PAGES])
            node = node.parent
        return np.concatenate(parts[::-1])

    def split(self, upper: Node, lower: Node) -> None:
        """See `TreeObserver`; of the recorded pages."""
        self._node_of[upper.placements[_PAGES]] = upper

    def placed(self, node: Node, holder: Holder) -> None:
        """See `TreeObserver`."""

    def displaced(self, node: Node, holder: Holder) -> None:
        """See `TreeObserver`."""

    # -- publishing ------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Bring the published tree up to date. Once per pass, before its events are taken."""
        if not self._changed:
            return
        while self._changed:
            changed, self._changed = self._changed, set()
            for end in _ends(changed):
                self._judge(end)
        for node in self._extended:
            self._unpin(node)
        self._extended.clear()
        for holder in self.holders.values():
            loose = self.tree.blocks_of(holder) - self.tree.locked_blocks_of(holder)
            if loose:
                self.tree.evict(holder, loose)

    def _judge(self, end: Node) -> None:
        """Publish the path to an end of recorded pages as far as each tier has it, or forget the end."""
        path = self._path(end)
        flags = self._flags[path]
        there = np.flatnonzero(flags)
        kept = int(there[-1]) + 1 if len(there) else 0
        start = len(path) - end.blocks
        if kept < len(path):
            if kept > start:
                self._known.split(end, kept - start)
            self._drop(end)
            return
        tokens = _tokens_of(end)
        points = self._resumable(flags)
        for tier, holder in self.holders.items():
            self._pin(end, holder, tokens, points[tier])

    def _drop(self, end: Node) -> None:
        """Forget a node at the end of which nothing is anywhere."""
        self._unpin(end)
        self._extended.discard(end)
        parent, pages = end.parent, end.placements[_PAGES].tolist()
        for page in pages:
            name, self._names[page] = self._names[page], None
            if name is not None and self._page_of.get(name) == page:
                del self._page_of[name]
        self._node_of[pages] = None
        self._free += pages
        self._known.remove(end, _PAGES)
        if parent is not None and parent.parent is not None:
            self._changed.add(parent)

    def _resumable(self, flags: npt.NDArray[np.uint16]) -> dict[Tier, int]:
        """After how many pages of a path a prompt can be resumed from each tier at most."""
        found: dict[Tier, int] = {}
        near, held = 0, {component: np.zeros(len(flags), np.bool_) for component in self._components}
        for tier in self.holders:
            for component in held:
                own = (flags & self._bits[tier, component]) != 0
                # Blocks on disk are brought to DRAM, where the others are.
                held[component] = held[component] | own if tier > Tier.DRAM else own
            alone = self._last_point(held)
            behind = self._last_point({component: of[near:] for component, of in held.items()})
            found[tier] = max(alone, near + behind if near and behind else 0)
            if tier is Tier.HBM:
                near = alone
        return found

    def _last_point(self, held: Mapping[Component, Flags]) -> int:
        return int(np.flatnonzero(resume_points(held, self.page_tokens))[-1])

    def _pin(self, end: Node, holder: Holder, tokens: Ids, pages: int) -> None:
        """Publish the path to an end in a tier up to so many pages."""
        blocks = pages * self.page_tokens // self.tree.block_size
        pins = self._pins.setdefault(end, {})
        former = pins.pop(holder, None)
        if blocks:
            key = encode_tokens(tokens, blocks * self.tree.block_size)
            node = self.tree.insert(end.namespace, key, holder).node
            self.tree.lock(node, holder)
            pins[holder] = node
        if former is not None:
            self.tree.unlock(former, holder)

    def _unpin(self, end: Node) -> None:
        for holder, node in self._pins.pop(end, {}).items():
            self.tree.unlock(node, holder)

    # -- whole -----------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything, after routers have forgotten it."""
        for holder in self.holders.values():
            self.tree.drop_holder(holder)
        self._forget_pages()

    def check(self) -> None:
        """Verify the bookkeeping after `publish`. Raises AssertionError naming the violated invariant."""
        self.tree.check()
        self._known.check()
        pages = self._known.blocks_of(_PAGES)
        if pages + len(self._free) + 1 != len(self._flags):
            raise AssertionError(f"{pages} pages are recorded, {len(self._free)} of {len(self._flags)} free")
        ends = {node for node in self._known.nodes() if not node.children}
        if not self._changed and ends != self._pins.keys():
            raise AssertionError("not each end of recorded pages has been published")

    def __repr__(self) -> str:
        return f"Announced({self.tree!r}, pages={self._known.blocks_of(_PAGES)})"


def _ends(nodes: set[Node]) -> set[Node]:
    """The ends of all paths that go through these nodes of recorded pages."""
    found: set[Node] = set()
    seen: set[Node] = set()
    stack = [node for node in nodes if node is not None and node.placements]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.children:
            stack.extend(node.children.values())
        else:
            found.add(node)
    return found


def _tokens_of(node: Node) -> Ids:
    """All tokens up to the end of a node of recorded pages."""
    edges = []
    while node.parent is not None:
        edges.append(node.key)
        node = node.parent
    return np.frombuffer(b"".join(reversed(edges)), _RECORDED)
