"""Holders: the places where copies lie, by instance, epoch, tier and component."""

from __future__ import annotations

import weakref
from typing import Any

from sglang_ext.radix_global.components import FULL, Component
from sglang_ext.tiers import Tier


class Holder:
    """One place where copies lie: a component in a tier of one instance in one epoch.

    Holders are interned: ``Holder.of`` returns the same object for the same facts, so that the tree
    can use them as dictionary keys at the price of an identity hash.
    """

    __slots__ = ("__weakref__", "closed", "component", "divides", "epoch", "full", "instance", "tier")
    _interned: weakref.WeakValueDictionary[tuple[str, int, Tier, Component], Holder] = (
        weakref.WeakValueDictionary()
    )

    instance: str
    epoch: int
    tier: Tier
    component: Component
    full: Holder | None
    """The holder of the full component in the same tier; None if this is that one."""
    closed: bool
    """The component's `Coverage.closed`: a holder of a block has every block before it."""
    divides: bool
    """The component's `Coverage.divides`: an address has entries for each block, and is cut with its node."""

    @classmethod
    def of(cls, instance: str, epoch: int, tier: Tier, component: Component = FULL) -> Holder:
        """The holder of these facts; always the same object while anyone refers to it."""
        facts = (instance, epoch, tier, component)
        holder = cls._interned.get(facts)
        if holder is None:
            holder = cls.__new__(cls)
            holder.instance, holder.epoch, holder.tier, holder.component = facts
            holder.closed, holder.divides = component.coverage.closed, component.coverage.divides
            holder.full = None if holder.closed else cls.of(instance, epoch, tier)
            cls._interned[facts] = holder
        return holder

    def __init__(self) -> None:
        raise TypeError("use Holder.of(instance, epoch, tier)")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Holder.of, (self.instance, self.epoch, self.tier, self.component))

    def __repr__(self) -> str:
        part = "" if self.closed else f" {self.component!r}"
        return f"{self.instance}/{self.epoch:x}/{self.tier.title}{part}"
