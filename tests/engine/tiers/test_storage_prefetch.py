"""The calls that the scheduler's protocol for storage passes on."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.engine.cache.faults import CacheFaults
from sglang_ext.engine.tiers.promotion import Promoted, Wanted
from sglang_ext.engine.weights import Weights
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.storage_prefetch import StoragePrefetch


class Recorder:
    """Stands in for promotions, and records its requests."""

    def __init__(self) -> None:
        self.begun: list[tuple[Any, Wanted]] = []
        self.released: list[Any] = []

    def begin(self, handle: Any, wanted: Wanted) -> None:
        self.begun.append((handle, wanted))

    def ready(self, handle: Any) -> bool:
        return False

    def brought(self, handle: Any) -> Promoted | None:
        return Promoted(16, 32, None) if handle == "there" else None  # type: ignore[arg-type]

    def release(self, handle: Any) -> None:
        self.released.append(handle)


class Cache(StoragePrefetch):
    def __init__(self, promotions: Recorder | None, sign: int = 1) -> None:
        super().__init__(
            promotions,  # type: ignore[arg-type]
            None,
            Weights().namespace,
            CacheFaults(strict=True),
            priority_sign=sign,
        )


def handle(rid: str, attempt: int = 0) -> Any:
    return SimpleNamespace(rid=rid, attempt_id=attempt)


@pytest.mark.parametrize(("sign", "expected"), [(1, 3), (-1, -3)])
def test_a_request_is_looked_for_whole_with_its_tenant_and_its_priority(sign: int, expected: int) -> None:
    promotions = Recorder()
    cache = Cache(promotions, sign)
    mine = handle("a")
    cache.matched(SimpleNamespace(cache_request_handle=mine, priority=3, positional_embed_overrides=None))  # type: ignore[arg-type]
    cache.prefetch_from_storage(
        mine, None, array("q", [3, 4]), matched_prefix_tokens=array("q", [1, 2]), cache_salt="salt"
    )
    assert promotions.begun == [
        (mine, Wanted((0, None, "salt"), encode_tokens([1, 2, 3, 4]), expected, request="a"))
    ]


def test_a_request_that_was_not_the_last_to_be_matched_has_no_priority() -> None:
    promotions = Recorder()
    cache = Cache(promotions)
    cache.matched(SimpleNamespace(cache_request_handle=handle("b"), priority=3))  # type: ignore[arg-type]
    cache.prefetch_from_storage(handle("a"), None, array("q", [1]), matched_prefix_tokens=array("q"))
    assert promotions.begun[0][1].priority == 0


def test_nothing_is_looked_for_when_all_of_it_is_in_memory() -> None:
    promotions = Recorder()
    Cache(promotions).prefetch_from_storage(
        handle("a"), None, array("q"), matched_prefix_tokens=array("q", [1])
    )
    assert promotions.begun == []


def test_what_came_and_what_is_over() -> None:
    promotions = Recorder()
    cache = Cache(promotions)
    assert cache.uses_storage
    assert cache.pop_prefetch_loaded_span("there") == (32, 16)  # type: ignore[arg-type]
    assert cache.pop_prefetch_loaded_span("not there") == (0, None)  # type: ignore[arg-type]
    cache.finish_storage_prefetch_admission("a", 32, None)  # type: ignore[arg-type]
    cache.discard_storage_prefetch_accounting("b")  # type: ignore[arg-type]
    cache.release_aborted_request("c")  # type: ignore[arg-type]
    assert promotions.released == ["a", "b", "c"]


def test_without_a_disk_nothing_waits() -> None:
    cache = Cache(None)
    assert not cache.uses_storage
    assert cache.check_prefetch_progress("a")  # type: ignore[arg-type]
    assert cache.pop_prefetch_loaded_span("a") == (0, None)  # type: ignore[arg-type]
    cache.prefetch_from_storage("a", None, array("q", [1]), matched_prefix_tokens=array("q"))  # type: ignore[arg-type]
    cache.release_aborted_request("a")  # type: ignore[arg-type]
