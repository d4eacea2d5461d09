"""Bound the compiled grammars that a scheduler keeps.

What: after ``BaseGrammarBackend.set_cache``. SGLang keeps the compiled form of each regular expression, JSON
schema, EBNF grammar and structural tag of a request until ``/flush_cache``, and xgrammar's compiler keeps it
a second time. It takes about 200 bytes per character, so that a client with ever new ones fills the memory of
the scheduler. The oldest go when all together have more than ``MAX_BYTES``, and the compiler is replaced by
one with that limit. `request_values` bounds the length of one grammar.

Why no extension point serves: the table is a plain dictionary, and the compiler is made without a limit.

For: any device.
Can go: when SGLang bounds the table in bytes.
"""

from __future__ import annotations

from typing import Any, Final

from sglang_ext.patches.plugin_hooks import Hook, hook_patch

MAX_BYTES: Final = 64 << 20
"""Of all compiled grammars of a scheduler, and as much again in the compiler."""
ENTRY_BYTES: Final = 1024
"""Charged for an entry beside its text and its compiled form."""
_SIZES: Final = "_sglang_ext_sizes"


def size_of(key: tuple[str, str], grammar: Any) -> int:
    """Bytes of an entry: the text, and the compiled form where there is one."""
    compiled = getattr(grammar, "ctx", None)
    return ENTRY_BYTES + len(key[1]) + int(getattr(compiled, "memory_size_bytes", 0))


def after_set(result: None, backend: Any, key: tuple[str, str], value: Any) -> None:
    """After ``set_cache``: the oldest entries make room."""
    sizes: dict[tuple[str, str], int] = vars(backend).setdefault(_SIZES, {})
    sizes.pop(key, None)
    sizes[key] = size_of(key, value)
    for gone in sizes.keys() - backend.cache.keys():  # cleared, or dropped by SGLang
        del sizes[gone]
    total = sum(sizes.values())
    while total > MAX_BYTES:
        oldest = next(iter(sizes))
        total -= sizes.pop(oldest)
        del backend.cache[oldest]
    compiler, compiled = getattr(backend, "grammar_compiler", None), getattr(value, "ctx", None)
    if compiler is not None and compiled is not None and compiler.cache_limit_bytes < 0:
        limited = type(compiler)(compiled.tokenizer_info, cache_limit_bytes=MAX_BYTES)
        backend.grammar_compiler = limited


PATCH = hook_patch(
    "grammars",
    "bound the compiled grammars that a scheduler keeps",
    Hook("sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache", "after", after_set),
)
