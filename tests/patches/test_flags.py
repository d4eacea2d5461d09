"""The --kv flags: in --help, parsed, refused by name, and carried to the scheduler."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError
from sglang_ext.patches import readiness
from sglang_ext.patches.cpu import runtime
from sglang_ext.patches.hooks.flags import ATTRIBUTE, add_flags, carried_config, carry_flags, read_flags
from sglang_ext.patches.process import PROCESS

GLOBAL = ["--radix-cache-backend", "global"]


def parser() -> argparse.ArgumentParser:
    """A command line with the few flags of SGLang's that ours look at."""
    parser = argparse.ArgumentParser(prog="server")
    parser.add_argument("--radix-cache-backend")
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--device")
    parser.add_argument("--sleep-on-idle", action="store_true")
    add_flags(None, parser)
    return parser


def read(*argv: str, environment: dict[str, str] | None = None) -> KvConfig | None:
    return read_flags(parser().parse_args([*argv]), environment or {})


def test_help_has_a_group_of_our_own_with_every_flag() -> None:
    text = parser().format_help()
    ours = text[text.index("\nsglang_ext:") :]
    for flag in KvConfig.options():
        assert flag.name in ours
        shown = f"Default: {flag.default_text}." in " ".join(ours.split())
        assert flag.is_switch or shown is (flag.default not in (None, "")), flag


def test_flags_become_settings() -> None:
    config = read(
        *GLOBAL, "--kv-dram-size", "2GiB", "--kv-block-size=32", "--kv-eviction-policy", "slru", "--kv-check"
    )
    assert config == KvConfig(dram_size=2**31, block_size=32, eviction_policy="slru", check=True)


def test_without_our_backend_there_are_no_settings() -> None:
    assert read() is None
    assert read("--radix-cache-backend", "flexkv", environment={"SGLANG_EXT_KV_DRAM_SIZE": "1GB"}) is None


def test_a_namespace_without_our_flags_keeps_the_defaults() -> None:
    assert read_flags(argparse.Namespace(radix_cache_backend="global"), {}) == KvConfig()
    assert read_flags(argparse.Namespace(), {}) is None


@pytest.mark.parametrize("argv", [["--kv-dram-size", "1GB"], ["--kv-check"]])
def test_our_flags_without_our_backend_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{argv[0]}: needs --radix-cache-backend global"):
        read(*argv)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--kv-dram-size", "1XB"], "argument --kv-dram-size: '1XB' is not a size"),
        (["--kv-block-size", "0"], "argument --kv-block-size: 0 is not within 1 to 1024"),
        (["--kv-eviction-policy", "fifo"], "argument --kv-eviction-policy: 'fifo' is not one of lru, slru"),
    ],
)
def test_a_bad_value_ends_the_command_with_the_flags_name(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(*GLOBAL, *argv)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_block_that_cuts_a_page_is_refused_before_the_model_loads() -> None:
    with pytest.raises(ConfigError, match="--kv-block-size"):
        read(*GLOBAL, "--page-size", "64")
    assert read(*GLOBAL, "--page-size", "8") == KvConfig()


def test_the_command_line_wins_over_the_environment() -> None:
    environment = {"SGLANG_EXT_KV_DRAM_SIZE": "1GB", "SGLANG_EXT_KV_BLOCK_SIZE": "64"}
    config = read(*GLOBAL, "--kv-block-size", "32", environment=environment)
    assert config == KvConfig(dram_size=10**9, block_size=32)


def test_on_a_cpu_the_flags_a_cpu_needs_are_defaults_which_the_user_can_change() -> None:
    assert runtime.active(os.environ)
    args = parser().parse_args([])
    assert (args.device, args.sleep_on_idle) == ("cpu", True)
    assert parser().parse_args(["--device", "cuda"]).device == "cuda"


PLACED: Mapping[str, Any] = {"announce_host": "127.0.0.1", "instance_id": "127.0.0.1:30000"}
"""The findings about a server that listens on loopback."""


def record(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"host": "127.0.0.1", "port": 30_000, **attributes})


def test_settings_ride_on_the_servers_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "problems", [])
    monkeypatch.setattr(PROCESS, "expected", [])
    server_args = record(_launch_command="...")
    carry_flags(server_args, object, parser().parse_args([*GLOBAL, "--kv-dram-size", "5"]))
    assert getattr(server_args, ATTRIBUTE)["dram_size"] == 5
    assert carried_config(server_args, {"SGLANG_EXT_KV_DRAM_SIZE": "7"}) == KvConfig(dram_size=5, **PLACED)


@pytest.mark.parametrize("flag", ["dp_size", "attn_dp_size", "attn_cp_size"])
@pytest.mark.parametrize(
    "chosen", [("--radix-cache-backend", "global"), ("--disaggregation-transfer-backend", "global")]
)
def test_replicas_in_one_server_are_refused_on_the_command_line(
    flag: str, chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROCESS, "problems", [])
    monkeypatch.setattr(PROCESS, "expected", [])
    given = parser()
    given.add_argument("--disaggregation-transfer-backend")
    args = given.parse_args([*chosen])
    carry_flags(record(**{flag: 1}, **vars(args)), object, args)
    named = f"{' '.join(chosen)} cannot be combined with --{flag.replace('_', '-')} above 1"
    served = flag in ("dp_size", "attn_dp_size") or chosen[0] == "--radix-cache-backend"
    with nullcontext() if served else pytest.raises(ConfigError, match=named):
        carry_flags(record(**{flag: 2}, **vars(args)), object, args)
    carry_flags(record(**{flag: 2}), object, given.parse_args([]))


def test_choosing_our_backend_needs_every_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "problems", ["'flags' is off"])
    with pytest.raises(readiness.NotReadyError, match="'flags' is off"):
        carry_flags(record(), object, parser().parse_args(GLOBAL))
    stock = record()
    carry_flags(stock, object, parser().parse_args([]))
    assert not hasattr(stock, ATTRIBUTE), "another backend does not care"


def test_an_engine_without_a_command_line_reads_the_environment() -> None:
    environment = {"SGLANG_EXT_KV_DRAM_SIZE": "7"}
    assert carried_config(record(_launch_command="Engine(model_path='m')"), environment) == KvConfig(
        dram_size=7, **PLACED
    )
    assert carried_config(record(), environment) == KvConfig(dram_size=7, **PLACED)


def test_lost_flags_are_noticed_in_the_scheduler() -> None:
    with pytest.raises(RuntimeError, match=r"from_cli_args did not take.*SGLANG_PLUGINS"):
        carried_config(record(_launch_command="--model-path m --kv-dram-size 1GB"), {})
