"""The router's cache of tokens reveals to no tenant the texts of another, nor gives it another's tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.keys import decode_tokens
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.tenancy.tenants import parse_keys
from sglang_ext.router.tokens.segments import Segmenter, TokenCache, key_of

A, B, OPS = "sk-tenant-a-1", "sk-tenant-b-1", "sk-operator-1"
SALT_A, SALT_B = (
    entry.salt for entry in parse_keys({"keys": [{"key": A, "tenant": "a"}, {"key": B, "tenant": "b"}]})
)
PINS = [f"{number:04}" for number in range(4000, 4200)]
SECRET = "4117"


def says(pin: str) -> Chat:
    return Chat({"messages": [{"role": "user", "content": f"Please note that my new PIN is {pin}."}]})


class Asked:
    """A tokenizer's ``encode`` that counts the characters given to it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.characters += sum(map(len, texts))
        return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]


def work_by_pin(tokenizer: Any, salt: str | None) -> dict[str, int]:
    """Characters that are tokenized for each PIN that an asker with this salt tries, after A has sent one."""
    asked = Asked(tokenizer)
    segmenter = Segmenter(asked, ["<|im_start|>", "<|im_end|>"], (), TokenCache(1 << 20))
    assert segmenter.by_segment

    def send(pin: str, of: str | None) -> int:
        before = asked.characters
        segmenter.encode(
            f"<|im_start|>user\nMy new PIN is {pin}.<|im_end|>\n<|im_start|>assistant\n", salt=of
        )
        return asked.characters - before

    send(SECRET, SALT_A)
    send("none", salt)  # the common part
    return {pin: send(pin, salt) for pin in PINS}


def test_who_tries_all_pins_learns_nothing_of_another_tenants(tokenizer: Any) -> None:
    work = work_by_pin(tokenizer, SALT_B)
    assert len(set(work.values())) == 1, "every PIN takes the same work, the right one too"


def test_the_right_pin_would_be_seen_without_salts(tokenizer: Any) -> None:
    """The twin: the measure finds it where the two are one tenant."""
    work = work_by_pin(tokenizer, SALT_A)
    assert [pin for pin, characters in work.items() if characters < max(work.values())] == [SECRET]


@pytest.mark.parametrize("path", ["chat", "text", "answer"])
async def test_salts_reach_the_cache_by_every_way(start_worker, start_router, path: str) -> None:
    """Prompts of conversations, plain ones, and answers from which sessions go on."""
    router = await start_router(await start_worker())
    cache = router.tokenizers.cache
    text = "My new PIN is 4117, and it is not to be known to others."
    namespace = (None, None)

    async def send(salt: str | None) -> int:
        """How many segments were found."""
        before = cache.hits
        if path == "answer":
            await router.tokenizers.continuations(lambda: {0: text}, [salt])
            return cache.hits - before
        prompt = PromptInput(namespace=(*namespace, salt), text=text)
        if path == "chat":
            prompt = PromptInput(namespace=(*namespace, salt), chat=says("4117"))
        await router.tokenizers.encode(Job(False, (prompt,)))
        return cache.hits - before

    assert await send(SALT_A) == 0
    assert await send(SALT_B) == 0
    assert await send(None) < await send(SALT_A), "the twin: of one tenant, they are found"


# Two texts with one XXH3-128: words of 8 bytes in one lane, whose changes make up for each other.
FILLER = ("the quick brown fox jumps over the lazy dog and then some more of it. " * 40)[:1600]


def same_xxh3() -> tuple[str, str]:
    found = []
    for first, second in (("vjy8dddd", " nqZeddd"), ("vjy8eddd", " nqZdddd")):
        found.append(FILLER[:128] + first + FILLER[136:576] + second + FILLER[584:])
    return found[0], found[1]


def test_a_text_never_gets_the_tokens_of_another_with_its_hash(tokenizer: Any) -> None:
    mine, theirs = same_xxh3()
    assert mine != theirs
    keys = {key_of(text.encode(), b"") for text in (mine, theirs)}
    assert len(keys) == 1, "the twin: only the texts differ"
    segmenter = Segmenter(Asked(tokenizer), ["<|im_start|>"], (), TokenCache(1 << 20))
    segmenter.encode(mine)
    tokens = [int(token) for token in decode_tokens(segmenter.encode(theirs))]
    assert tokens == tokenizer.encode(theirs, add_special_tokens=False)


async def test_tenants_get_times_of_the_router_in_steps(
    start_worker, start_router, client, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    entries = [{"key": A, "tenant": "a"}, {"key": OPS, "tenant": "ops", "admin": True}]
    keys.write_text(json.dumps({"keys": entries}))
    keys.chmod(0o600)
    worker = await start_worker()
    worker.end_details = {"prefill_time": 0.001}
    router = await start_router(worker, api_keys_file=str(keys))
    headers = {"authorization": f"Bearer {A}", "x-request-id": "mine"}
    body = {"text": "some words " * 50, "sampling_params": {"max_new_tokens": 1}}
    async with client.post(router.url + "/generate", json=body, headers=headers) as answer:
        assert answer.status == 200

    async def told(key: str) -> dict[str, float]:
        async with client.get(
            router.url + "/explain/mine", headers={"authorization": f"Bearer {key}"}
        ) as answer:
            seconds = (await answer.json())["seconds"]
            return {name: value for name, value in seconds.items() if isinstance(value, float)}

    mine, exact = await told(A), await told(OPS)
    assert {"tokenize", "parse", "route", "first_byte"} <= mine.keys() <= exact.keys()
    assert all(abs(value * 100 - round(value * 100)) < 1e-6 for value in mine.values())
    assert any(abs(value * 100 - round(value * 100)) > 1e-6 for value in exact.values()), "the twin"
