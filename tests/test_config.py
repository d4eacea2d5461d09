"""The settings of the cache: parsing, refusals by name, and the same meaning from flag and environment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.config import KvConfig, check_block_size, parse_id
from sglang_ext.errors import ConfigError
from sglang_ext.flags import parse_count, parse_size, parse_switch


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("512MB", 512 * 10**6),
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 10**8),
        ("16K", 16_000),
        ("16 KiB", 16 * 2**10),
        ("2TB", 2 * 10**12),
        ("7B", 7),
        (" 7 ", 7),
    ],
)
def test_a_size_is_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1X", "1.5", "1,5GB", "4GBs", "0x10", "1e9", "٤GB", "inf"])
def test_what_is_not_a_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="512MB, 4GB, 4GiB"):
        parse_size(text)


@given(st.integers(0, 2**60))
def test_a_number_of_bytes_is_itself(size: int) -> None:
    assert parse_size(str(size)) == size


@pytest.mark.parametrize("text", ["-1", "1.0", "", "x", "1 2", "٤"])
def test_a_count_is_a_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)


def test_a_switch_is_on_or_off() -> None:
    assert [parse_switch(text) for text in ("1", "true", "YES", "on")] == [True] * 4
    assert [parse_switch(text) for text in ("0", "False", "no", "off", "")] == [False] * 5
    with pytest.raises(ValueError, match="neither 1 nor 0"):
        parse_switch("maybe")


@pytest.mark.parametrize("text", ["", "a b", "a\n", "é", "x" * 201])
def test_a_name_has_visible_characters_only(text: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        parse_id(text)


def test_without_settings_there_is_no_dram_tier() -> None:
    config = KvConfig()
    assert (config.dram_size, config.block_size, config.eviction_policy) == (0, 16, "lru")
    assert config.instance_id is None
    assert not config.check


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("block_size", 0, "--kv-block-size"),
        ("block_size", 1025, "--kv-block-size"),
        ("block_size", "16", "--kv-block-size"),
        ("block_size", True, "--kv-block-size"),
        ("dram_size", -1, "--kv-dram-size"),
        ("dram_size", 1.5, "--kv-dram-size"),
        ("dram_size", None, "--kv-dram-size"),
        ("eviction_policy", "fifo", "--kv-eviction-policy"),
        ("instance_id", "", "--kv-instance-id"),
        ("load_min_tokens", -1, "--kv-load-policy min-tokens"),
        ("check", 1, "--kv-check"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_flag(field: str, value: Any, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        KvConfig.from_values({field: value})
    assert caught.value.field == flag


@pytest.mark.parametrize(
    ("durability", "behind"), [("off", None), ("disk", None), ("acked", 0), ("acked:0", 0), ("acked:12", 12)]
)
def test_how_many_answers_may_be_behind(durability: str, behind: int | None) -> None:
    config = KvConfig(dram_size=10, disk_path="/kv", durability=durability)
    assert config.acked_behind == behind
    assert config.writes_disk is (durability != "off")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"durability": "acked:"}, "acked:N"),
        ({"durability": "acked:-1"}, "acked:N"),
        ({"durability": "disk:1"}, "acked:N"),
        ({"durability": "acked"}, "Give --kv-disk-path too"),
    ],
)
def test_a_durability_that_cannot_be_is_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        KvConfig.from_values({"dram_size": 10, **values})
    assert refused.value.field == "--kv-durability"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"dram_size": 10, "dram_for_others": 5}, "Give --kv-router and --kv-dram-size too"),
        ({"router": "http://a:1", "dram_for_others": 5}, "Give --kv-router and --kv-dram-size too"),
        ({"router": "http://a:1", "dram_size": 10, "dram_for_others": 11}, "Give a part of --kv-dram-size"),
    ],
)
def test_dram_for_others_that_cannot_be_is_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        KvConfig.from_values(values)
    assert refused.value.field == "--kv-dram-size for-others"


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'dram'.*dram_size"):
        KvConfig.from_values({"dram": 1})


def test_values_survive_the_way_to_another_process() -> None:
    config = KvConfig(dram_size=10, block_size=32, eviction_policy="slru", instance_id="a:1", check=True)
    assert KvConfig.from_values(config.values()) == config


def test_every_flag_has_one_name_on_the_command_line_and_one_in_the_environment() -> None:
    by_field = {flag.field: flag for flag in KvConfig.flags()}
    assert by_field["dram_size"].name == "--kv-dram-size"
    assert by_field["dram_size"].dest == "kv_dram_size"
    assert by_field["dram_size"].variable == "SGLANG_EXT_KV_DRAM_SIZE"
    assert [field for field, flag in by_field.items() if flag.is_switch] == ["check", "advisory_compute"]


def test_the_environment_speaks_where_the_command_line_is_silent() -> None:
    environment = {"SGLANG_EXT_KV_DRAM_SIZE": "4GB", "SGLANG_EXT_KV_CHECK": "1", "HOME": "/"}
    config = KvConfig.from_user({"dram_size": 7}, environment)
    assert config.dram_size == 7
    assert config.check


def test_a_bad_variable_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="SGLANG_EXT_KV_DRAM_SIZE: '4XB' is not a size"):
        KvConfig.environment_values({"SGLANG_EXT_KV_DRAM_SIZE": "4XB"})
    with pytest.raises(ConfigError, match="unknown variable SGLANG_EXT_KV_DRAM"):
        KvConfig.environment_values({"SGLANG_EXT_KV_DRAM": "4GB"})


@pytest.mark.parametrize(("block", "page"), [(16, 1), (16, 16), (64, 16), (48, 16)])
def test_a_block_of_whole_pages_fits(block: int, page: int) -> None:
    check_block_size(KvConfig(block_size=block), page)


@pytest.mark.parametrize(("block", "page", "fitting"), [(16, 64, 64), (20, 16, 32), (1, 2, 2)])
def test_a_block_that_cuts_a_page_is_refused_with_one_that_fits(block: int, page: int, fitting: int) -> None:
    with pytest.raises(ConfigError, match=f"--page-size {page}. Use --kv-block-size {fitting}$"):
        check_block_size(KvConfig(block_size=block), page)
