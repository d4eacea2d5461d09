"""Holders: instance, epoch and tier in which a copy of a block lies."""

from __future__ import annotations

import weakref
from typing import Any

from sglang_ext.tiers import Tier


class Holder:
    """One place where copies lie: a tier of one instance in one epoch.

    Holders are interned: ``Holder.of`` returns the same object for the same facts, so that the tree
    can use them as dictionary keys at the price of an identity hash.
    """

    __slots__ = ("__weakref__", "epoch", "instance", "tier")
    _interned: weakref.WeakValueDictionary[tuple[str, int, Tier], Holder] = weakref.WeakValueDictionary()

    instance: str
    epoch: int
    tier: Tier

    @classmethod
    def of(cls, instance: str, epoch: int, tier: Tier) -> Holder:
        """The holder of these facts; always the same object while anyone refers to it."""
        facts = (instance, epoch, tier)
        holder = cls._interned.get(facts)
        if holder is None:
            holder = cls.__new__(cls)
            holder.instance, holder.epoch, holder.tier = instance, epoch, tier
            cls._interned[facts] = holder
        return holder

    def __init__(self) -> None:
        raise TypeError("use Holder.of(instance, epoch, tier)")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Holder.of, (self.instance, self.epoch, self.tier))

    def __repr__(self) -> str:
        return f"{self.instance}/{self.epoch:x}/{self.tier.title}"
