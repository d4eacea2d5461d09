"""Hand-overs of several samples of a prompt, without SGLang."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from sglang_ext.patches.hooks.samples import HANDOVERS, after_getitem, before_send, handover_of

PROMPT = (1 << 62) + 5


def numbers(samples: int, prompts: tuple[int, ...]) -> list[list[int]]:
    """The hand-overs of each prompt's requests, in the order in which SGLang sends them."""
    found = []
    batch = SimpleNamespace(parallel_sample_num=samples)
    for prompt in prompts:
        request = SimpleNamespace(bootstrap_room=prompt)
        after_getitem(request, batch, 0)
        sent = []
        for sample in range(samples + 1):
            tokenized: Any = SimpleNamespace(rid=str(sample), bootstrap_room=prompt)
            manager = SimpleNamespace(rid_to_state={str(sample): SimpleNamespace(obj=copy.copy(request))})
            before_send(manager, tokenized)
            sent.append(tokenized.bootstrap_room)
        found.append(sent)
    return found


def test_each_request_of_a_prompt_has_a_hand_over_that_both_servers_derive() -> None:
    prefill, decode = (numbers(3, (PROMPT, PROMPT + 1)) for _ in range(2))
    assert prefill == decode
    assert [sent[0] for sent in prefill] == [PROMPT, PROMPT + 1]
    assert len({number for sent in prefill for number in sent}) == 8
    assert all(1 <= number <= HANDOVERS for sent in prefill for number in sent[1:])


def test_one_sample_keeps_the_prompts_hand_over() -> None:
    assert numbers(1, (PROMPT,)) == [[PROMPT, PROMPT]]
    assert handover_of(7, 0) == 7


def test_a_request_without_a_hand_over_gets_none() -> None:
    request = SimpleNamespace(bootstrap_room=None)
    after_getitem(request, SimpleNamespace(parallel_sample_num=3), 0)
    tokenized: Any = SimpleNamespace(rid="a", bootstrap_room=None)
    before_send(SimpleNamespace(rid_to_state={"a": SimpleNamespace(obj=request)}), tokenized)
    assert tokenized.bootstrap_room is None
