"""The command line `sglang-ext`, as a user types it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ext import cli
from sglang_ext.cluster import command
from sglang_ext.config import KvConfig
from sglang_ext.patches.versions import installed_sglang_version

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "sglang_ext.cli"]
HEAVY = ("torch", "sglang", "transformers", "aiohttp", "numpy")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: sglang-ext ")
    for name, entry in cli.COMMANDS.items():
        assert f"  {name}" in text
        assert entry.help in text


def test_without_a_command_the_help_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.USAGE_STATUS
    assert "commands:" in capsys.readouterr().err


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clusters"]) == cli.USAGE_STATUS
    assert "'clusters'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    ours, sglang = capsys.readouterr().out.splitlines()
    assert ours.startswith("sglang-ext ")
    assert sglang == f"sglang {installed_sglang_version()}"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sglang_ext import cli; cli.main(['--help']); "
        f"print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "loaded:"


def test_python_runs_a_program_with_what_sglang_lacks_here(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("found = 'beside'")
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, beside, sgl_kernel; print(__name__, sys.argv[1:], beside.found); sys.exit(3)"
    )
    result = run("python", str(script), "--url", "x")
    assert (result.stdout, result.returncode) == ("__main__ ['--url', 'x'] beside\n", 3)
    found = run("python", str(tmp_path / "none.py"))
    assert (found.returncode, "there is no file" in found.stderr) == (cli.USAGE_STATUS, True)
    assert run("python").stderr.startswith("usage: sglang-ext python SCRIPT")


@pytest.mark.parametrize("name", ["cluster", "doctor", "router"])
def test_help_of_a_command(name: str) -> None:
    result = run(name, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cluster"], "--model-path"),
        (["cluster", "--model-path", "m", "--colocated", "none"], "--colocated"),
        (["cluster", "--model-path", "m", "--colocated", "0"], "--colocated"),
        (["cluster", "--model-path", "m", "--page-size", "16"], "The flags of SGLang go after --"),
        (["cluster", "--model-path", "m", "--", "--port", "1"], "--port"),
        (["cluster", "--model-path", "m", "--instance-args", "x"], "--instance-args"),
        (["doctor", "--verify", "deep"], "--verify"),
    ],
)
def test_bad_values_are_refused_with_the_flag(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_help_of_serve_has_no_warnings_before_it() -> None:
    result = run("serve", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: ")
    assert "--hicache-ratio" in result.stdout
    assert "--kv-dram-size" in result.stdout


def test_help_kv_and_all_show_our_flags_alone() -> None:
    result = run("serve", "--help", "kv")
    assert (result.returncode, result.stderr) == (0, "")
    shown = set(re.findall(r"^  (--[\w-]+)", result.stdout, re.MULTILINE))
    assert shown == {flag.name for flag in KvConfig.options() if flag.common}
    more = run("serve", "--help", "all")
    shown = set(re.findall(r"^  (--[\w-]+)", more.stdout, re.MULTILINE))
    assert shown == {flag.name for flag in KvConfig.options()}


@pytest.mark.parametrize("module", ["", "sglang_ext.router"])
def test_the_router_names_itself_as_it_was_started(module: str) -> None:
    command = [sys.executable, "-m", module] if module else [*COMMAND, "router"]
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout.startswith(
        f"usage: {f'python -m {module}' if module else 'sglang-ext router'} [-h [WORD]]"
    )


def test_serve_becomes_the_launcher_which_says_what_is_wrong_in_one_line() -> None:
    """SGLang's children import the main module of their parent, so the launcher has to be that module."""
    result = run("serve", "--model-path", "none", "--api-key-file", "/nonexistent/key")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "sglang_ext.launch_server: error: --api-key-file: cannot read /nonexistent/key: "
        "No such file or directory"
    )


class TestCluster:
    """A cluster whose servers end at once: the model does not exist."""

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, "cluster", "--model-path", "/nonexistent/model", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )

    def test_says_which_part_failed_and_keeps_its_log(self, tmp_path: Path) -> None:
        # Refused before SGLang is imported.
        flag = f"--api-key-file={tmp_path / 'gone'}"
        with self.start("--log-dir", str(tmp_path / "logs"), "--", flag) as process:
            out, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "server-0: starting" in out
        assert "sglang-ext cluster: server-0 ended with exit status 1" in err
        assert "gone" in err
        assert "gone" in (tmp_path / "logs" / "server-0.log").read_text()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_the_cluster(self, tmp_path: Path, number: signal.Signals) -> None:
        with self.start("--log-dir", str(tmp_path)) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("server-0: starting")
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "Ending the cluster" in out
        assert "server-0: ended" in out
        assert "router: ended" in out

    def test_a_busy_port_is_named(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as busy:
            result = run("cluster", "--model-path", "m", "--port", str(busy.getsockname()[1]))
        assert result.returncode == 2
        assert "--port" in result.stderr
        assert "in use by another process" in result.stderr


def test_a_temporary_log_folder_goes_unless_it_is_needed() -> None:
    with command.LogFolder(None) as clean:
        (clean.path / "server-0.log").write_text("fine")
    assert not clean.path.exists()
    with pytest.raises(RuntimeError), command.LogFolder(None) as refused:
        raise RuntimeError
    assert not refused.path.exists()
    with command.LogFolder(None) as failed:
        (failed.path / "server-0.log").write_text("why")
        failed.keep = True
    assert (failed.path / "server-0.log").read_text() == "why"
    shutil.rmtree(failed.path)


def test_the_users_log_folder_stays(tmp_path: Path) -> None:
    with command.LogFolder(tmp_path / "a" / "b") as logs:
        assert logs.path == tmp_path / "a" / "b"
    assert logs.path.exists()


def test_help_is_instant() -> None:
    """Nothing that takes long to import is imported for it."""
    script = (
        "import atexit, sys; sys.argv = ['sglang-ext', '--help'];"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
        "from sglang_ext.cli import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "usage: sglang-ext" in done.stdout
    loaded = set(done.stderr.split())
    assert "sglang_ext.cli" in loaded
    assert (
        loaded & {"torch", "sglang", "transformers", "numpy", "aiohttp", "ray", "msgspec", "numba"} == set()
    )
