"""Writes the first seeds of the corpus: `python tests/fuzz/make_corpus.py`. Inputs that a run found are added
by hand.

Messages are made from their types, one of each; bodies are those of the router's other tests.
"""
# ruff: noqa: E501 - tables of inputs

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

sys.path.append(str(Path(__file__).parents[1] / "router"))
sys.path.append(str(Path(__file__).parent))

BODIES: dict[str, list[Any]] = {
    "/generate": [
        {"text": "Once upon", "sampling_params": {"max_new_tokens": 4, "temperature": 0, "stop": ["x"]}, "rid": "r"},
        {"input_ids": [[5, 6], [7]], "sampling_params": [{"n": 1}, {"n": 1}], "stream": True, "priority": 1},
        {"input_ids": [5, 6, 7], "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0,
         "sampling_params": {"custom_params": {"a": 1}, "stop_token_ids": [3], "min_new_tokens": 1, "regex": "a+"}},
        {"text": ["a", "b"], "extra_key": ["k", "l"], "lora_path": ["a", None], "session_id": "s",
         "image_data": [{"url": "data:,", "detail": "low"}], "cache_salt": ["c", "d"]},
        {"text": "Now", "kv_hints": {"protocol_version": "1", "actions": [
            {"action_type": "prefetch", "payload": {"text": "Next", "session": "s", "ttl_s": 3}}]}},
        {"input_ids": [], "session_params": {"id": "s"}},
    ],
    "/v1/chat/completions": [
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0.5},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [
            {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}]}],
         "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
         "tool_choice": "auto", "stream": True, "stream_options": {"include_usage": True}, "n": 2, "logprobs": True,
         "top_logprobs": 1, "prompt_cache_options": {"prewarm": True, "ttl": "5m"}},
        {"model": "base:adapter", "messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function",
         "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "r"}],
         "input_ids": [5, 6], "custom_params": {"b": [1]}, "response_format": {"type": "json_object"}},
    ],
    "/v1/completions": [
        {"model": "m", "prompt": "Once", "max_tokens": 4, "echo": True, "logprobs": 1, "suffix": "x", "seed": 1},
        {"prompt": [[5, 6], [7, 8]], "n": 2, "stop": ["a"], "stream": True, "logit_bias": {"5": 1.0}},
        {"prompt": ["a", "b"], "rid": ["1", "2"], "session_id": "s", "min_tokens": 1},
    ],
    "/v1/responses": [
        {"model": "m", "input": "Hi", "max_output_tokens": 4, "instructions": "be brief", "store": True},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                   {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "1", "output": [{"type": "text", "text": "y"}]},
                   {"type": "reasoning", "summary": []}],
         "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "c"}],
         "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "low"}, "background": True},
        {"input": "go on", "previous_response_id": "resp_1", "stream": True, "text": {"format": {"type": "text"}}},
    ],
    "/v1/messages": [
        {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], "system": "s"},
        {"model": "m", "max_tokens": 4, "stream": True, "system": [{"type": "text", "text": "s"}],
         "messages": [{"role": "user", "content": [
             {"type": "text", "text": "x"}, {"type": "image", "source": {"type": "url", "url": "data:,"}},
             {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "y"}]},
             {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "z"}]}]},
             {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}},
                                               {"type": "thinking", "thinking": "hm"}]}],
         "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool", "name": "f"},
         "thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "low"}, "top_k": 3},
        {"model": "m", "max_tokens": 0, "messages": [{"role": "user", "content": "warm"}]},
    ],
    "/api/chat": [
        {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi", "images": []}],
         "options": {"temperature": 0.5, "num_predict": 4, "stop": ["x"], "top_k": 3, "seed": 1, "num_ctx": 9},
         "stream": False, "format": "json", "think": "low", "keep_alive": "5m"},
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "rid": "r", "priority": 1, "extra_key": "k"},
    ],
    "/api/generate": [
        {"model": "m", "prompt": "Once", "system": "s", "stream": False, "raw": True, "context": [1], "images": None,
         "options": {"num_predict": 4, "presence_penalty": 0.1, "frequency_penalty": 0.1, "top_p": 0.5, "stop": "x"}},
        {"model": "m", "prompt": ""},
    ],
    "/vertex_generate": [
        {"instances": [{"text": "a"}, {"text": "b"}], "parameters": {"sampling_params": {"max_new_tokens": 4}}},
        {"instances": [{"input_ids": [5, 6], "image_data": "data:,"}], "parameters": {"stream": True, "rid": ["r"]}},
        {"instances": []},
    ],
    "/v1/embeddings": [
        {"model": "m:a", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "rid": ["1", "2"]},
        {"input": [[5, 6], [7]], "lora_path": ["a", None], "priority": 1},
        {"input": [{"text": "x", "image": "data:,"}, {"video": "data:,"}]},
    ],
    "/encode": [
        {"text": [["a", "b"]], "is_cross_encoder_request": True},
        {"input_ids": [[5, 6], [7]], "sampling_params": [{"n": 1}, {}], "return_pooled_hidden_states": True},
        {"text": "x", "image_data": [{"url": "data:,"}]},
    ],
    "/v1/classify": [{"model": "m", "input": ["a", "b"], "user": "u"}, {"input": [5, 6]}],
    "/classify": [{"text": ["a", "b"], "dimensions": 2}],
    "/v1/score": [
        {"query": "q", "items": ["a", "b"], "label_token_ids": [5, 6], "apply_softmax": True, "temperature": 0.5},
        {"query": [5], "items": [[6], []], "label_token_ids": [[5], [6]], "item_first": True},
    ],
    "/v1/rerank": [
        {"query": "q", "documents": ["a", "b"], "top_n": 1, "return_documents": False, "instruct": "i"},
        {"query": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
         "documents": [[{"type": "text", "text": "y"}]]},
    ],
}  # fmt: skip
ADVISORY = [
    {"session": "s", "earliest_s": 1, "ttl_s": 20},
    {"messages": [{"role": "user", "content": "Hi"}], "priority": 1},
    {"input_ids": [5, 6, 7], "session": "s", "extra_key": "k"},
]
CUSTOM = [
    None, {"a": 1}, {"sglang_ext_resume": "0" * 32}, {"sglang_ext_resume": None, "a": [1]},
    {"sglang_ext_resume": {"output_ids": [5, 6], "prompt_tokens": 3, "cached": [0, 0, 0, 0], "home": ["h", 1]}},
    [{"sglang_ext_resume": {}}],
]  # fmt: skip


def one_of(kind: Any) -> Iterator[Any]:
    """Values of a type: of a union, one of each; of a bounded type, the least and something more."""
    match kind:
        case inspect.Metadata():
            yield from one_of(kind.type)
        case inspect.UnionType():
            for each in kind.types:
                yield from one_of(each)
        case inspect.StructType():
            fields = {field.encode_name: list(one_of(field.type)) for field in kind.fields}
            for pick in (0, -1):
                yield kind.cls(**{name: values[pick] for name, values in fields.items()})
        case inspect.IntType():
            least = kind.ge if kind.ge is not None else -1
            most = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else 1 << 40
            yield from (max(least, min(1, most)), most)
        case inspect.StrType():
            yield "h" * max(1, kind.min_length or 0)
        case inspect.BytesType():
            yield (
                b"\1\0\0\0\0\0\0\0" * 2
                if (kind.min_length or 0) <= 16 <= (kind.max_length or 99)
                else bytes(kind.min_length or 0)
            )
        case inspect.FloatType():
            yield 1.5
        case inspect.BoolType():
            yield from (False, True)
        case inspect.NoneType():
            yield None
        case inspect.LiteralType():
            yield from kind.values
        case inspect.ListType() | inspect.VarTupleType():
            values = list(one_of(kind.item_type))[:8]
            yield tuple(values[: kind.max_length]) if isinstance(kind, inspect.VarTupleType) else values
        case inspect.TupleType():
            parts = [list(one_of(each)) for each in kind.item_types]
            yield tuple(values[0] for values in parts)
        case inspect.EnumType():
            yield from list(kind.cls)[:2]
        case inspect.DictType():
            yield {}
        case _:
            raise TypeError(f"no value is made of {kind}")


def messages(kind: Any) -> Iterator[Any]:
    info = inspect.type_info(kind)
    yield from one_of(info)


def main() -> None:
    import conftest  # noqa: F401 - SGLang can be imported from here on
    from api_fuzz import BROKEN
    from http_rig import CLOSE, GET, chunked, post
    from targets import CORPUS, tcp, verbs

    from sglang_ext.disagg import messages as transfer
    from sglang_ext.engine.pd import messages as pd_messages
    from sglang_ext.protocol import agent as agent_messages
    from sglang_ext.protocol import cluster as cluster_messages
    from sglang_ext.router.cluster.roster import Member, encode_member

    def write(name: str, seeds: list[bytes]) -> None:
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(dict.fromkeys(seeds)):
            (folder / f"{number:03}").write_bytes(seed)

    def text(values: list[Any]) -> list[bytes]:
        return [json.dumps(value).encode() for value in values]

    write("heads", [
        GET, CLOSE, post("/x", b"12345"), post("/x", b"", "Expect: 100-continue"), chunked("/y", b"abc", b"d" * 100, trailers=b"T: u\r\n"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /u HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ])  # fmt: skip
    write(
        "packed",
        [
            gzip.compress(b"x" * 100, mtime=0),
            gzip.compress(b"{}", mtime=0) * 2,
            zlib.compress(b"y" * 1000),
            b"",
        ],
    )
    for path, bodies in BODIES.items():
        broken = [
            body if isinstance(body, bytes) else json.dumps(body).encode()
            for where, body in BROKEN
            if where == path
        ]
        write(
            f"body{path.replace('/', '-')}", [*text(bodies), *(data for data in broken if len(data) < 2000)]
        )
    write("advisory", text(ADVISORY))
    write("messages-count", text(BODIES["/v1/messages"]))
    write("custom-params", text(CUSTOM))
    write("ids", [bytes(8), (999).to_bytes(8, "little") * 3, b"\xff" * 16, b"abc", b""])
    for name, codec in (
        ("to-agent", agent_messages.TO_AGENT), ("from-agent", agent_messages.FROM_AGENT), ("pd-asks", pd_messages.MESSAGES.requests),
        ("pd-answers", pd_messages.MESSAGES.replies), ("rank-commands", pd_messages.RANK_COMMANDS), ("transfer-requests", transfer.REQUESTS),
        ("transfer-replies", transfer.REPLIES), ("tcp-answer", tcp._ANSWER), ("verbs-offer", verbs._OFFER),
        ("verbs-answer", verbs._ANSWER),
    ):  # fmt: skip
        kind = codec._decoder.type
        write(name, [codec.encode(message) for message in messages(kind)])
    registration = cluster_messages.Registration(
        url="http://127.0.0.1:1", instance="i", epoch="0" * 32, agent="tcp://127.0.0.1:2", endpoints=("h:1",)
    )
    for message in (registration, cluster_messages.Drain(), cluster_messages.ChangeRole(role="decode")):
        write(f"cluster-{type(message).__name__.lower()}", [msgspec.json.encode(message), b"", b"{}"])
    members = [
        Member(instance="i", url=registration.url, registration=registration),
        Member(instance="j", url="http://h"),
    ]
    write("cluster-member", [encode_member(member) for member in members])


if __name__ == "__main__":
    main()
