"""Rendezvous hashing: the same key goes to the same instance, whoever else comes and goes."""

from __future__ import annotations

import hashlib

from sglang_ext.router.policies.base import Fleet, Instance


def rendezvous(key: str, fleet: Fleet) -> Instance:
    """The instance with the largest hash of (key, name).

    When an instance leaves, only its own keys move, to all others in equal parts; when one comes, it takes
    its share from each of the others, and nothing else moves.
    """
    return max(fleet, key=lambda instance: (weight(key, instance.name), instance.name))


def weight(key: str, name: str) -> bytes:
    """What one instance bids for a key, 8 bytes."""
    hashed = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8)
    # The length in between keeps ("ab", "c") and ("a", "bc") apart.
    hashed.update(b"\0" + len(key).to_bytes(8, "little") + name.encode("utf-8", "surrogatepass"))
    return hashed.digest()
