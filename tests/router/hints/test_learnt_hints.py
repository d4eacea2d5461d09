"""Hints that a router makes from the pauses it has seen. Workers and their agents are stand-ins."""

from __future__ import annotations

from typing import Any

from test_hinting import CHAT, Links, advise, link, post

from sglang_ext.router import Router
from sglang_ext.router.clients.pauses import Turned

AGENT = {"user-agent": "some-agent/1.0"}
TURNS = 8


async def turn(client: Any, router: Router, number: int, session: str = "s", **more: Any) -> Any:
    """One turn of a conversation that goes on; its explanation."""
    said = {"role": "assistant", "content": "It is deep. "}, {"role": "user", "content": "And?"}
    body = {"model": "m", "messages": [*CHAT, *said * number], "max_tokens": 2} | more
    named = {"x-session-id": session, "x-request-id": f"{session}-{number}", **AGENT}
    status, _, _ = await post(client, router, "/v1/chat/completions", body, **named)
    assert status == 200
    async with client.get(f"{router.url}/explain/{session}-{number}") as answer:
        return (await answer.json())["pause"]


async def taught(client: Any, router: Router, seconds: float, turns: int = TURNS) -> Links:
    """Turns after which this client's pauses are known to take so long; the agents' messages from now on."""
    for number in range(turns):
        await turn(client, router, number)
    for _ in range(64):
        router.pausing.pauses.learn(Turned("", "some-agent", "another"), seconds)
    return link(router)


async def test_a_turn_is_announced_when_its_pauses_are_known(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), learnt_hints=0.5)
    links = await taught(client, router, 30.0)
    pause = await turn(client, router, 0, "new")
    assert pause["after"] is None
    assert pause["forecast"]["basis"] == "tool"
    assert (pause["kept_out_s"], pause["verdict"]) == (30.0, "accepted")
    (hint,) = links.hints()
    assert hint.priority == -1 - 16, "the longer the pause, the lower"
    assert 29 < hint.earliest_s <= 30
    assert hint.ttl_s > hint.earliest_s
    await turn(client, router, 1, "new")
    assert links.withdrawn()[0] == hint.id, "its request has come"
    async with client.get(f"{router.url}/v1/advisory/{pause['hint']}") as answer:
        assert (await answer.json())["state"] == "used"
    router.check()


async def test_kv_stays_where_the_pause_is_as_short_as_bringing_it_back(
    start_worker, start_router, client
) -> None:
    router = await start_router(await start_worker(), learnt_hints=0.5)
    links = await taught(client, router, 0.05)
    pause = await turn(client, router, 0, "new")
    assert pause["kept_out_s"] == 0.0
    (hint,) = links.hints()
    assert hint.earliest_s == 0.0


async def test_no_hint_is_made_when_they_are_off(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    links = await taught(client, router, 30.0)
    pause = await turn(client, router, 0, "new")
    assert (pause["forecast"]["earliest_s"], pause["hint"]) == (30.0, None)
    assert links.hints() == []


async def test_a_clients_own_hint_takes_its_place_and_has_room(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), learnt_hints=0.5, hints_live=4)
    links = await taught(client, router, 30.0, turns=0)
    verdicts = [(await turn(client, router, 0, f"new{number}"))["verdict"] for number in range(4)]
    assert verdicts == ["accepted", "accepted", "refused", "refused"]
    for number in (2, 3):
        assert (await advise(client, router, session=f"new{number}"))["verdict"] == "accepted"
    told = await advise(client, router, session="new0")
    assert told["reason"] == "repeated"
    assert links.hints()[-1].earliest_s == 0.0, "sooner than was learnt"
    router.check()


async def test_another_request_of_the_session_is_no_pause(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), learnt_hints=0.5)
    links = await taught(client, router, 30.0)
    await turn(client, router, 4, "new")
    title = {"messages": [{"role": "user", "content": "A title, please. " * 8}]}
    await turn(client, router, 5, "new", **title)
    longer, again = links.hints()
    assert again.tokens == longer.tokens, "the hint is for the long conversation"


async def test_failed_turns_announce_nothing(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker, learnt_hints=0.5)
    links = await taught(client, router, 30.0)
    body = {"model": "m", "messages": CHAT, "max_tokens": -3}
    status, _, _ = await post(
        client, router, "/v1/chat/completions", body, **{"x-session-id": "new", **AGENT}
    )
    assert status == 400
    assert links.hints() == []
