"""The flags of `sglang-ext cluster` and their refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sglang_ext.cluster.config import ClusterConfig, flag_value, parse_instance_args
from sglang_ext.errors import ConfigError


def parse(*arguments: str, server_args: tuple[str, ...] = ()) -> ClusterConfig:
    return dataclasses.replace(ClusterConfig.parse(arguments), server_args=server_args)


def test_flags_become_fields() -> None:
    config = parse(
        *("--model-path", "m", "--colocated", "2", "--port", "1234", "--policy", "least-load"),
        *("--instance-args", "1: --max-total-tokens 2000", "--instance-args", "1:--page-size=16"),
        *("--router-args", "--block-size 32", "--restart", "3", "--log-dir", "logs"),
        server_args=("--kv-dram-size", "4GiB"),
    )
    assert (config.model_path, config.colocated, config.port, config.policy) == ("m", 2, 1234, "least-load")
    assert config.flags_of(0) == ("--kv-dram-size", "4GiB")
    assert config.flags_of(1) == ("--kv-dram-size", "4GiB", "--max-total-tokens", "2000", "--page-size=16")
    assert config.router_args == ("--block-size", "32")
    assert config.restart == 3
    assert str(config.log_dir) == "logs"


def test_defaults_are_those_of_the_dataclass() -> None:
    assert parse("--model-path", "m") == ClusterConfig(model_path="m")


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"model_path": ""}, "--model-path"),
        ({"colocated": 0}, "--colocated"),
        ({"port": 65536}, "--port"),
        ({"restart": -1}, "--restart"),
        ({"start_timeout_secs": 0.0}, "--time-limits start"),
        ({"stop_timeout_secs": float("nan")}, "--time-limits stop"),
        ({"instance_args": {1: ("--x",)}}, "--instance-args"),
        ({"server_args": ("--port", "1")}, "--port"),
        ({"server_args": ("--model-path=x",)}, "--model-path"),
        ({"server_args": ("--api-key", "secret")}, "--api-key"),
        ({"instance_args": {0: ("--host", "::")}}, "--host"),
        ({"router_args": ("--policy", "least-load")}, "--policy"),
    ],
)
def test_bad_values_are_refused_by_flag(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(**{"model_path": "m", **values})
    assert caught.value.field == flag
    assert flag in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["--page-size 16", "x: --page-size 16", "-1: --x", ": --x", "0: 'open"])
def test_instance_args_say_how_to_write_them(text: str) -> None:
    with pytest.raises(ConfigError, match="--instance-args"):
        parse_instance_args([text])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), None),
        (("--other", "3"), None),
        (("--tp", "2"), "2"),
        (("--tp=2",), "2"),
        (("--tp", "2", "--tp-size", "4"), "4"),
        (("--tp", "--other"), ""),
        (("--tp",), ""),
    ],
)
def test_value_of_a_flag(arguments: tuple[str, ...], expected: str | None) -> None:
    assert flag_value(arguments, "--tp", "--tp-size") == expected


def test_prefill_and_decode_go_together() -> None:
    config = parse("--model-path", "m", "--prefill", "1", "--decode", "2")
    assert (config.colocated, config.servers, config.ports) == (0, 3, 9)
    assert [config.role_of(index) for index in range(3)] == [("prefill", 0), ("decode", 0), ("decode", 1)]
    assert parse("--model-path", "m").colocated == 1
    for lonely in ("--prefill", "--decode"):
        with pytest.raises(ConfigError, match="neither serves without the other"):
            parse("--model-path", "m", lonely, "1")
