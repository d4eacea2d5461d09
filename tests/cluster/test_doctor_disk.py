"""The doctor on directories of disk tiers, sound ones, damaged ones, and ones in use."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cluster.doctor import command, disk
from sglang_ext.cluster.doctor.disk import DiskFacts, findings, gather
from sglang_ext.cluster.doctor.findings import GIB, MIB, Finding, Level
from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, contents, get_all, prefix_keys, put_all
from sglang_ext.tiered_store.disk.files import Files
from sglang_ext.tiered_store.disk.speed import DiskSpeed
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import Outcome


def open_tier(path: Path) -> DiskTier:
    return DiskTier(DiskConfig(path, 8 << 20, segment_bytes=64 << 10, instance="host:8000"), LAYOUT)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured rates do not matter here, so little is written."""
    monkeypatch.setattr(disk, "MEASURED", 4 * MIB)
    monkeypatch.setattr(disk, "LEAST_MEASURED", 4 * MIB)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The disk of a server of two ranks: three prefixes of five blocks on each."""
    for rank in range(2):
        tier = open_tier(tmp_path / f"tp{rank}of2")
        for prefix in range(3):
            assert put_all(tier, NAMESPACE, prefix_keys(prefix, 5)) is Outcome.DONE
        tier.close()
    return tmp_path


@pytest.fixture
def in_use(path: Path) -> Iterator[DiskTier]:
    tier = open_tier(path / "tp0of2")
    yield tier
    tier.close()


def damage(rank: Path) -> None:
    """Flip one bit of a block."""
    sought = contents(LAYOUT, NAMESPACE, prefix_keys(1, 5)[2])[:48].tobytes()
    (segment,) = [file for file in rank.glob("*.seg") if sought in file.read_bytes()]
    data = bytearray(segment.read_bytes())
    data[data.index(sought)] ^= 1
    segment.write_bytes(data)


def run(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = command.main(["--kv-disk-path", str(path), "--json", *flags])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, answer


def texts(answer: dict[str, Any], subject: str = "disk tier") -> str:
    return "\n".join(f["text"] for f in answer["findings"] if f["subject"] == subject)


@pytest.mark.parametrize("flags", [[], ["--verify", "deep"], ["--verify", "repair"]])
def test_a_sound_directory(path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    before = sorted(path.rglob("*"))
    status, answer = run(path, capsys, *flags)
    assert (status, answer["problems"]) == (0, 0)
    assert {f["level"] for f in answer["findings"]} == {"ok"}
    assert texts(answer).count("15 blocks in 3 runs") == 2
    assert ("read and verified" in texts(answer)) == bool(flags)
    disk = answer["disk"]
    assert disk["speed"]["write"] > 0
    assert disk["total_bytes"] > disk["free_bytes"] > 0
    assert 0 < disk["tier_bytes"] < 16 * MIB
    assert [store["report"]["blocks"] for store in disk["stores"]] == [15, 15]
    assert sorted(path.rglob("*")) == before, "nothing is left behind, nothing is set aside"


def test_one_rank_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = run(path / "tp1of2", capsys)
    assert [Path(store["path"]).name for store in answer["disk"]["stores"]] == ["tp1of2"]


def test_a_flipped_bit_is_found_when_everything_is_read(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(path / "tp0of2")
    assert run(path, capsys)[0] == 0
    status, answer = run(path, capsys, "--verify", "deep")
    assert (status, answer["problems"]) == (1, 2)
    assert "1 of 5 blocks do not verify (1 blocks)" in texts(answer)
    assert "0 blocks can be brought back, 1 are lost" in texts(answer)


def test_repair_mends_damage_and_reports_lost_blocks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path / "tp0of2")
    status, answer = run(path, capsys, "--verify", "repair")
    assert (status, answer["problems"]) == (0, 0)
    assert "14 blocks in 3 runs are found again; lost, to be computed again: 1 does not verify" in texts(
        answer
    )
    assert answer["disk"]["stores"][0]["repaired"]["lost"] == {"does not verify": 1}
    assert answer["disk"]["stores"][1]["repaired"] is None, "the other rank was well"
    tier = open_tier(path / "tp0of2")
    assert [get_all(tier, NAMESPACE, prefix_keys(prefix, 5)) for prefix in range(3)] == [5, 2, 5]
    tier.close()
    status, answer = run(path, capsys, "--verify", "deep")
    assert status == 0
    assert "index.damaged-1" in texts(answer, "other files")


@pytest.mark.parametrize("how", ["missing", "garbage"])
def test_a_lost_index_is_rebuilt(path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    index = path / "tp1of2" / "index"
    if how == "garbage":
        (index / "data.mdb").write_bytes(os.urandom(40_000))
    else:
        shutil.rmtree(index)
    status, answer = run(path, capsys)
    assert status == 1
    assert "15 blocks can be brought back, 0 are lost" in texts(answer)
    assert any("--verify repair" in f["advice"] for f in answer["findings"])
    assert run(path, capsys, "--verify", "repair")[0] == 0
    tier = open_tier(path / "tp1of2")
    assert get_all(tier, NAMESPACE, prefix_keys(2, 5)) == 5
    tier.close()


def test_a_missing_segment_is_a_problem_until_it_is_repaired(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sorted((path / "tp0of2").glob("*.seg"))[0].unlink()
    assert run(path, capsys)[0] == 1
    assert run(path, capsys, "--verify", "repair")[0] == 0
    assert run(path, capsys, "--verify", "deep")[0] == 0


@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--verify", "repair"], 1)])
def test_a_directory_in_use_is_left_alone_and_its_user_named(
    path: Path, in_use: DiskTier, capsys: pytest.CaptureFixture[str], flags: list[str], status: int
) -> None:
    damage(path / "tp1of2")
    found, answer = run(path, capsys, *flags)
    assert found == status
    assert f"in use by instance 'host:8000' (process {os.getpid()} on " in texts(answer)
    assert any("Stop that server first" in f["advice"] for f in answer["findings"])
    assert answer["disk"]["speed"]["buffered"] > 0
    assert (answer["disk"]["stores"][1]["repaired"] is not None) == bool(flags), (
        "the other rank is looked after"
    )
    assert get_all(in_use, NAMESPACE, prefix_keys(0, 5)) == 5


def emptied(path: Path) -> None:
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def replaced(path: Path) -> None:
    path.rename(path.parents[1] / f"{path.parent.name} old")
    path.mkdir()


@pytest.mark.parametrize("change", [emptied, replaced, shutil.rmtree])
def test_a_directory_that_was_taken_from_under_a_server_is_a_problem_until_it_is_made_anew(
    path: Path, in_use: DiskTier, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    change(path / "tp0of2")
    status, answer = run(path, capsys)
    assert status == 1
    user = f"instance 'host:8000' (process {os.getpid()} on "
    assert f"tp0of2 was removed, emptied or replaced under {user}" in texts(answer)
    assert [each["pid"] for each in answer["disk"]["lost"]] == [os.getpid()]
    assert put_all(in_use, NAMESPACE, prefix_keys(7, 5)) is Outcome.DONE
    status, answer = run(path, capsys)
    assert (status, answer["disk"]["lost"]) == (0, [])


def test_a_whole_directory_that_was_taken_from_under_a_server(
    path: Path, in_use: DiskTier, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(path)
    status, answer = run(path, capsys)
    assert (status, answer["problems"]) == (1, 2)
    assert "was removed, emptied or replaced" in texts(answer)


def test_directories_that_are_not_there_or_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = run(tmp_path / "nothing", capsys)
    assert (status, answer["problems"]) == (1, 1)
    assert not (tmp_path / "nothing").exists()
    status, answer = run(tmp_path, capsys)
    assert status == 0
    assert "nothing is kept" in texts(answer)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_said_so(path: Path) -> None:
    facts = gather(path, repair=False, deep=False, doing=lambda text: nullcontext())
    full = DiskFacts(
        path, False, exists=True, total=GIB, free=0, ours=MIB, speed_error="there is too little room"
    )
    assert [f.level for f in findings(facts)] == [Level.OK] * 4
    assert [(f.level, f.subject) for f in findings(full)][:2] == [
        (Level.WARNING, "room"),
        (Level.WARNING, "speed"),
    ]


@pytest.mark.parametrize(
    ("direct", "said"),
    [
        (None, "no O_DIRECT here: --kv-disk-io auto would choose buffered"),
        (1e9, "1.00 GB/s with O_DIRECT: --kv-disk-io auto would choose buffered"),
        (3e9, "3.00 GB/s with O_DIRECT: --kv-disk-io auto would choose direct"),
    ],
)
def test_a_speed_names_its_way_of_reading(direct: float | None, said: str) -> None:
    facts = DiskFacts(Path("/x"), False, exists=True, free=GIB, speed=DiskSpeed(1e9, 2e9, direct))
    text = next(f.text for f in findings(facts) if f.subject == "speed")
    assert text.startswith("writes 1.00 GB/s, synced; reads 2.00 GB/s through the page cache, cold, ")
    assert text.endswith(said)


def test_the_text_form(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--kv-disk-path", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "ok       room " in shown
    assert shown.endswith("The directory can be used.\n")
    (path / "tp0of2" / "index" / "data.mdb").write_bytes(b"x" * 9000)
    assert command.main(["--kv-disk-path", str(path)]) == 1
    assert "problems with this directory." in capsys.readouterr().out


def test_more_problems_than_can_be_read_are_counted() -> None:
    store = disk.StoreFacts(Path("/x"), report=disk.CheckReport())
    assert store.report is not None
    for number in range(30):
        store.report.add(f"run {number}", "gone", 2)
    facts = DiskFacts(Path("/x"), False, exists=True, free=GIB, stores=(store,))
    found: list[Finding] = [f for f in findings(facts) if f.level is Level.PROBLEM]
    assert len(found) == 10
    assert found[-2].text == "22 more of that kind"
    assert "60 are lost" in found[-1].text


class OverNetwork(Files):
    """Everything is on a network file system."""

    def mountinfo(self) -> str:
        return "22 1 0:40 / / rw - nfs4 filer:/export rw"


def test_a_network_file_system_is_a_problem_as_a_server_refuses_it(tmp_path: Path) -> None:
    def of_directory(files: Files) -> list[Finding]:
        facts = gather(tmp_path, repair=False, deep=False, doing=lambda text: nullcontext(), files=files)
        return [finding for finding in findings(facts) if finding.subject == "directory"]

    (found,) = of_directory(OverNetwork())
    assert found.level is Level.PROBLEM
    assert "network file system (nfs4)" in found.text
    assert of_directory(Files()) == []
