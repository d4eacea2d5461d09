"""The state that a request takes along when it is moved, and the conditions that keep it in place."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.engine.commands import MOST_WAITING, RankCommandQueue
from sglang_ext.engine.events.router_commands import RouterCommands
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.resume import (
    AGAIN,
    FIELD,
    TICKET_SECONDS,
    Tickets,
    misfit,
    obstacle,
    prompt_digest,
    put_back,
    replay,
    state_of,
)
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.migration.migration import Migration
from sglang_ext.patches.adapter.migration.moving_in import MOST_COMING
from sglang_ext.protocol.agent import MAX_OUTPUT_BYTES, TO_AGENT, Expecting, Resume, Unpark, Watch
from sglang_ext.stages import StageTimes
from sglang_ext.wire import WireError


def request(**fields: Any) -> Any:
    sampling = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": 100,
    }
    sampling |= {name: fields.pop(name) for name in list(fields) if name in sampling}
    nothing = dict.fromkeys(
        (
            "return_logprob", "custom_logit_processor", "multimodal_inputs", "input_embeds",
            "positional_embed_overrides", "session", "session_id", "lora_id", "beam_group",
            "return_hidden_states", "return_routed_experts", "return_indexer_topk",
            "return_sampling_mask", "customized_info", "grammar", "bootstrap_host",
            "disagg_prefill_dp_rank",
        )
    )  # fmt: skip
    return SimpleNamespace(
        **{
            **nothing,
            "bootstrap_port": 8998,
            "rid": "r",
            "to_finish": None,
            "finished": lambda: False,
            "sampling_params": SimpleNamespace(custom_params=None, **sampling),
            "origin_input_ids": array("q", [5, 6, 7]),
            "output_ids": array("q", [8, 9]),
            "cached_tokens": 3,
            "cached_tokens_device": 2,
            "cached_tokens_host": 1,
            "cached_tokens_storage": 0,
            **fields,
        }
    )


PROMPT = prompt_digest(array("q", [5, 6, 7]))
EPOCH = bytes(16)


def resume(output: list[int], **fields: Any) -> Resume:
    return Resume(**{"output": encode_tokens(output), "prompt": PROMPT, **fields})


def watch(number: int = 0, state: Resume | None = None, rid: str = "r") -> Watch:
    return Watch(f"move {number}", rid, f"{number:032x}", state or resume([8, 9]))


def over_the_wire(state: Resume) -> Resume:
    message = TO_AGENT.decode(TO_AGENT.encode(watch(state=state)))
    assert isinstance(message, Watch)
    return message.resume


def test_what_is_taken_along_comes_back() -> None:
    req = request(bootstrap_host="10.0.0.1", disagg_prefill_dp_rank=1, min_new_tokens=5)
    stages = StageTimes(0.1, 0.2, 0.3, 0.4, 0.5)
    state = over_the_wire(state_of(req, received=True, stages=stages))
    home = ("10.0.0.1", 8998, 1)
    assert state == resume([8, 9], cached=(3, 2, 1, 0), received=True, home=home, stages=stages)
    other = request(output_ids=array("q"), cached_tokens=0, cached_tokens_device=0, min_new_tokens=5)
    put_back(other, state)
    assert list(other.output_ids) == [8, 9]
    assert (other.cached_tokens, other.cached_tokens_device, other.cached_tokens_host) == (3, 2, 1)
    # Two of the five have come.
    assert other.sampling_params.min_new_tokens == 3


def test_grammar_and_counts_follow_the_output() -> None:
    accepted: list[int] = []
    counted: list[int] = []
    req = request(grammar=SimpleNamespace(accept_token=accepted.append))
    replay(req, resume([8, 9]), lambda _req, token: counted.append(token))
    assert accepted == counted == [8, 9]
    counted.clear()
    replay(req, resume([8, 9], received=True), lambda _req, token: counted.append(token))
    # SGLang counts the token that comes with the KV.
    assert (accepted, counted) == ([8, 9, 8, 9], [8])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"output_ids": array("q")}, AGAIN),
        ({"frequency_penalty": 0.5}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"output_ids": array("q", bytes(2 * MAX_OUTPUT_BYTES + 8))}, "a long answer"),
        ({"return_logprob": True}, "log probabilities"),
        ({"lora_id": "x"}, "a LoRA adapter"),
        ({"session_id": "x"}, "a session at the server"),
        ({"multimodal_inputs": object()}, "inputs other than tokens"),
        ({"return_hidden_states": True}, "internals of the model in the answer"),
        ({"min_new_tokens": 9}, ""),
    ],
)
def test_what_cannot_be_rebuilt_stays(fields: dict[str, Any], why: str) -> None:
    assert obstacle(request(**fields), False) == why


def test_a_draft_model_s_state_stays() -> None:
    assert obstacle(request(), True) == "speculative decoding"


@pytest.mark.parametrize(
    "damage",
    [
        {"output": b""},
        {"output": b"abc"},
        {"output": bytes(MAX_OUTPUT_BYTES + 4)},
        {"prompt": b"short"},
        {"cached": (-1, 0, 0, 0)},
        {"cached": (1, 0, 0)},
        {"cached": (1 << 60, 0, 0, 0)},
        {"home": ("a host/with a path", 80)},
        {"home": ("h", 0)},
        {"home": ("h", 1 << 20)},
    ],
)
def test_what_is_no_state_is_refused_on_the_wire(damage: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        over_the_wire(resume([8, 9], **damage) if "output" not in damage else Resume(prompt=PROMPT, **damage))


@pytest.mark.parametrize(
    ("state", "fields", "why"),
    [
        (resume([8, 9]), {}, ""),
        (resume([8, 100]), {}, "not below 100"),
        (Resume(b"\xff\xff\xff\xff", PROMPT), {}, "not below 100"),
        (Resume(bytes(6), PROMPT), {}, "no row of tokens"),
        (resume([8, 9], prompt=bytes(16)), {}, "another prompt"),
        (resume([8, 9]), {"origin_input_ids": array("q", [5, 6, 8])}, "another prompt"),
        (resume([8] * 100), {}, "100 tokens already"),
        (resume([8] * 99), {}, ""),
        (resume([8, 9], cached=(6, 0, 0, 0)), {}, "more of it was cached"),
        (resume([8, 9], cached=(5, 0, 0, 9)), {}, "more of it was cached"),
        (resume([8, 9], received=True), {}, "do not go on with each other"),
        (resume([8, 9]), {"return_logprob": True}, "log probabilities"),
        (resume([8, 9]), {"lora_id": "x"}, "a LoRA adapter"),
    ],
)
def test_a_state_that_does_not_fit_its_request(state: Resume, fields: dict[str, Any], why: str) -> None:
    """A token id that the model lacks, or more tokens than there is room for, would kill the scheduler."""
    req = request(**{"output_ids": array("q"), **fields})
    found = misfit(state, req, vocabulary=100, receives=False)
    assert why in found
    assert bool(why) == bool(found)


# -- tickets ----------------------------------------------------------------------------------------


def test_a_ticket_works_once_for_its_request() -> None:
    tickets = Tickets()
    for number in range(3):
        assert tickets.put(watch(number), at=0.0)
    assert tickets.take("0" * 31 + "1", "r") is not None
    assert tickets.take("0" * 31 + "1", "r") is None
    assert tickets.take("0" * 31 + "2", "another") is None
    assert tickets.take("0" * 31 + "2", "r") is None
    for forged in (None, 1, True, 0.5, "", "r", "move 0", [], {}, ["0" * 32], {"output_ids": [1]}):
        assert tickets.take(forged, "r") is None
    assert len(tickets) == 1
    assert tickets.nbytes == 8


def test_tickets_end_by_rank_0_s_time() -> None:
    tickets = Tickets()
    tickets.put(watch(0), at=100.0)
    tickets.put(watch(1), at=110.0)
    assert tickets.next_expiry == 100.0 + TICKET_SECONDS
    tickets.expire(100.0 + TICKET_SECONDS)
    assert tickets.take("0" * 32, "r") is None
    assert tickets.next_expiry == 110.0 + TICKET_SECONDS
    tickets.expire(1e9)
    assert (len(tickets), tickets.nbytes) == (0, 0)


def test_tickets_are_bounded_in_number_and_in_bytes() -> None:
    tickets = Tickets(most=3, most_bytes=1000)
    assert tickets.put(watch(0), at=0.0)
    assert not tickets.put(watch(0, resume([1])), at=0.0), "it would replace another one's state"
    assert not tickets.put(watch(1, resume([1] * 249)), at=0.0)
    assert tickets.put(watch(1), at=0.0)
    assert tickets.put(watch(2), at=0.0)
    assert not tickets.put(watch(3), at=0.0)
    assert tickets.take("0" * 32, "r") is not None
    assert tickets.put(watch(3), at=0.0)


# -- in the scheduler ---------------------------------------------------------------------------------


class Rank:
    """A rank's `Migration`, with requests as SGLang hands them over."""

    def __init__(self) -> None:
        self.counted: list[int] = []
        processor = SimpleNamespace(
            _maybe_update_reasoning_tokens=lambda req, token: self.counted.append(token)
        )
        scheduler = SimpleNamespace(
            model_config=SimpleNamespace(vocab_size=100),
            batch_result_processor=processor,
            running_batch=SimpleNamespace(reqs=[]),
        )
        self.ranks = Ranks()
        self.replies: list[Any] = []
        cache: Any = SimpleNamespace(scheduler=scheduler, ranks=self.ranks)
        commands: Any = SimpleNamespace(
            epoch=EPOCH, reply_to_move=self.replies.append, enqueue=lambda message: True
        )
        self.migration = Migration(cache, commands)

    def hears(self, message: Any, at: float = 0.0) -> None:
        self.migration.target.tickets.expire(at)
        assert self.migration.takes_command(message, at)

    def gets(self, custom: Any, **fields: Any) -> Any:
        """A request comes with these ``custom_params``, and is about to wait."""
        aborted: list[str] = []
        req = request(**{"output_ids": array("q"), "set_finish_with_abort": aborted.append, **fields})
        req.aborted, req.is_retracted = aborted, False
        req.sampling_params.custom_params = custom
        self.migration.target.received(SimpleNamespace(rid=req.rid, sampling_params=req.sampling_params))
        self.migration.target.queued(req)
        return req


TICKET = {FIELD: "0" * 32}


def test_a_request_with_a_ticket_begins_where_it_was_stopped() -> None:
    rank = Rank()
    rank.hears(watch())
    req = rank.gets({**TICKET, "mine": 1})
    assert req.aborted == []
    assert list(req.output_ids) == rank.counted == [8, 9]
    assert req.sampling_params.custom_params == {"mine": 1}, "SGLang sees what is its own"
    rank.ranks.each_pass()
    assert rank.replies == []
    req.output_ids.append(10)
    rank.ranks.each_pass()
    assert [(type(message).__name__, message.id) for message in rank.replies] == [("Running", "move 0")]


@pytest.mark.parametrize(
    "custom",
    [
        {FIELD: value}
        for value in (
            None, "", "1" * 32, 7, True, [], {}, [TICKET], ["0" * 32],
            {"output_ids": [8, 9], "prompt_tokens": 3},
            {"output_ids": [1 << 40], "prompt_tokens": -1},
            {"output": "CAAAAAkAAAA=", "prompt": "AAAA"},
        )
    ],
)  # fmt: skip
def test_a_client_that_forges_a_state_is_refused(custom: Any) -> None:
    """Whatever stands in the field: without a ticket of the router there is nothing to go on from."""
    rank = Rank()
    rank.hears(watch(number=5))
    req = rank.gets(custom)
    assert req.aborted == ["the request cannot be gone on with: nothing of it is known here"]
    assert list(req.output_ids) == []
    assert not req.is_retracted
    assert FIELD not in (req.sampling_params.custom_params or {})
    assert len(rank.migration.target.tickets) == 1, "the request that was announced can still come"


@pytest.mark.parametrize("custom", [None, {}, [], "x", [TICKET], {"mine": {}}])
def test_other_requests_are_left_alone(custom: Any) -> None:
    req = Rank().gets(custom)
    assert req.aborted == []
    assert req.sampling_params.custom_params == custom


def test_a_request_of_the_same_name_does_not_get_the_state() -> None:
    """The request with the ticket waits for its grammar when another request of its name comes."""
    rank = Rank()
    rank.hears(watch(rid="".join(["na", "me"])))
    first = request(rid="".join(["na", "me"]), output_ids=array("q"))
    first.sampling_params.custom_params = TICKET
    rank.migration.target.received(SimpleNamespace(rid=first.rid, sampling_params=first.sampling_params))
    other = rank.gets(None, rid="".join(["nam", "e"]))
    assert (list(other.output_ids), other.aborted) == ([], [])
    rank.migration.target.queued(first)
    assert list(first.output_ids) == [8, 9]


def test_a_fault_in_a_hook_costs_one_request(caplog: pytest.LogCaptureFixture) -> None:
    """A grammar that does not take the tokens, and whatever else goes wrong: the loop goes on."""

    def refuses(token: int) -> None:
        raise ValueError(f"the grammar does not accept {token}")

    rank = Rank()
    rank.hears(watch())
    req = rank.gets(TICKET, grammar=SimpleNamespace(accept_token=refuses))
    assert req.aborted == ["the request cannot be gone on with: an error of this server"]
    assert list(req.output_ids) == []
    assert rank.migration.counts == {"error": 1, "misfit": 1}
    assert "does not accept" in caplog.text
    rank.hears(watch(1))
    going_on = rank.gets({FIELD: "0" * 31 + "1"})
    assert list(going_on.output_ids) == [8, 9]
    going_on.finished = None
    rank.ranks.each_pass()
    assert rank.migration.counts["error"] == 2
    rank.migration.target.received(SimpleNamespace())
    assert rank.migration.counts["error"] == 3


def test_all_ranks_decide_alike() -> None:
    """They get the same messages in the same order, with rank 0's time, whatever their own clocks show."""
    ranks = [Rank(), Rank()]
    for rank in ranks:
        rank.hears(watch(0), at=50.0)
        rank.hears(watch(1), at=60.0)
        rank.migration.target.tickets.expire(50.0 + TICKET_SECONDS)
    for number, fits in ((0, False), (1, True), (1, False)):
        reqs = [rank.gets({FIELD: f"{number:032x}"}, rid="r") for rank in ranks]
        assert [not req.aborted for req in reqs] == [fits, fits]


def test_what_vanished_makes_room() -> None:
    """SGLang does not report requests that are aborted while they wait: these must not add up."""
    rank = Rank()
    for number in range(MOST_COMING + 1):
        rank.hears(watch(number, rid=f"r{number}"))
        assert rank.gets({FIELD: f"{number:032x}"}, rid=f"r{number}").aborted == []
    assert len(rank.migration.target) == MOST_COMING
    rank.migration.aborted("r10", every=False)
    assert not rank.migration.target.arrives("r10")
    assert len(rank.migration.target) == MOST_COMING - 1
    rank.migration.aborted("", every=True)
    assert len(rank.migration.target) == 0


def test_the_router_is_answered_once_every_rank_has_the_state() -> None:
    command_queue = RankCommandQueue(clock=lambda: 7.0)
    posted: list[Any] = []
    commands = RouterCommands(command_queue, EPOCH, lambda reader, message: posted.append((reader, message)))
    try:
        commands.receive(b"router", watch(3))
        assert posted == [(b"router", Expecting(EPOCH, f"{3:032x}"))]
        assert [command.payload for command in command_queue.take()] == [TO_AGENT.encode(watch(3))]
        for _ in range(MOST_WAITING):
            command_queue.put(b"")
        commands.receive(b"router", watch(4))
        assert len(posted) == 1, "the scheduler stands still: the request would come without its state"
        commands.receive(b"router", Unpark("move 3", stay=True))
        assert len(posted) == 1
    finally:
        command_queue.close()
