"""The names of sessions, as agents give them."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.router.clients.rules import SessionRow, shipped
from sglang_ext.router.clients.sessions import MAX_SESSION_CHARS, session_of

UUID = "4f5e7a1c-11d2-4c9e-9b61-0a9d3a7e2b10"
ROWS = (SessionRow(header="x-talk"), SessionRow(field=("talk",)), SessionRow(cookie="sid"))


@pytest.mark.parametrize(
    ("headers", "payload", "named"),
    [
        ({"x-talk": "h"}, {"talk": "f"}, "h"),
        ({"x-talk": ""}, {"talk": "f"}, "f"),
        ({}, {"talk": "f"}, "f"),
        ({}, {"talk": 7}, "7"),
        ({}, {"talk": {"id": "inner"}}, "inner"),
        ({}, {"talk": True}, None),
        ({}, {"talk": ""}, None),
        ({}, {"talk": ["f"]}, None),
        ({"cookie": "other=1; sid=c; more=2"}, {}, "c"),
        ({"cookie": "sid=c"}, {"talk": "f"}, "f"),
        ({"cookie": "sid="}, {}, None),
        ({"cookie": "other=1"}, {}, None),
        ({"cookie": 'sid="quoted c"'}, {}, "quoted c"),
        ({}, {"talk": "x" * 2 * MAX_SESSION_CHARS}, "x" * MAX_SESSION_CHARS),
        ({"cookie": "sid=" + "y" * 2 * MAX_SESSION_CHARS}, {}, "y" * MAX_SESSION_CHARS),
        ({"cookie": "bad[]=1; sid=c"}, {}, None),
    ],
)
def test_the_first_row_that_finds_a_name_counts(
    headers: dict[str, str], payload: dict[str, Any], named: str | None
) -> None:
    assert session_of(headers, payload, ROWS) == named
    assert session_of(headers, payload, ()) is None


@pytest.mark.parametrize(
    ("headers", "payload", "named"),
    [
        pytest.param({"x-claude-code-session-id": UUID}, {}, UUID, id="claude-code"),
        pytest.param(
            {"x-claude-code-session-id": UUID, "x-claude-code-agent-id": "a7"},
            {},
            f"{UUID}/a7",
            id="sub-agent",
        ),
        pytest.param(
            {}, {"metadata": {"user_id": f"user_ab12_account__session_{UUID}"}}, UUID, id="claude-code-older"
        ),
        pytest.param(
            {}, {"metadata": {"user_id": f'{{"device_id":"d","session_id":"{UUID}"}}'}}, UUID, id="as-json"
        ),
        pytest.param({}, {"metadata": {"user_id": "somebody@example.com"}}, None, id="another-user-id"),
        pytest.param({"session-id": "s", "thread-id": "t"}, {"prompt_cache_key": "s"}, "t", id="codex"),
        pytest.param({"session_id": "s"}, {"prompt_cache_key": "k"}, "s", id="codex-older"),
        pytest.param({"x-opencode-session": "ses_1", "x-session-affinity": "b"}, {}, "ses_1", id="opencode"),
        pytest.param({"x-session-affinity": "b"}, {}, "b", id="pi"),
        pytest.param({"x-litellm-session-id": "b"}, {}, "b", id="litellm"),
        pytest.param({"x-openwebui-chat-id": "b"}, {}, "b", id="open webui"),
        pytest.param({}, {"prompt_cache_key": "k"}, "k", id="openai"),
        pytest.param({"x-smg-routing-key": "k"}, {}, "k", id="sglang-router"),
        pytest.param({"x-session-id": "mine", "x-claude-code-session-id": UUID}, {}, "mine", id="own-first"),
    ],
)
def test_agents_are_known_by_the_names_that_they_send(
    headers: dict[str, str], payload: dict[str, Any], named: str | None
) -> None:
    assert session_of(headers, payload, shipped().sessions) == named
