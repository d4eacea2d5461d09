"""Traces of people and agents: drawn values are human, the same for one seed, and in the order of the log."""

from __future__ import annotations

import gzip
import itertools
import random
import statistics
from pathlib import Path

import orjson
import pytest

from benchmarks.lib import traces
from benchmarks.lib.data import data_folder, rows
from sglang_ext.errors import ConfigError

CHAT = [("How are you today?", "Fine. " * 100), ("Tell me more.", "More. " * 10), ("Thanks!", "Bye.")]


def write(path: Path, objects: list[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb") as file:
        file.write(b"\n".join(orjson.dumps(item) for item in objects))


def call(run: str, turn: int, sent: int, received: int, phase: str, prompt: int) -> dict[str, object]:
    return {
        "session": run, "turn": turn, "t_send": sent, "t_recv": received, "phase": phase,
        "prompt_tokens": prompt, "completion_tokens": 4,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    said = [
        {"from": who, "value": text}
        for pair in CHAT
        for who, text in zip(("human", "gpt"), pair, strict=True)
    ]
    short = {"conversations": said[:2]}
    write(
        tmp_path / "sharegpt_zh/sharegpt_zh.0000-0499.jsonl.gz",
        [{"conversations": said}, short, {"conversations": said[1:]}, {"conversations": []}],
    )
    calls = [
        call("a", 1, 7, 9, "Code", 20),
        call("a", 0, 0, 5, "Plan", 10),
        call("b", 0, 0, 3, "Plan", 10),
    ]
    write(tmp_path / "chatdev_logs/calls.jsonl.gz", calls)
    return tmp_path


def test_people_read_what_was_answered_and_type_what_they_ask() -> None:
    session = traces.timed("s", CHAT, random.Random(1))
    first, second, third = session.turns
    assert first.reading_s == 0.0
    assert first.typing_s > 0.0
    assert second.reading_s > third.reading_s, "a longer answer takes longer to read"
    assert second.reading_s / third.reading_s == pytest.approx(len(CHAT[0][1]) / len(CHAT[1][1]))
    assert second.typing_s / third.typing_s == pytest.approx(len(CHAT[1][0]) / len(CHAT[2][0]))
    assert second.gap_s == second.reading_s + second.typing_s


def test_a_pace_shortens_every_time_alike() -> None:
    human = traces.timed("s", CHAT, random.Random(1))
    hurried = traces.timed("s", CHAT, random.Random(1), pace=20.0)
    for slow, fast in zip(human.turns, hurried.turns, strict=True):
        assert slow.gap_s == pytest.approx(20.0 * fast.gap_s)


def test_speeds_are_those_of_people() -> None:
    rng = random.Random(0)
    drawn = [traces.ALPHABETIC.typing.draw(rng) * 60.0 for _ in range(2000)]
    assert statistics.mean(drawn) == pytest.approx(traces.ALPHABETIC.typing.mean, rel=0.05)
    assert min(drawn) >= traces.ALPHABETIC.typing.least


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("plain words", traces.ALPHABETIC),
        ("这两个词有什么联系", traces.IDEOGRAPHIC),
        ("你好 这是 GPU 的问题吗", traces.IDEOGRAPHIC),
        ("", traces.ALPHABETIC),
    ],
)
def test_script(text: str, script: traces.Script) -> None:
    assert traces.script_of(text) is script


def test_conversations_are_pairs_of_a_question_and_its_answer(folder: Path) -> None:
    found = dict(traces.conversations(folder))
    stripped = [(question, answer.strip()) for question, answer in CHAT]
    assert found == {
        "conversation-0": stripped,
        "conversation-1": stripped[:1],
        "conversation-2": stripped[1:],
    }


def test_users_share_the_conversations_out(folder: Path) -> None:
    rows_of = traces.people(folder, users=2, seed=3)
    names = [next(sessions).name for sessions in rows_of for _ in range(2)]
    assert len(set(names)) == 4
    again = [list(itertools.islice(sessions, 2)) for sessions in traces.people(folder, users=2, seed=3)]
    assert [session.name for row in again for session in row] == names
    assert all(len(session.turns) >= 2 for row in again for session in row)


def test_people_need_conversations(folder: Path) -> None:
    with pytest.raises(ValueError, match="9 turns"):
        traces.people(folder, users=1, least_turns=9)
    with pytest.raises(ValueError, match="users"):
        traces.people(folder, users=0)


def test_an_agents_hint_comes_when_the_call_before_it_is_sent(folder: Path) -> None:
    first, second = traces.agent_runs(folder)
    plan, code = first
    assert (plan.session, code.session) == ("a/Plan", "a/Code")
    assert (plan.hint_s, plan.earliest_s) == (0.0, 0.0)
    assert code.hint_s == plan.send_s
    assert code.earliest_s == 3.0, "the shortest time of the phase before, in any run"
    assert code.hint_s + code.earliest_s <= code.send_s
    assert [call.session for call in second] == ["b/Plan"]


def test_a_missing_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXT_DATA", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="gone"):
        data_folder()
    assert data_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="is missing"):
        list(rows(tmp_path, "nothing.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\nnot json\n')
    with pytest.raises(ConfigError, match="cannot read"):
        list(rows(tmp_path, "bad.jsonl"))


def test_real_conversations_leave_time_for_a_hint() -> None:
    """With real conversations, hints come seconds ahead of their requests (Symphony: 11.3 s)."""
    try:
        folder = data_folder()
    except ConfigError as error:
        pytest.skip(str(error))
    sessions = [next(row) for row in traces.people(folder, users=100)]
    ahead = [turn.typing_s for session in sessions for turn in session.turns]
    assert 3.0 < statistics.median(ahead) < 60.0
    lead = [call.send_s - call.hint_s for run in traces.agent_runs(folder) for call in run[1:]]
    assert statistics.mean(lead) > 1.0
