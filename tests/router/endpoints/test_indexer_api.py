"""The index, asked over HTTP by another gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.router.endpoints.indexer_api import tokens_by_medium
from sglang_ext.router.policies import Match
from sglang_ext.tiers import Tier

TOKENS = list(range(100, 164))


async def ask(client, router, key: str = "", **body: Any) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with client.post(router.url + "/query", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_each_instance_is_listed_with_its_media(start_worker, start_router, client) -> None:
    one, two = await start_worker(name="m"), await start_worker(name="m")
    router = await start_router(one, two)
    router.trees.confirm(("tokens", None, None, None), encode_tokens(TOKENS), one.url)
    status, told = await ask(client, router, model="m", token_ids=[*TOKENS, 1, 2], block_size=16)
    none = {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}}
    held = {"longest_matched": 64, "GPU": 64, "CPU": 64, "DISK": 64, "DP": {"0": 64}}
    assert (status, told) == (200, {"default": {one.url: held, two.url: none}})
    assert (await ask(client, router, token_ids=TOKENS[:40], block_size=64, instance_id=one.url))[1] == {
        "default": {one.url: none}
    }
    assert (await ask(client, router, token_ids=TOKENS, lora_name="x", instance_id=one.url))[1] == {
        "default": {one.url: none}
    }


def test_a_medium_has_what_is_in_it_or_in_a_nearer_one() -> None:
    told = tokens_by_medium(Match(64, below={Tier.DRAM: 16, Tier.DISK: 32}), 16)
    assert told == {"longest_matched": 64, "GPU": 16, "CPU": 32, "DISK": 64, "DP": {"0": 64}}


async def test_a_tenant_learns_nothing_of_anothers_prompts(
    start_worker, start_router, client, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text("".join(f'[[keys]]\nkey = "key-of-{name}"\ntenant = "{name}"\n' for name in ("a", "b")))
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=str(keys))
    body = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 1}}
    async with client.post(
        router.url + "/generate", json=body, headers={"authorization": "Bearer key-of-a"}
    ) as answer:
        assert answer.status == 200
    found = {}
    for name in ("a", "b"):
        status, told = await ask(client, router, f"key-of-{name}", token_ids=TOKENS)
        assert (status, list(told)) == (200, [name])
        found[name] = told[name][worker.url]["longest_matched"]
    assert found == {"a": 64, "b": 0}
    assert (await ask(client, router, "key-of-b", token_ids=TOKENS, tenant_id="a"))[0] == 403
    status, told = await ask(client, router, "key-of-b", token_ids=TOKENS, cache_salt="kv-tenant-of-a")
    assert (status, told["error"]["param"]) == (400, "cache_salt")
    assert (await ask(client, router, token_ids=TOKENS))[0] == 401


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "token_ids"),
        ({"token_ids": "x"}, 400, "token_ids"),
        ({"token_ids": [10**9]}, 400, "token_ids"),
        ({"token_ids": [1], "block_size": 0}, 400, "block_size"),
        ({"token_ids": [1], "model": "other"}, 404, "model"),
        ({"token_ids": [1], "lora_name": 3}, 400, "lora_name"),
    ],
)
async def test_what_is_wrong_is_named(start_worker, start_router, client, body, status, param) -> None:
    router = await start_router(await start_worker())
    got, told = await ask(client, router, **body)
    assert (got, told["error"]["param"].partition("[")[0]) == (status, param)
