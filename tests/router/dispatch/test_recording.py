"""``--record``: the lines of a router's requests, and faults of the disk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_ext.cost_model import ArchLevel, CostModel, Identity, Profile, Quality, save
from sglang_ext.cost_model.profile import SCHEMA, parse
from sglang_ext.errors import ConfigError
from sglang_ext.protocol.agent import Events, Load
from sglang_ext.protocol.recording import (
    Applied,
    Head,
    HintLine,
    Limits,
    Loaded,
    Member,
    Namer,
    Request,
    names_of,
    read_recording,
)
from sglang_ext.router.dispatch.recording import _fetch_s
from sglang_ext.router.telemetry.fetch_note import FetchNote, SpanNote
from sglang_ext.router.telemetry.record_file import RecordFile, recording_key
from sglang_ext.router.tenancy.tenants import parse_keys
from sglang_ext.testing.waiting import until

WORDS = "It reads files and edits code with care. " * 12
PROFILE = Profile(
    schema=SCHEMA,
    identity=Identity("a/model", "a device", "bfloat16"),
    arch=ArchLevel((0.02, 0.0, 1e-4, 0.0, 0.0, 0.0)),
    quality=Quality(1, 0.0),
    longest_prompt=4096,
    kv_bytes_per_token=4096,
)
SECRET = "the user's secret words"


@pytest.fixture(autouse=True)
def key_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def lines_of(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return list(read_recording(file))


async def talk(client, router, turns: int) -> list[int]:
    """A conversation of one session; the cached tokens of each turn, as the worker reports them."""
    messages, cached = [{"role": "user", "content": WORDS + SECRET}], []
    for turn in range(turns):
        body = {"model": "default", "max_tokens": 20, "messages": messages, "user": "ann"}
        headers = {"x-session-id": "talk", "x-request-id": f"turn-{turn}"}
        async with client.post(router.url + "/v1/chat/completions", json=body, headers=headers) as answer:
            said = await answer.json()
            assert answer.status == 200, said
        cached.append(int(answer.headers["x-kv-cached-tokens"]))
        messages += [said["choices"][0]["message"], {"role": "user", "content": "go on with it"}]
    return cached


async def test_a_conversation_is_recorded_without_its_words(
    start_worker, start_router, client, stack, tmp_path
) -> None:
    path = tmp_path / "day.jsonl"
    worker = await start_worker()
    router = await start_router(worker, record=str(path))
    cached = await talk(client, router, 3)
    router.agents.loads(worker.url, Load(1, 2, 300))
    router.agents.loads(worker.url, Load(1, 2, 300))
    router.agents.applied(worker.url, Events(b"0123456789abcdef", 7, (), 250.0))
    await stack.aclose()
    data = path.read_bytes()
    for word in (SECRET, "reads files", "ann", "turn-1", '"talk"'):
        assert word.encode() not in data
    key = recording_key(None)
    assert key.hex().encode() not in data
    assert path.stat().st_mode & 0o777 == 0o600
    head, member, *rest = lines_of(path)
    assert isinstance(head, Head)
    assert (member.instance, member.role) == (worker.url, "colocated")
    assert isinstance(member, Member)
    asked = [line for line in rest if isinstance(line, Request)]
    assert [line.cached for line in asked] == cached
    assert cached[2] > cached[1] > 0 == cached[0]
    assert [line.at for line in asked] == sorted(line.at for line in asked)
    assert len({line.session for line in asked}) == 1 != len({line.id for line in asked})
    for line in asked:
        assert (line.status, line.instance, line.path) == (200, worker.url, "/v1/chat/completions")
        assert line.completion_tokens
        assert line.choices[0].reason
        assert 0 < line.decided_s <= line.sent_s < line.first_byte_s <= line.ended_s
        assert {"tokenize", "route"} <= line.stages.keys()
    # Each turn begins with the one before and its answer: a replay finds the same as the worker.
    before: set[str] = set()
    for line in asked:
        names = names_of(line.prompts[0].names)
        assert len(names) == line.prompts[0].tokens // 16
        assert sum(name in before for name in names) * 16 >= (line.cached or 0) // 16 * 16
        before |= {*names, *names_of(line.prompts[0].answer)}
    assert any(line.prompts[0].answer for line in asked)
    loads = [line for line in rest if isinstance(line, Loaded)]
    assert [(line.running, line.queued, line.queued_tokens) for line in loads] == [(1, 2, 300)]
    (applied,) = [line for line in rest if isinstance(line, Applied)]
    assert (applied.first, applied.age_s) == (7, 0.25)


async def test_the_costs_that_the_router_expects_are_recorded(
    start_worker, start_router, client, stack, tmp_path
) -> None:
    """Those of its flag; and others that come later, in another head. After it, names are written again."""
    path, kept = tmp_path / "day.jsonl", tmp_path / "profile.json"
    save(PROFILE, kept)
    router = await start_router(await start_worker(), record=str(path), cost_profile=str(kept))
    await talk(client, router, 2)
    other = msgspec.structs.replace(PROFILE, estimated=True)
    router.costs.use(CostModel(other))
    await talk(client, router, 2)
    await stack.aclose()
    lines = lines_of(path)
    heads = [line for line in lines if isinstance(line, Head)]
    assert [parse(msgspec.json.encode(head.costs), "a head") for head in heads] == [PROFILE, other]
    second = lines.index(heads[1])
    assert second > 2
    assert isinstance(lines[second + 1], Member)
    asked = [line for line in lines[second:] if isinstance(line, Request)]
    assert len(asked) == 2
    whole = path.read_bytes().splitlines(keepends=True)
    assert list(read_recording(whole[second:])) == lines[second:], "it can be read alone"


async def test_a_recording_of_a_router_with_the_defaults_has_no_costs(
    start_worker, start_router, client, stack, tmp_path
) -> None:
    path = tmp_path / "day.jsonl"
    router = await start_router(await start_worker(), record=str(path))
    await talk(client, router, 1)
    router.costs.use(CostModel())
    await talk(client, router, 1)
    await stack.aclose()
    assert [line.costs for line in lines_of(path) if isinstance(line, Head)] == [{}]
    assert b"costs" not in path.read_bytes().partition(b"\n")[0]


async def test_hints_are_recorded_with_their_lead(
    start_worker, start_router, client, stack, tmp_path
) -> None:
    path = tmp_path / "day.jsonl"
    router = await start_router(await start_worker(), record=str(path))
    body = {"input_ids": list(range(100, 164)), "session": "talk", "earliest_s": 7.5, "ttl_s": 30}
    async with client.post(router.url + "/v1/advisory", json=body) as answer:
        assert answer.status == 200, await answer.text()
        verdict = (await answer.json())["verdict"]
    await stack.aclose()
    (hint,) = [line for line in lines_of(path) if isinstance(line, HintLine)]
    assert (hint.lead_s, hint.ttl_s, hint.verdict, hint.prompt.tokens) == (7.5, 30.0, verdict, 64)
    assert len(names_of(hint.prompt.names)) == 4
    assert hint.session
    assert b"talk" not in path.read_bytes()


async def test_a_recorder_that_fails_fails_no_request(
    start_worker, start_router, client, stack, tmp_path, monkeypatch
) -> None:
    router = await start_router(await start_worker(), record=str(tmp_path / "day.jsonl"))

    def raises(*_: Any) -> list[str]:
        raise RuntimeError("no names today")

    monkeypatch.setattr(Namer, "names", raises)
    cached = await talk(client, router, 2)
    assert cached[1] > 0
    async with client.get(router.url + "/metrics") as answer:
        text = await answer.text()
    await stack.aclose()
    assert 'sglang_ext_router_recorded_lines{what="dropped"}' in text
    assert router.recorder.file.dropped == 2


async def test_limits_of_tenants_are_recorded_and_those_of_a_file_read_again(
    start_worker, start_router, client, stack, tmp_path
) -> None:
    path, keys = tmp_path / "day.jsonl", tmp_path / "keys.json"
    most = {"requests_per_second": 2, "burst": 5, "tokens_per_minute": 6000}
    own = {"key": "sk-tenant-a-1", "tenant": "ann"}
    keys.write_text(json.dumps({"keys": [own | most, {"key": "sk-tenant-b-1", "tenant": "bob"}]}))
    keys.chmod(0o600)
    router = await start_router(
        await start_worker(),
        record=str(path),
        api_keys_file=str(keys),
        queue_size=7,
        queue_policy="shortest-first",
    )
    headers = {"authorization": "Bearer sk-tenant-a-1"}

    async def ask() -> None:
        body = {"text": WORDS, "sampling_params": {"max_new_tokens": 4}}
        async with client.post(router.url + "/generate", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()

    await ask()
    await until(lambda: b'"limits"' in path.read_bytes(), what="the limits in the file")
    more = {
        "key": "sk-tenant-a-2",
        "tenant": "ann",
        "priority": 3,
        "requests_per_second": 0.5,
        "concurrent": 4,
    }
    router.keys.replace(parse_keys({"keys": [own | most, more]}))
    await ask()
    await stack.aclose()
    assert b"ann" not in path.read_bytes()
    lines = lines_of(path)
    heads = [line for line in lines if isinstance(line, Head)]
    tenant = next(line.tenant for line in lines if isinstance(line, Request))
    # The first one is from before the key file was read.
    assert heads[1].limits == {tenant: Limits(0, 2.0, 5, 0, 6000)}
    assert heads[-1].limits == {tenant: Limits(3, 2.5)}, "a key without a limit has no end"
    for head in heads:
        assert (head.settings["--queue-size"], head.settings["--queue-policy"]) == (7, "shortest-first")


def a_line(number: int) -> Iterator[Loaded]:
    return iter([Loaded(float(number), "i", number, 0, 0)])


def record_file(path: Path, size: int = 1 << 20, files: int = 2) -> RecordFile:
    file = RecordFile(path, size, files, Namer(b"0" * 32, 16))
    file.start(lambda: [Head(0.0, 1, "r", file.key_id, 16, "auto")])
    return file


def test_files_are_rotated_and_bounded(tmp_path) -> None:
    path = tmp_path / "day.jsonl"
    file = record_file(path, size=600, files=3)
    for number in range(100):
        file.put(lambda _n, _w, number=number: a_line(number))
    file.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["day.jsonl", "day.jsonl.1", "day.jsonl.2"]
    kept = []
    for name in ("day.jsonl.2", "day.jsonl.1", "day.jsonl"):
        head, *rest = lines_of(tmp_path / name)
        assert isinstance(head, Head)
        kept += [line.running for line in rest]
        assert (tmp_path / name).stat().st_size < 800
    assert kept == list(range(kept[0], 100))
    assert 5 < len(kept) < 40
    # The file of a former run is kept, too.
    record_file(path, files=3).close()
    assert len(lines_of(tmp_path / "day.jsonl.1")) > 1
    assert len(lines_of(path)) == 1


def test_a_recording_goes_through_no_link(tmp_path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"kept")
    (tmp_path / "day.jsonl").symlink_to(theirs)
    with pytest.raises(ConfigError, match="cannot write"):
        record_file(tmp_path / "day.jsonl")
    assert theirs.read_bytes() == b"kept"


def test_two_processes_have_a_file_each(tmp_path) -> None:
    one, other = record_file(tmp_path / "day.jsonl"), record_file(tmp_path / "day.jsonl")
    assert (one.path.name, other.path.name) == ("day.jsonl", "day-2.jsonl")
    one.close()
    other.close()


def test_more_than_may_wait_is_dropped_and_counted(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sglang_ext.router.telemetry.record_file.PENDING_BYTES", 1000)
    file = record_file(tmp_path / "day.jsonl")
    for number in range(3):
        file.put(lambda _n, _w, number=number: a_line(number), 600 if number else 500)
    file.close()
    assert file.dropped >= 1
    assert file.lines + file.dropped == 3


def test_the_key_is_the_fleets_or_a_file_of_the_user(tmp_path) -> None:
    from sglang_ext.cluster_key import ClusterKey

    one = ClusterKey(b"a key of the cluster, long enough")
    assert recording_key(one) == recording_key(ClusterKey(b"a key of the cluster, long enough"))
    assert recording_key(one) != recording_key(ClusterKey(b"another key of the cluster, longer"))
    assert recording_key(None) == recording_key(None) != recording_key(one)
    kept = tmp_path / "cache" / "sglang_ext" / "recording.key"
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.chmod(0o644)
    with pytest.raises(ConfigError, match="--record"):
        recording_key(None)


async def test_a_file_that_cannot_be_written_ends_the_start(start_worker, start_router, tmp_path) -> None:
    worker = await start_worker()
    with pytest.raises(ConfigError, match="cannot write"):
        await start_router(worker, record=str(tmp_path / "none" / "day.jsonl"))
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("ends", "seconds"),
    [
        ([("done", 0.5)], 0.5),
        ([("done", 0.5), ("needless", 0.0)], 0.5),
        ([("done", 0.5), ("done", 0.25)], 0.75),
        ([("gone", 0.5), ("done", 0.25)], 0.75),
        ([("late", 0.5), ("needless", 0.0)], -0.5),
        ([("done", 0.5), ("stale", 0.25)], -0.75),
        ([("needless", 0.0)], None),
        ([("no_room", 0.1)], None),
        ([("done", None)], None),
    ],
)
def test_a_fetch_took_the_time_of_all_its_spans(
    ends: list[tuple[str, float | None]], seconds: float | None
) -> None:
    """The last one may be a spare, which is read only if the one before it fails."""
    spans = [
        SpanNote(f"http://{at}", "dram", 0, 16, 0.1, end=end, took_s=s) for at, (end, s) in enumerate(ends)
    ]
    note = FetchNote("http://target", spans, 0.1, 1.0, calibrated=False)
    assert _fetch_s(note) == seconds


def test_a_request_without_a_fetch_has_no_time_of_one() -> None:
    assert _fetch_s(None) is None
