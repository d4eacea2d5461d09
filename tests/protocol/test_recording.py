"""The format of recordings: no text in it, and what lines leave out is put back."""

from __future__ import annotations

import random

import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.recording import (
    KNOWN_NAMES,
    VERSION,
    Blocks,
    Head,
    Namer,
    RecordingError,
    Request,
    Writer,
    is_recording,
    names_of,
    read_recording,
)

KEY = b"0123456789abcdef0123456789abcdef"
HEAD = Head(0.0, version=VERSION, router="r", key_id="k", block_size=4, policy="auto")


def request(at: float, *prompts: Blocks) -> Request:
    return Request(at, id="i", path="/generate", status=200, prompts=prompts)


def test_names_are_chained_keyed_and_apart_by_namespace() -> None:
    namer = Namer(KEY, 4)
    one = namer.names("s", encode_tokens(list(range(14))))
    assert len(one) == 3
    assert namer.names("s", encode_tokens(list(range(12)))) == one
    other = namer.names("s", encode_tokens([9, *range(1, 12)]))
    assert not set(other) & set(one)  # the first token is in every name
    assert not set(namer.names("t", encode_tokens(list(range(12))))) & set(one)
    assert not set(Namer(KEY[::-1], 4).names("s", encode_tokens(list(range(12))))) & set(one)
    assert namer.word("") == "" != namer.word("a") != namer.word("b")


@pytest.mark.parametrize("seed", range(3))
def test_what_a_line_leaves_out_is_put_back(seed: int, monkeypatch) -> None:
    monkeypatch.setattr("sglang_ext.protocol.recording.KNOWN_NAMES", 60)
    rng, namer, writer = random.Random(seed), Namer(KEY, 4), Writer()
    lines, truth = [Writer.line(HEAD)], []
    sessions = [[rng.randrange(3)] for _ in range(4)]
    for at in range(60):
        session = rng.choice(sessions)
        session += [rng.randrange(2) for _ in range(rng.randrange(12))]
        names = namer.names("s", encode_tokens(session))
        answer = rng.randrange(len(names) + 1) if names else 0
        lines.append(Writer.line(request(at, writer.blocks("s", len(session), names, answer))))
        truth.append((names[: len(names) - answer], names[len(names) - answer :]))
    found = list(read_recording(lines))
    assert isinstance(found[0], Head)
    read = [(names_of(each.prompts[0].names), names_of(each.prompts[0].answer)) for each in found[1:]]
    assert read == truth
    written = sum(line.count(b'"known"') for line in lines)
    assert written > len(lines) // 3  # it does leave out


def test_files_can_be_put_one_behind_the_other_and_a_cut_one_be_read() -> None:
    namer, lines = Namer(KEY, 4), []
    for _ in range(2):
        writer = Writer()
        lines.append(Writer.line(HEAD))
        for length in (8, 16):
            names = namer.names("s", encode_tokens(list(range(length))))
            lines.append(Writer.line(request(0.0, writer.blocks("s", length, names))))
    assert is_recording(lines[0])
    assert not is_recording(lines[1])
    found = list(read_recording([*lines, lines[-1][:20]]))
    assert len(found) == 6
    assert found[2] == found[5]
    with pytest.raises(RecordingError, match="line 2 refers to a block"):
        list(read_recording([lines[0], lines[2]]))
    with pytest.raises(RecordingError, match="line 1 is not the head"):
        list(read_recording(lines[1:]))
    with pytest.raises(RecordingError, match="line 2 is none of a recording"):
        list(read_recording([lines[0], b'{"type": "x"}\n']))
    assert KNOWN_NAMES > 1000
