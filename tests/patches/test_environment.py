"""The environment of servers behind a proxy, without a user name, without a home, in a deep temporary
folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import requests.utils

from sglang_ext.cluster import guard
from sglang_ext.errors import ConfigError
from sglang_ext.patches import environment
from sglang_ext.patches.environment import User

PROXY = {"HTTP_PROXY": "http://10.255.255.1:3128"}
NOBODY = User(uid=123_456, named=False, home=Path("/"), home_writable=False)
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY.uid}", f"--regid={NOBODY.uid}", "--clear-groups"),
    # It may read files that only root can, as Python and its packages may lie there, and write none of them.
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
ROOT = User(uid=0, named=True, home=Path("/root"), home_writable=True)


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])
def test_loopback_and_the_cluster_are_reached_without_a_proxy(name: str) -> None:
    found = environment.direct({name: "socks5://"}, ["node-7", "fd00::7"])
    assert found == {
        "no_proxy": "localhost,127.0.0.1,::1,node-7,fd00::7",
        "NO_PROXY": "localhost,127.0.0.1,::1,node-7,fd00::7",
    }


def test_where_there_is_no_proxy_nothing_is_set() -> None:
    assert environment.direct({"NO_PROXY": "a"}, ["b"]) == {}
    assert environment.direct({"HTTP_PROXY": ""}, ["b"]) == {}


def test_what_either_spelling_excepts_both_do() -> None:
    given = {**PROXY, "no_proxy": "a.example, .corp", "NO_PROXY": "b.example,127.0.0.1"}
    found = environment.direct(given, [])
    assert found["no_proxy"] == found["NO_PROXY"] == "a.example,.corp,b.example,127.0.0.1,localhost,::1"
    assert environment.direct({**given, **found}, []) == found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "10.1.2.3", "[fd00::7]", "node-7"])
def test_the_library_that_sglang_warms_up_with_agrees(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*environment.EXCEPTIONS, *environment.PROXIES, *map(str.upper, environment.PROXIES)):
        monkeypatch.delenv(name, raising=False)
    url = f"http://{host}:30000/model_info"
    assert not requests.utils.should_bypass_proxies(url, None)
    for name, value in environment.direct(PROXY, ["10.1.2.3", "fd00::7", "node-7"]).items():
        monkeypatch.setenv(name, value)
    assert requests.utils.should_bypass_proxies(url, None)
    assert not requests.utils.should_bypass_proxies("http://huggingface.co/", None)


def test_the_hosts_of_a_command_line() -> None:
    words = "--host 0.0.0.0 --kv-announce-host=fd00::7 --kv-router http://r-0:30000,https://[fd00::8]:1"
    words += " --dist-init-addr 10.0.0.9:5000 --port 30001 --kv-router"
    assert environment.hosts_of(words.split()) == ("fd00::7", "r-0", "fd00::8", "10.0.0.9")


def test_a_user_without_a_name_gets_one() -> None:
    assert environment.named({}, NOBODY) == {"LOGNAME": "uid-123456"}
    assert environment.named({"USER": "kv"}, NOBODY) == {}
    assert environment.named({}, ROOT) == {}


def test_caches_are_below_a_folder_that_can_be_written_unless_they_are_set() -> None:
    folder = Path("/tmp/sglang-ext-cache-123456")
    found = environment.caches({"TRITON_CACHE_DIR": "/data/triton"}, NOBODY, folder)
    assert set(found) == set(environment.CACHES) - {"TRITON_CACHE_DIR"}
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "torchinductor")
    assert all(Path(value).is_relative_to(folder) for value in found.values())
    assert environment.caches({}, ROOT, folder) == {}


def test_models_in_a_home_that_can_only_be_read_are_still_found(tmp_path: Path) -> None:
    downloads = tmp_path / ".cache" / "huggingface"
    downloads.mkdir(parents=True)
    user = User(uid=1, named=True, home=tmp_path, home_writable=False)
    assert environment.caches({}, user, Path("/tmp/x"))["HF_HOME"] == str(downloads)
    assert "HF_HOME" not in environment.caches({"XDG_CACHE_HOME": "/data"}, user, Path("/tmp/x"))


def test_without_any_home_there_is_one() -> None:
    user = User(uid=1, named=False, home=None, home_writable=False)
    assert environment.caches({}, user, Path("/tmp/x"))["HOME"] == "/tmp/x"


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to run as another user"
)
def test_a_process_of_a_nameless_user_finds_a_name_and_caches(tmp_path: Path) -> None:
    script = (
        "import getpass, os; from sglang_ext.patches import environment;"
        "environment.prepare(os.environ); print(getpass.getuser());"
        "print(os.environ['TORCHINDUCTOR_CACHE_DIR']);"
        "os.makedirs(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    tmp_path.chmod(0o1777)
    done = subprocess.run(
        [*AS_NOBODY, sys.executable, "-c", script],
        cwd="/", env={"HOME": "/", "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name, cache = done.stdout.splitlines()
    assert name == f"uid-{NOBODY.uid}"
    assert Path(cache).parent.stat().st_mode & 0o777 == 0o700
    assert Path(cache).parent.stat().st_uid == NOBODY.uid


def test_a_cache_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    assert environment._cache_folder(os.geteuid()).is_dir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sglang-ext-cache-7").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        environment._cache_folder(7)


def test_text_files_are_read_as_utf_8_in_every_locale() -> None:
    assert environment.utf8("UTF-8") == {}
    assert environment.utf8("ANSI_X3.4-1968") == environment.utf8("ISO-8859-1") == {"PYTHONUTF8": "1"}
    script = (
        "import locale, os; from sglang_ext.patches import environment;"
        "environment.prepare(os.environ); environment.restart_in_utf8();"
        "print(locale.getpreferredencoding(False))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True, text=True, encoding="utf-8", check=True,
    )  # fmt: skip
    assert done.stdout == "utf-8\n"


def test_a_temporary_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    assert environment.require_temporary({"TMPDIR": str(tmp_path)}) == tmp_path
    with pytest.raises(ConfigError, match=r"TMPDIR: .*/gone does not exist"):
        environment.require_temporary({"TMPDIR": str(tmp_path / "gone")})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"TMPDIR: .*/file is not a folder"):
        environment.require_temporary({"TMPDIR": str(tmp_path / "file")})


def test_sockets_have_short_paths_or_the_start_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 140)
    deep.mkdir()
    with pytest.raises(ConfigError, match=r"TMPDIR: .*has .* bytes"):
        environment.require_short_sockets({"TMPDIR": str(deep)})
    environment.require_short_sockets({"TMPDIR": "/tmp"})
    assert guard.temporary_places(str(deep)) == list(guard.SHORT_FOLDERS)
    assert guard.temporary_places("/scratch") == ["/scratch", *guard.SHORT_FOLDERS]
    assert guard.SOCKET_PATH_BYTES == environment.SOCKET_PATH_BYTES
    assert guard.SOCKET_NAME_BYTES == environment.SOCKET_NAME_BYTES
