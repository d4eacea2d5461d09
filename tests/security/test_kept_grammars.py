"""Grammars of requests, which a scheduler compiles and keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from sglang_ext.patches import grammars
from sglang_ext.patches.hooks.request_values import GRAMMARS, MAX_GRAMMAR_CHARACTERS, check_message

pytestmark = pytest.mark.slow


def test_the_oldest_grammars_make_room(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were kept until /flush_cache: 8 regular expressions of 128 KB made 760 MB of a scheduler."""
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(grammars, "MAX_BYTES", 1 << 20)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(tokenizer_dir))
    stock = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer))
    backend = SimpleNamespace(cache={}, grammar_compiler=stock)

    def asked(text: str) -> tuple[str, str]:
        key = ("regex", text)
        grammar = SimpleNamespace(ctx=backend.grammar_compiler.compile_regex(text))
        backend.cache[key] = grammar  # as SGLang does
        grammars.after_set(None, backend, key, grammar)
        return key

    keys = [asked(f"{number}" + "x" * 1000) for number in range(20)]
    kept = len(backend.cache)
    assert 2 <= kept < 20
    assert list(backend.cache) == keys[-kept:], "the newest"
    assert sum(grammars.size_of(*each) for each in backend.cache.items()) <= grammars.MAX_BYTES
    assert 0 < backend.grammar_compiler.get_cache_size_bytes() <= grammars.MAX_BYTES
    asked("y" * 8000)
    assert not backend.cache, "larger than all may be"
    backend.cache.clear()  # /flush_cache
    last = asked("z" * 1000)
    assert list(backend.cache) == [last]


@pytest.mark.parametrize("name", GRAMMARS)
def test_servers_refuse_grammars_that_are_too_long(name: str) -> None:
    class Sampling(msgspec.Struct):
        json_schema: str | None = None
        regex: str | None = None
        ebnf: str | None = None
        structural_tag: str | None = None

    class Message(msgspec.Struct):
        sampling_params: Sampling

    def check(length: int) -> None:
        message = Message(Sampling(**{name: "x" * length}))
        check_message(message, msgspec.msgpack.encode, lambda data: SimpleNamespace(data=data))

    check(MAX_GRAMMAR_CHARACTERS)
    with pytest.raises(ValueError, match=f"{name} has {MAX_GRAMMAR_CHARACTERS + 1} characters, and may have"):
        check(MAX_GRAMMAR_CHARACTERS + 1)
