"""Command lines of HiCache, LMCache and SGLang's router, as this package's."""

from __future__ import annotations

import argparse
import re
import shlex
import warnings
from pathlib import Path

import pytest

from sglang_ext.cluster.command import ClusterConfig
from sglang_ext.config import KvConfig
from sglang_ext.migrate.command import main
from sglang_ext.migrate.command_line import UnknownCommandError, migrate
from sglang_ext.migrate.gateway import GATEWAY, POLICIES
from sglang_ext.migrate.lmcache import LMCACHE
from sglang_ext.migrate.rules import MANY, NoEqualError, Rule
from sglang_ext.migrate.server_flags import KEPT, SERVER_FLAGS
from sglang_ext.migrate.tables import filled
from sglang_ext.router import RouterConfig
from sglang_ext.router.policies import POLICIES as OURS

HERE = Path(__file__).parent
CACHES = re.compile(
    r"hicache|hierarch|lmcache|radix|kv-events|hisparse|disaggregation|unified|kvcache|cache-external"
)
SAMPLES = (
    "1",
    "64",
    "auto",
    "lru",
    "file",
    "mooncake",
    "/data/kv",
    "true",
    "cache_aware",
    "http://a:1",
    "a:4317",
)


def server_flags() -> set[str]:
    """All flags of the installed SGLang."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that a CPU has not
        from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {name for action in parser._actions for name in action.option_strings if name.startswith("--")}


def words_of(rule: Rule) -> list[list[str]]:
    """The outcomes of a flag for some values that it may have."""
    found = []
    for value in SAMPLES:
        try:
            found.append(rule.apply([value] if rule.values else []))
        except (NoEqualError, ValueError):
            continue
    return found


def flags_in(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_each_flag_of_the_server_for_caches_has_a_rule() -> None:
    """A new flag of a new SGLang fails here until it has a rule."""
    there = {name for name in server_flags() if CACHES.search(name)}
    ours = {flag.name for flag in KvConfig.options()}
    missing = there - SERVER_FLAGS.keys() - KEPT - {"--lmcache-config-file"} - ours
    assert not missing


@pytest.mark.parametrize(
    ("file", "rules"), [("gateway_flags.txt", GATEWAY), ("lmcache_settings.txt", LMCACHE)]
)
def test_each_flag_of_the_others_has_a_rule(file: str, rules: dict[str, Rule]) -> None:
    """The lists name the flags of the time when they were written, in their own words."""
    names = (HERE / file).read_text(encoding="utf-8").split()
    assert set(names) <= rules.keys()
    assert len(names) > 80


def test_whatever_is_printed_exists() -> None:
    router = {flag.name for flag in RouterConfig.options()}
    server = server_flags() | {flag.name for flag in KvConfig.options()}
    for rules, known in ((GATEWAY, router), (SERVER_FLAGS, server), (LMCACHE, server)):
        printed = {flag for rule in rules.values() for words in words_of(rule) for flag in flags_in(words)}
        assert printed <= known
        assert printed
        for name, rule in rules.items():
            if not words_of(rule):
                with pytest.raises(NoEqualError, match=r"\w{3}"):
                    rule.apply(["1"] if rule.values else [])
            assert rule.note or rule.others or rule.new.startswith("`--"), name
    assert set(POLICIES.values()) <= set(OURS)


@pytest.mark.parametrize("name", [*SERVER_FLAGS, *KEPT])
def test_one_flag_of_the_server(name: str) -> None:
    """It is changed, left out or named; the model stays."""
    rule = SERVER_FLAGS.get(name)
    value = [] if rule is not None and rule.values == 0 else ["1"]
    made = migrate(["python", "-m", "sglang.launch_server", name, *value, "--model-path", "M"])
    assert made.words[:2] == ["sglang-ext", "serve"]
    assert shlex.join(made.words).count("--model-path M") == 1
    assert (name in made.words) == (
        rule is None or name in ("--radix-cache-backend", "--disaggregation-transfer-backend")
    )
    if name == "--hicache-ratio":
        assert "--kv-dram-size SIZE" in made.lacking[name]


@pytest.mark.parametrize("name", GATEWAY)
def test_one_flag_of_the_router(name: str) -> None:
    rule = GATEWAY[name]
    for value in SAMPLES:
        old = [f"--{name}", *([value] if rule.values else [])]
        made = migrate(["sglang-router", "launch", *old, "--worker-urls", "http://w:1"])
        both = migrate(
            [
                "python",
                "-m",
                "sglang_router.launch_server",
                *(f"--router-{word[2:]}" if word.startswith("--") else word for word in old),
            ]
        )
        assert made.words[:3] == ["sglang-ext", "router", "--worker-urls"]
        assert "http://w:1" in made.words
        assert both.words[:2] == ["sglang-ext", "cluster"]
        assert {f"--router-{flag[2:]}" for flag in made.lacking} == both.lacking.keys()


@pytest.mark.parametrize("key", LMCACHE)
@pytest.mark.parametrize("form", ["variable", "file"])
def test_one_setting_of_lmcache(
    key: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "LRU" if key == "cache_policy" else "/data/kv" if key == "local_disk" else "1"
    line = "sglang serve --model-path M --enable-lmcache"
    if form == "variable":
        line = f"LMCACHE_{key.upper()}={value} {line}"
    else:
        (tmp_path / "lmcache.yaml").write_text(f"{key}: {value}\n")
        line += f" --lmcache-config-file {tmp_path / 'lmcache.yaml'}"
    status = main([line])
    printed, said = capsys.readouterr()
    assert printed.startswith("sglang-ext serve --model-path M --radix-cache-backend global")
    assert "LMCACHE" not in printed
    assert (f"{key} has no equal: " in said) == (status == 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "python3 -m sglang.launch_server --model-path M --enable-hicache --hicache-size=64 --tp 2",
            "sglang-ext serve --model-path M --radix-cache-backend global --kv-dram-size 64GB --tp 2",
        ),
        (
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=/data CUDA_VISIBLE_DEVICES=1 sglang serve "
            "--model-path M --enable-hierarchical-cache --hicache-storage-backend file",
            "CUDA_VISIBLE_DEVICES=1 sglang-ext serve --model-path M --radix-cache-backend global "
            "--kv-disk-path /data-kv --kv-load-policy hicache=layer_first:/data --kv-dram-size 4GB",
        ),
        (
            "sglang serve --model-path M --enable-hierarchical-cache --hicache-storage-backend file "
            "--hicache-size 8 --hicache-mem-layout page_first --hicache-io-backend direct",
            "sglang-ext serve --model-path M --radix-cache-backend global --kv-disk-path /tmp/hicache-kv "
            "--kv-dram-size 8GB --kv-load-policy hicache=page_first_direct:/tmp/hicache",
        ),
        (
            "env LMCACHE_MAX_LOCAL_CPU_SIZE=2.5 LMCACHE_LOCAL_DISK=file:///data/kv/ "
            "sglang serve --model-path M --enable-lmcache",
            "sglang-ext serve --model-path M --radix-cache-backend global --kv-dram-size 2.5GB "
            "--kv-disk-path /data/kv",
        ),
        (
            "python -m sglang.launch_server --model-path M --disaggregation-mode decode "
            "--disaggregation-transfer-backend mooncake_tcp",
            "sglang-ext serve --model-path M --disaggregation-mode decode "
            "--disaggregation-transfer-backend global --kv-transports tcp",
        ),
        (
            "python -m sglang.launch_server --model-path M --disable-radix-cache",
            "sglang-ext serve --model-path M --disable-radix-cache",
        ),
        (
            "smg launch --pd-disaggregation --prefill http://p:1 8998 --decode http://d:2 "
            "--policy cache_aware",
            "sglang-ext router --worker-urls http://p:1 http://d:2 --policy prompt-tree",
        ),
        (
            "python -m sglang_router.launch_server --model-path M --dp-size 2 --port 9 --tp 2 "
            "--router-policy round_robin --router-disable-retries",
            "sglang-ext cluster --model-path M --colocated 2 --port 9 "
            "--router-args '--policy round-robin --max-retries 0' -- --tp 2",
        ),
    ],
)
def test_whole_lines(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([old]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed == new
    words = shlex.split(printed)
    if words[:2] == ["sglang-ext", "router"]:
        RouterConfig.parse(words[2:])
    if words[:2] == ["sglang-ext", "cluster"]:
        names = {flag.name for flag in ClusterConfig.options()}
        assert {"--colocated", "--router-args", "--port"} <= names


@pytest.mark.parametrize(
    "line", ["", "vllm serve M", "python serve.py", "numactl -m 0 sglang serve", "echo '"]
)
def test_what_is_no_server_or_router_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([line]) == 2
    assert "sglang-ext migrate: " in capsys.readouterr().err


def test_what_is_unknown_is_named() -> None:
    made = migrate(["sglang-router", "launch", "--policy", "manual", "--new-flag", "3", "x"])
    assert made.words == ["sglang-ext", "router"]
    assert "--policy session" in made.lacking["--policy"]
    assert "--new-flag" in made.lacking
    file = ["--hicache-storage-backend", "file", "--hicache-mem-layout", "page_head"]
    assert "page_head" in migrate(["sglang", "serve", *file]).lacking["--hicache-mem-layout"]
    assert "brand_new" in migrate(["sglang", "serve"], {"brand_new": "1"}).lacking
    with pytest.raises(UnknownCommandError, match="sglang-router"):
        migrate(["env"])


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "\xff"])
def test_a_file_that_is_none_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_bytes(text.encode("latin-1"))
    assert main([f"sglang serve --lmcache-config-file {path}"]) == 2
    assert main([f"LMCACHE_CONFIG_FILE={path}.none sglang serve"]) == 2
    assert str(path) in capsys.readouterr().err


def test_the_page_has_the_tables() -> None:
    page = (HERE.parents[1] / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert filled(page) == page, "run python -m sglang_ext.migrate.tables"
    assert page.count("|---|") >= 3
    assert all(rule.values in (0, 1, MANY) for rule in GATEWAY.values())
