"""Folders and files that other users can change are refused, wherever this package reads or writes."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_ext.cluster.command import LogFolder
from sglang_ext.cluster.doctor import disk as doctor
from sglang_ext.cluster.process import _private
from sglang_ext.errors import ConfigError
from sglang_ext.folders import Identity, own_folder, problem_of
from sglang_ext.patches import environment
from sglang_ext.router.cluster.membership_local import _open_private
from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, get_all, prefix_keys, put_all
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import Outcome

NOBODY = 65534
POD = Identity(10001, frozenset({10001}))
CONTAINER = Identity(1000, frozenset({1000}), unmapped=NOBODY)
DIRECTORY, FILE, LINK = stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK
LIMIT = 64 << 20

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to another user")


def status(kind: int, mode: int, user: int, group: int = 0) -> os.stat_result:
    return os.stat_result((kind | mode, 0, 0, 1, user, group, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("entry", "who", "is_parent", "in_sticky", "problem"),
    [
        (status(DIRECTORY, 0o700, 10001), POD, False, False, None),
        (status(DIRECTORY, 0o755, 0), POD, True, False, None),
        (status(DIRECTORY, 0o755, 0), POD, False, False, None),
        (status(FILE, 0o600, 0), POD, False, False, None),
        (status(DIRECTORY, 0o700, NOBODY), POD, False, False, "belongs to another user (65534, mode 0700)"),
        (status(DIRECTORY, 0o755, 1234), POD, True, False, "belongs to another user"),
        (status(LINK, 0o777, 1234), POD, True, True, "belongs to another user"),
        (status(LINK, 0o777, 0), POD, True, False, None),
        (
            status(DIRECTORY, 0o777, 0),
            POD,
            True,
            False,
            "can be written by others (owner 0, group 0",
        ),
        (status(DIRECTORY, 0o1777, 0), POD, True, False, None),
        (status(DIRECTORY, 0o1777, 0), POD, False, False, "can be written by others"),
        (status(FILE, 0o606, 10001), POD, False, False, "can be written by others"),
        # A volume of the chart's pods, and the modes that kubelet gives to its files.
        (status(DIRECTORY, 0o2775, 0, 10001), POD, False, False, None),
        (status(FILE, 0o660, 10001, 10001), POD, False, False, None),
        (status(DIRECTORY, 0o2775, 0, 50), POD, False, False, "group 50, mode 2775"),
        (status(DIRECTORY, 0o2775, 0, 50), POD, True, False, "group 50, mode 2775"),
        # Root of the machine, as a container of a user without rights sees it: in /tmp the owner may be any
        # user.
        (status(DIRECTORY, 0o755, NOBODY), CONTAINER, True, False, None),
        (status(DIRECTORY, 0o755, NOBODY), CONTAINER, True, True, "belongs to another user"),
        (status(DIRECTORY, 0o755, NOBODY), CONTAINER, False, False, "belongs to another user"),
        (status(DIRECTORY, 0o777, NOBODY), CONTAINER, True, False, "can be written by others"),
    ],
)
def test_which_entries_another_user_could_change(
    entry: os.stat_result, who: Identity, is_parent: bool, in_sticky: bool, problem: str | None
) -> None:
    found = problem_of(entry, who, is_parent=is_parent, in_sticky=in_sticky)
    assert (found is None) if problem is None else (found is not None and problem in found)


def filled(path: Path) -> Path:
    tier = DiskTier(DiskConfig(path, LIMIT), LAYOUT)
    assert put_all(tier, NAMESPACE, prefix_keys(1, 4)) is Outcome.DONE
    tier.close()
    return path


def found_in(path: Path) -> int:
    """Blocks that a server would take from a directory of KV."""
    tier = DiskTier(DiskConfig(path, LIMIT), LAYOUT)
    try:
        return get_all(tier, NAMESPACE, prefix_keys(1, 4))
    finally:
        tier.close()


def given_away(path: Path) -> Path:
    for each in (path, *path.rglob("*")):
        os.chown(each, NOBODY, NOBODY)
    return path


@as_root
def test_kv_that_another_user_put_there_is_not_used(tmp_path: Path) -> None:
    """Another user fills a folder under a name that can be guessed, with blocks that verify."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    path = filled(shared / "kv-4711" / "tp0of1")
    assert found_in(path) == 4  # as our own
    given_away(shared / "kv-4711")
    with pytest.raises(
        ConfigError, match=r"kv-4711, on the way to .* belongs to another user \(65534"
    ) as caught:
        found_in(path)
    assert caught.value.field == "--kv-disk-path"
    assert "chown" in (caught.value.hint or "")
    # Nor once the folder is ours: its files are not.
    for folder in (shared / "kv-4711", path):
        os.chown(folder, 0, 0)
    with pytest.raises(ConfigError, match=r"belongs to another user \(65534, mode 0600\).*Empty"):
        found_in(path)


@as_root
@pytest.mark.parametrize("name", ["index/data.mdb", "00000001.seg"])
def test_one_file_of_another_user_is_enough(tmp_path: Path, name: str) -> None:
    path = filled(tmp_path / "kv")
    assert found_in(path) == 4
    given_away(path / name)
    with pytest.raises(ConfigError, match=re.escape(str(path / name))):
        found_in(path)


@pytest.mark.parametrize("change", ["folder", "index", "file"])
def test_a_directory_in_which_others_can_write_is_refused(tmp_path: Path, change: str) -> None:
    path = filled(tmp_path / "kv")
    entry = {"folder": path, "index": path / "index", "file": path / "index" / "data.mdb"}[change]
    entry.chmod(0o777 if entry.is_dir() else 0o666)
    with pytest.raises(ConfigError, match=r"can be written by others \(owner \d+, group \d+, mode 0"):
        found_in(path)
    entry.chmod(0o700 if entry.is_dir() else 0o600)
    assert found_in(path) == 4


@pytest.mark.parametrize("name", ["index", "index/data.mdb", "index/lock.mdb", "owner.lock", "00000001.seg"])
def test_no_link_in_a_directory_is_followed(tmp_path: Path, name: str) -> None:
    path = filled(tmp_path / "kv")
    moved = (path / name).rename(tmp_path / "elsewhere")
    before = sorted(moved.iterdir()) if moved.is_dir() else moved.read_bytes()
    (path / name).symlink_to(moved)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        found_in(path)
    assert before == (sorted(moved.iterdir()) if moved.is_dir() else moved.read_bytes())


@as_root
def test_a_link_on_the_way_is_followed_where_it_is_ours(tmp_path: Path) -> None:
    path = filled(tmp_path / "disk" / "kv")
    (tmp_path / "local").symlink_to("disk")
    (tmp_path / "disk" / "up").symlink_to("../local/../disk")
    assert own_folder(tmp_path / "local" / "up" / "kv", "--x") == path
    os.chown(tmp_path / "local", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'local'}, on the way to")):
        own_folder(tmp_path / "local" / "kv", "--x")
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels"):
        own_folder(tmp_path / "round", "--x")


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to run as another user"
)
@pytest.mark.parametrize("group", [10001, 50], ids=["of the pod", "twin"])
def test_a_volume_of_a_pod_is_taken_by_its_group(group: int) -> None:
    """Kubernetes makes a volume root's, and gives it to the group of the pod."""
    code = (
        "import sys; from pathlib import Path; from sglang_ext.folders import own_folder\n"
        "print(own_folder(Path(sys.argv[1]), '--kv-disk-path', make=True))\n"
    )
    # It may read files that only root can, as Python and the test's folder may lie there, and write none of
    # them.
    reads = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = ["setpriv", "--reuid=10001", "--regid=10001", "--clear-groups", *reads]
    pod = [*user, sys.executable, "-c", code]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        volume = Path(folder) / "kv"
        volume.mkdir()
        os.chown(volume, 0, group)
        volume.chmod(0o2775)
        path = volume / "tp0of1"
        done = subprocess.run([*pod, path], capture_output=True, text=True, check=False, cwd="/", timeout=60)
        if group == 10001:
            assert done.stdout.strip() == str(path), done.stderr
            assert path.stat().st_mode & 0o777 == 0o700
        else:
            assert "can be written by others (owner 0, group 50, mode 2775)" in done.stderr


@as_root
def test_logs_sockets_caches_and_temporary_folders_of_another_user_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "ours").mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)

    def logs() -> None:
        with LogFolder(theirs / "logs"):
            raise AssertionError("taken")

    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(theirs))
    uses: dict[str, Callable[[], object]] = {
        "--log-dir": logs,
        "--cluster": lambda: _open_private(theirs / "ours"),
        "TMPDIR": lambda: environment.require_temporary({"TMPDIR": str(theirs / "ours")}),
        "XDG_CACHE_HOME": lambda: environment._cache_folder(0),
    }
    for field, use in uses.items():
        with pytest.raises(ConfigError, match=r"belongs to another user \(65534, mode 0755\)") as caught:
            use()
        assert caught.value.field == field
    assert [each.name for each in theirs.iterdir()] == ["ours"]


@as_root
def test_a_log_is_written_through_no_link_and_to_no_file_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.touch(mode=0o600)
    (tmp_path / "router.log").symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic links"):
        _private(tmp_path / "router.log")
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to another user"):
        _private(theirs)
    assert theirs.read_bytes() == b""


@as_root
def test_the_doctor_repairs_nothing_in_a_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link of theirs would be followed with our rights."""
    monkeypatch.setattr(doctor, "_speed", lambda *_: (None, "not asked"))
    path = filled(tmp_path / "kv")
    given_away(path)
    precious = tmp_path / "precious"
    precious.mkdir()
    shutil.rmtree(path / "index")
    (path / "index").symlink_to(precious)
    facts = doctor.gather(path, repair=True, deep=False, doing=lambda _: memoryview(b""))
    (problem,) = (each for each in doctor.findings(facts) if "another user" in each.text)
    assert "as that user" in problem.advice
    assert list(precious.iterdir()) == []
