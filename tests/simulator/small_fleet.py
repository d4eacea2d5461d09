"""A small recorded load, and a fleet with disks, pairs and returns that serves it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_ext.protocol.recording import Fill, Head, HintLine, Member, Namer, Request, Writer

INSTANCES = 2
AS_RECORDED = "disk=6000,disk_read=2e8,observed=on"
PAIRS = "prefill=2,decode=2,pd_caching=3,rate=2x,observed=off"


def write_recording(path: Path) -> None:
    """Conversations of several turns behind two beginnings, one of them announced, with observed times."""
    draw, namer, writer = random.Random("small fleet"), Namer(b"k" * 16, 16), Writer()
    lines = [writer.line(Head(0.0, 1, "r", namer.key_id, 16, "cost"))]
    tiers = {"hbm": Fill(0, 250), "dram": Fill(0, 200)}
    names = [f"http://10.0.0.{number}:30000" for number in range(INSTANCES)]
    lines += [writer.line(Member(0.0, name, "colocated", tiers, kv="one", chunk=512)) for name in names]
    beginnings = [draw.randbytes(4 * 600) for _ in range(2)]
    sessions = [draw.choice(beginnings) + draw.randbytes(4 * 200) for _ in range(8)]
    for number in range(48):
        session = number % len(sessions)
        key = sessions[session] + draw.randbytes(4 * 50)
        whole = key + draw.randbytes(4 * 40)
        sessions[session] = whole
        blocks = namer.names("space", whole)
        prompt = writer.blocks("space", len(key) // 4, blocks, len(blocks) - len(key) // 64)
        first_s = 0.05 + 0.05 * draw.random()
        request = Request(
            1000.0 + 0.4 * number, id=str(number), path="/generate", status=200, prompts=(prompt,),
            tenant=str(session % 2), session=str(session), stream=True, completion_tokens=40,
            first_byte_s=first_s, ended_s=first_s + 0.6, fetch_s=0.01 if number % 5 else -0.02,
        )  # fmt: skip
        lines.append(writer.line(request))
        if not session:
            hinted = writer.blocks("space", len(whole) // 4, blocks)
            hint = HintLine(1001.0 + 0.4 * number, "0", str(session), hinted, lead_s=1.0)
            lines.append(writer.line(hint))
    path.write_bytes(b"".join(lines))


def check_parts(as_recorded: Mapping[str, Any], pairs: Mapping[str, Any]) -> None:
    """Verify by the figures of both that all parts took part."""
    for figures in (as_recorded, pairs):
        assert figures["requests"] > 40
        assert figures["link_bytes"]["from disk"] > 0
        assert figures["link_bytes"]["to disk"] > 0
        assert figures["counts"]["hints accepted"] > 0
    assert pairs["link_bytes"]["between instances"] > 0
    assert pairs["counts"]["returned blocks"] > 0
