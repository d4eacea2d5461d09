"""Names of blocks that outlive the process: the keys of the disk tier.

In memory a block is found by its place in the tree. A name is a hash over all inputs that determine the
block's bytes: model and weights, layout and shard, the tenant, and the tokens of the whole prefix (``keys``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sglang_ext.engine.weights import Weights
from sglang_ext.keys import BLOCK_KEY_BYTES, Namespace, block_keys, tenant_salt
from sglang_ext.radix_global import Holder, Node

Names = npt.NDArray[np.void]
"""Block keys as one array, shape (blocks,), which the tree can slice like any other address."""

_NAME = np.dtype((np.void, BLOCK_KEY_BYTES))
NO_NAMES: Names = np.empty(0, _NAME)
_TENANTS_CACHED = 1024
_CACHED_CHARACTERS = 128
"""Longest ``extra_key`` and salt, together, that are cached: clients choose their lengths, and a cache entry
outlives their KV."""


def pack_names(names: Sequence[bytes]) -> Names:
    """Block keys as an array."""
    return np.frombuffer(b"".join(names), dtype=_NAME)


def unpack_names(names: Names) -> list[bytes]:
    """The block keys of an array."""
    return [name.tobytes() for name in names]


@runtime_checkable
class FollowsPrompts(Protocol):
    """A tier that finds blocks by their tokens, and has to be given them with the names."""

    def follow(
        self,
        namespace: bytes,
        tenant: tuple[str | None, str | None],
        parent: bytes,
        names: Sequence[bytes],
        key: bytes,
    ) -> None:
        """See `tiered_store.hicache.HiCacheStore.follow`."""


class BlockNames:
    """Names the blocks of one rank.

    Args:
        identity: the common part of all names of the rank; its salt is not used.
        disk: the holder whose addresses in the tree are names, where a block has one already.
        fresh: a text that is unique to this start of the process, such as the epoch.
        adapters: whether requests may use LoRA adapters. SGLang puts an adapter's id into the extra key, and
            makes it from name and path, where other weights may lie at the next start.
        weights: has the version of each generation of weights; without it, only the first has a version.
        followers: are given the tokens of prompts under the weights of the server's start, without adapters.
    """

    def __init__(
        self,
        identity: Namespace,
        block_tokens: int,
        disk: Holder,
        fresh: str,
        *,
        adapters: bool = False,
        weights: Weights | None = None,
        followers: Sequence[FollowsPrompts] = (),
    ) -> None:
        self.identity = identity
        self._weights = weights or Weights(identity.weights_version)
        self._block_tokens = block_tokens
        self._disk = disk
        self._fresh = fresh
        self.adapters = adapters
        self._followers = tuple(followers)
        self._cached: Callable[[Hashable], bytes] = functools.lru_cache(_TENANTS_CACHED)(self._digest)

    def digest(self, namespace: Any) -> bytes:
        """The name of a namespace of the tree: 16 bytes."""
        _, extra_key, salt = namespace
        if len(extra_key or "") + len(salt or "") > _CACHED_CHARACTERS:
            return self._digest(namespace)
        return self._cached(namespace)

    def _digest(self, namespace: Any) -> bytes:
        generation, extra_key, salt = namespace
        adapted = bool(self.adapters and extra_key)
        version = self.weights(generation, adapted=adapted)
        return dataclasses.replace(
            self.identity, weights_version=version, salt=tenant_salt(extra_key, salt)
        ).digest()

    def weights(self, generation: int, *, adapted: bool = False) -> str:
        """The version of a generation of weights; adapted: by an adapter."""
        version = self._weights.version(generation)
        if version is None or adapted:
            # No later process can verify that it has the same weights.
            version = f"{version or self.identity.weights_version}+{self._fresh}.{generation}"
        return version

    def of_path(self, node: Node, blocks: int) -> list[bytes]:
        """Names of the last ``blocks`` blocks of the path that ends at ``node``, in order."""
        edges: list[bytes] = []
        current = node
        while current.parent is not None and self._disk not in current.placements:
            edges.append(current.key)
            current = current.parent
        known = b"" if current.is_root else current.placements[self._disk][-1].tobytes()
        names = self.following(node.namespace, known, b"".join(reversed(edges)))
        while len(names) < blocks:
            names = unpack_names(current.placements[self._disk]) + names
            assert current.parent is not None
            current = current.parent
        return names[len(names) - blocks :]

    def last(self, node: Node) -> bytes:
        """Name of the last block of the path that ends at ``node``; empty for a root."""
        return b"" if node.is_root else self.of_path(node, 1)[0]

    def following(self, namespace: Hashable, parent: bytes, key: bytes) -> list[bytes]:
        """Names of the whole blocks of ``key``, which continue the block named ``parent``."""
        names = block_keys(self.digest(namespace), key, self._block_tokens, parent)
        if self._followers:
            self._follow(namespace, parent, names, key)
        return names

    def _follow(self, namespace: Any, parent: bytes, names: Sequence[bytes], key: bytes) -> None:
        generation, extra_key, salt = namespace
        if generation == 0 and not (self.adapters and extra_key):
            for follower in self._followers:
                follower.follow(self.digest(namespace), (extra_key, salt), parent, names, key)
