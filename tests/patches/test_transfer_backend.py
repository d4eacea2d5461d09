"""The backend `global` is a name, a class and a choice to SGLang, and chooses SGLang's caching flags."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.pd import kv_manager, kv_requests
from sglang_ext.patches.base import resolve
from sglang_ext.patches.hooks import transfer as patch

UTILS = "sglang.srt.disaggregation.utils"


def test_the_member_is_found_as_any_other() -> None:
    patch.add_member()
    patch.add_member()
    backends = resolve(f"{UTILS}.TransferBackend")
    member = backends("global")
    assert member is backends["GLOBAL"] is backends.GLOBAL
    assert [each.value for each in backends].count("global") == 1
    assert member == backends("global") != backends.FAKE
    assert repr(member) == "<TransferBackend.GLOBAL: 'global'>"
    assert patch.has_member()


def test_our_classes_for_our_member_and_stock_for_the_others() -> None:
    patch.add_member()
    backends, kinds = resolve(f"{UTILS}.TransferBackend"), resolve(f"{UTILS}.KVClassType")
    stock = resolve(f"{UTILS}.get_kv_class")
    member = backends("global")
    assert patch.kv_class(stock, member, kinds.MANAGER) is kv_manager.GlobalKVManager
    assert patch.kv_class(stock, member, kinds.SENDER) is kv_requests.GlobalKVSender
    assert patch.kv_class(stock, member, kinds.RECEIVER) is kv_requests.GlobalKVReceiver
    assert patch.kv_class(stock, member, kinds.BOOTSTRAP_SERVER) is kv_manager.GlobalKVBootstrapServer
    fake = patch.kv_class(stock, backends.FAKE, kinds.SENDER)
    assert fake.__name__ == "FakeKVSender"
    assert patch.kv_class(stock, member, kinds.KVARGS) is stock(backends.FAKE, kinds.KVARGS)


def arguments(mode: str, caching: str | None, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "disaggregation_mode": mode,
            "disaggregation_transfer_backend": "global",
            "disaggregation_decode_enable_radix_cache": False,
            "disaggregation_decode_retraction_backup": None,
            "radix_cache_backend": None,
            "disable_radix_cache": False,
            "kv_pd_caching": caching,
            **more,
        }
    )


@pytest.mark.parametrize(
    ("caching", "prefill", "decode"),
    [("basic", False, False), ("1", True, False), ("2", True, True), ("3", True, True), (None, True, True)],
)
def test_who_keeps_kv(caching: str | None, prefill: bool, decode: bool) -> None:
    for mode, keeps in (("prefill", prefill), ("decode", decode)):
        args = arguments(mode, caching)
        patch.choose_caches(object, args)
        assert args.radix_cache_backend == ("global" if keeps else None)
        assert args.disable_radix_cache is not keeps
        assert args.disaggregation_decode_enable_radix_cache is (keeps and mode == "decode")
        assert args.disaggregation_decode_retraction_backup == ("cpu_tensor" if mode == "decode" else None)


def test_other_servers_are_left_alone() -> None:
    for more in ({"disaggregation_transfer_backend": "mooncake"}, {"disaggregation_mode": "null"}):
        args = arguments("decode", "1", **more)
        before = dict(vars(args))
        patch.choose_caches(object, args)
        assert vars(args) == before


def test_a_cache_on_a_server_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-pd-caching"):
        patch.choose_caches(object, arguments("decode", "1", radix_cache_backend="global"))


def test_a_decode_server_that_keeps_nothing_makes_no_answer_durable() -> None:
    acked = {"kv_durability": "acked", "kv_dram_size": 1 << 20, "kv_disk_path": "/kv"}
    with pytest.raises(ConfigError, match="makes no answer durable") as refused:
        patch.choose_caches(object, arguments("decode", "1", **acked))
    assert refused.value.field == "--kv-durability"
    for mode, caching in (("decode", "2"), ("prefill", "1")):
        patch.choose_caches(object, arguments(mode, caching, **acked))


@pytest.mark.parametrize("installed", ["0.5.21", "0.5.22", "0.5.23"])
def test_decode_keeps_no_cache_beside_a_draft_where_sglang_refuses_it(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "installed_sglang_version", lambda: installed)
    drafting = arguments("decode", "3", speculative_algorithm="EAGLE")
    if installed == "0.5.23":
        patch.choose_caches(object, drafting)
        assert drafting.disaggregation_decode_enable_radix_cache
        return
    with pytest.raises(ConfigError, match="keep no cache with --speculative-algorithm EAGLE") as refused:
        patch.choose_caches(object, drafting)
    assert refused.value.field == "--kv-pd-caching"
    for mode, caching in (("prefill", "3"), ("decode", "1")):
        patch.choose_caches(object, arguments(mode, caching, speculative_algorithm="EAGLE"))


def test_a_retraction_backup_of_the_users_choice_stays() -> None:
    args = arguments("decode", "3", disaggregation_decode_retraction_backup="host_pool")
    patch.choose_caches(object, args)
    assert args.disaggregation_decode_retraction_backup == "host_pool"


def test_a_server_that_keeps_its_settings_can_still_be_forked() -> None:
    """With metrics, it cannot once prometheus_client is imported (`patches/cpu/fork.py`)."""
    code = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from sglang_ext.patches.process import PROCESS\n"
        "from sglang_ext.patches.hooks import transfer\n"
        "args = SimpleNamespace(disaggregation_transfer_backend='global', radix_cache_backend='global')\n"
        "args.host, args.port = '127.0.0.1', 30000\n"
        "transfer.keep_settings(args, object, None)\n"
        "assert PROCESS.config is not None\n"
        "assert 'prometheus_client' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("prompt", "most", "given", "required"),
    [
        (7_600, 8, 0, 7_608),
        (7_600, 8, 3, 7_608),
        (7_600, 512, 0, 8_112),
        (7_000, 4_000, 0, 11_000),
    ],
)
def test_no_more_is_reserved_than_an_answer_can_take(
    prompt: int, most: int, given: int, required: int
) -> None:
    """SGLang reserves 512 slots for each answer: a pool of 8,000 never has room for 7,600 and 512."""
    queues = resolve("sglang.srt.disaggregation.decode.DecodePreallocQueue")
    queue = SimpleNamespace(
        transfer_backend=SimpleNamespace(value="global"),
        num_reserved_decode_tokens=512,
        _rebootstrap_prefill_len=lambda _: prompt,
    )
    req = SimpleNamespace(sampling_params=SimpleNamespace(max_new_tokens=most), output_ids=[1] * given)
    stock = queues._required_admission_tokens
    assert patch.required_for_admission(stock, queue, req, prompt, 0, 0) == required
    queue.transfer_backend.value = "mooncake"
    assert patch.required_for_admission(stock, queue, req, prompt, 0, 0) >= prompt + 512
