"""The plugin in fresh processes: everything took, or the start is refused by name."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sglang_ext import launch_server
from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError
from sglang_ext.patches import versions
from sglang_ext.patches.cpu import runtime

pytestmark = pytest.mark.slow

SCENARIOS = Path(__file__).with_name("plugin_scenarios.py")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in (runtime.ACTIVE, "SGLANG_PLUGINS")
    }
    with tempfile.TemporaryDirectory() as scratch:  # torch leaves folders where it finds TMPDIR
        return subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            env={**inherited, "TMPDIR": scratch, **environment},
            capture_output=True,
            text=True,
            timeout=500,  # a guard against hanging: to import SGLang takes a busy machine minutes
        )


NAMES = (
    *("taken", "broken_hook", "outdated_hook", "outdated_cpu_patch", "excluded"),
    *("untested_version", "untested_version_allowed", "unloadable"),
)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """The result of each scenario."""
    done = run(str(SCENARIOS), *NAMES)
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == set(NAMES)
    return result


def test_every_hook_takes_and_flags_reach_the_scheduler(found: dict[str, Any]) -> None:
    taken = found["taken"]
    assert "global" in taken["backends"]
    assert taken["patches"]
    assert all(taken["patches"].values()), taken["patches"]
    assert taken["carried"]["dram_size"] == 3_000_000
    assert taken["device"] == "cpu"
    assert not taken["stock has ours"]
    ours = taken["help"][taken["help"].index("\nsglang_ext:") :]
    assert all(flag.name in ours for flag in KvConfig.options())
    assert taken["stock backend"] is None


def test_a_hook_that_sglang_could_not_apply_stops_the_start_of_our_backend_only(
    found: dict[str, Any],
) -> None:
    broken = found["broken_hook"]
    for who in ("launcher", "scheduler", "command line"):
        assert "NotReadyError" in broken[who], who
        assert "'scheduler_calls' did not take" in broken[who], who
        assert "Scheduler._get_new_batch_prefill_raw" in broken[who], who
    assert broken["stock"] == ""


def test_a_hook_on_a_function_that_has_changed_is_not_applied(found: dict[str, Any]) -> None:
    outdated = found["outdated_hook"]
    assert "'scheduler_calls' does not fit sglang" in outdated["global"]
    assert "Scheduler.ingest_requests: source differs" in outdated["global"]
    assert outdated["stock"] == ""
    assert not outdated["hooked"]


def test_a_cpu_patch_that_does_not_fit_ends_the_process_with_its_name(found: dict[str, Any]) -> None:
    message = found["outdated_cpu_patch"]["exit"]
    assert "patch 'paged_allocator' does not fit sglang" in message
    assert "alloc_extend_kernel: source differs" in message


def test_an_untested_sglang_is_refused_with_those_tested(found: dict[str, Any]) -> None:
    message = found["untested_version"]["exit"]
    assert f"sglang 9.9.9 is not tested with this package. Tested: {versions.tested_versions()}" in message
    assert versions.ALLOW_UNTESTED in message


def test_an_untested_sglang_starts_when_the_user_allows_it_and_the_contract_holds(
    found: dict[str, Any],
) -> None:
    assert found["untested_version_allowed"] == {"still": "running"}


def test_a_plugin_that_cannot_be_loaded_says_why_in_the_last_line(found: dict[str, Any]) -> None:
    unloadable = found["unloadable"]
    assert "unrecognized arguments: --kv-dram-size" in unloadable["refused"]
    reason = "could not be loaded: ModuleNotFoundError: import of sglang_ext.patches.registration halted"
    assert unloadable["last"].startswith(f"sglang_ext {reason}")
    assert reason in unloadable["launcher"]


def test_an_excluded_plugin_leaves_the_backend_unknown(found: dict[str, Any]) -> None:
    assert "global" not in found["excluded"]["backends"]


def test_the_launcher_reports_cached_tokens_unless_a_flag_says_no() -> None:
    assert launch_server.with_report(["--tp", "2"]) == ["--tp", "2", "--enable-cache-report"]
    assert launch_server.with_report(["--enable-cache-report"]) == ["--enable-cache-report"]
    assert launch_server.with_report(["--no-cache-report", "--tp", "2"]) == ["--tp", "2"]


def test_the_launcher_reads_a_key_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-secret\n")
    file.chmod(0o600)
    for given in (["--api-key-file", str(file)], [f"--api-key-file={file}"]):
        assert launch_server.with_key(["--tp", "2", *given]) == (
            ["--tp", "2", "--api-key=sk-secret"],
            "sk-secret",
        )
    assert launch_server.with_key(["--tp", "2"]) == (["--tp", "2"], None)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        launch_server.with_key(["--api-key-file", str(file)])


def test_the_launchers_key_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("sglang.srt.entrypoints.engine")
    hides = launch_server.Hides("sk-secret")
    logger.addFilter(hides)
    try:
        logger.warning("server_args=%s", {"api_key": "sk-secret", "tp_size": 2})
    finally:
        logger.removeFilter(hides)
    assert caplog.messages == ["server_args={'api_key': '***', 'tp_size': 2}"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(None, None), ("", ""), ("other", "other,sglang_ext"), ("a, sglang_ext", "a, sglang_ext")],
)
def test_the_launcher_brings_its_plugin(
    chosen: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", chosen)
    launch_server.require_plugin()
    assert os.environ.get("SGLANG_PLUGINS") == expected


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_server, "entry_points", lambda group: [])
    with pytest.raises(SystemExit, match="pip install"):
        launch_server.require_plugin()
