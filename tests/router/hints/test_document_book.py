"""The book of documents: budgets, expiry, and where they are held back."""

from __future__ import annotations

import msgspec
import pytest

from sglang_ext.errors import InternalError
from sglang_ext.router.api.documents import Document
from sglang_ext.router.hints.document_book import (
    LEAST_BLOCKS,
    DocumentBook,
    DocumentEntry,
    DocumentLimits,
    Lease,
    places,
)
from sglang_ext.router.hints.hint import Hint

BLOCK = 16


def entry(
    id: str, scope: str = "a", *, blocks: int = LEAST_BLOCKS, instances: int = 1, expires: float = 100.0
) -> DocumentEntry:
    hint = Hint(scope, ("tokens", None, None, None), id.encode().ljust(4) * blocks * BLOCK)
    document = Document(scope, id, "input_ids", msgspec.Raw(b"[]"), expires, instances=instances)
    return DocumentEntry(document, f"pin {scope} {id}", hint)


def test_a_tenant_is_held_to_its_budget_and_all_to_theirs() -> None:
    book = DocumentBook(DocumentLimits(blocks=250, tenant_blocks=150, block_size=BLOCK))
    first = entry("one", blocks=100)
    assert book.cost(first) == 100
    assert book.obstacle(first) is None
    book.put(first)
    assert "your documents has 50 left" in str(book.obstacle(entry("two", blocks=51)))
    assert "takes 102 blocks" in str(book.obstacle(entry("two", blocks=51, instances=2)))
    assert book.obstacle(entry("one", blocks=150)) is None, "it goes for the one of its id"
    assert book.obstacle(entry("one", "b", blocks=150)) is None, "another tenant has its own"
    book.put(entry("one", "b", blocks=150))
    why = str(book.obstacle(entry("one", "c", blocks=32)))
    assert "the budget of documents has 0 left" in why
    book.remove(first)
    assert book.obstacle(entry("one", "c", blocks=100)) is None
    book.check()


def test_short_documents_are_bounded_in_number() -> None:
    book = DocumentBook(DocumentLimits(blocks=10 * LEAST_BLOCKS, tenant_blocks=4 * LEAST_BLOCKS))
    for number in range(4):
        short = entry(str(number), blocks=1)
        assert book.obstacle(short) is None
        book.put(short)
    assert book.obstacle(entry("5", blocks=1)) is not None


def test_each_tenant_has_its_own_names() -> None:
    book = DocumentBook(DocumentLimits())
    mine, theirs = entry("d", "a"), entry("d", "b")
    assert (book.put(mine), book.put(theirs)) == (None, None)
    assert (book.find("a", "d"), book.find("b", "d"), book.find("c", "d")) == (mine, theirs, None)
    other = entry("c", "a")
    book.put(other)
    assert book.of("a") == [other, mine]
    newer = entry("d", "a")
    assert book.put(newer) is mine
    book.remove(mine)
    assert book.find("a", "d") is newer, "a replaced instance takes nothing along"


def test_what_has_lived_long_enough_is_forgotten() -> None:
    book = DocumentBook(DocumentLimits())
    short, long = entry("short", expires=10.0), entry("long", expires=20.0)
    book.put(short)
    book.put(long)
    assert book.expire(9.9) == []
    assert book.expire(10.0) == [short]
    assert list(book) == [long]


def test_what_was_deleted_is_remembered_until_it_would_have_expired() -> None:
    book = DocumentBook(DocumentLimits())
    known = entry("d", expires=20.0)
    book.put(known)
    deleted = known.document.deleted(5.0, 5.0)
    assert (deleted.is_deleted, deleted.stamp, deleted.expires) == (True, 5000, 20.0)
    assert book.bury(deleted) is known
    assert (book.find("a", "d"), book.newest(("a", "d")), book.documents()) == (None, deleted, [deleted])
    book.check()
    assert book.expire(20.0) == []
    assert book.documents() == []
    book.bury(deleted)
    book.put(known)
    assert book.documents() == [known.document], "it was registered again"
    book.check()


def test_a_restarted_instance_holds_nothing_back_until_the_hint_is_sent_again() -> None:
    book = DocumentBook(DocumentLimits())
    known = entry("d", blocks=100, instances=2)
    known.leases = {"one": Lease(50.0, sent=True), "two": Lease(50.0, sent=True)}
    book.put(known)
    assert (book.pinned(), book.pinned("one")) == (200, 100)
    book.again("one")
    assert (book.pinned(), book.pinned("one")) == (100, 0)
    assert known.leases["one"].due == 0.0
    book.again_for(known)
    assert (known.leases["two"].due, known.leases["two"].sent) == (0.0, True)


def test_damage_is_seen() -> None:
    book = DocumentBook(DocumentLimits())
    known = entry("d")
    book.put(known)
    book.check()
    known.leases = {"one": Lease(), "two": Lease()}
    with pytest.raises(InternalError, match="2 instances"):
        book.check()
    known.leases, known.hint = {"one": Lease()}, None
    with pytest.raises(InternalError, match="not known"):
        book.check()
    known.leases = {}
    twin = entry("e")
    twin.pin = known.pin
    book.put(twin)
    with pytest.raises(InternalError, match="two documents"):
        book.check()


@pytest.mark.parametrize(
    ("wanted", "now", "usable", "held", "pinned", "chosen"),
    [
        (1, (), ("a", "b"), {}, {}, ("a",)),
        (1, (), ("a", "b"), {"b": 64}, {}, ("b",)),
        (1, (), ("a", "b"), {}, {"a": 9}, ("b",)),
        (1, (), ("a", "b"), {"a": 64}, {"a": 9}, ("a",)),
        (1, ("a",), ("a", "b"), {"b": 64}, {}, ("a",)),  # placed documents stay in place
        (1, ("a",), ("b",), {}, {}, ("b",)),
        (2, ("a",), ("a", "b", "c"), {"c": 64}, {}, ("a", "c")),
        (3, (), ("a",), {}, {}, ("a",)),
        (1, ("a", "b"), ("a", "b"), {}, {}, ("a",)),
        (1, (), (), {}, {}, ()),
    ],
)
def test_places(wanted, now, usable, held, pinned, chosen) -> None:
    assert places(wanted, now, usable, held, pinned) == chosen
