"""Bound the compiled grammars that a scheduler keeps.

Change: after ``BaseGrammarBackend.set_cache``. SGLang keeps the compiled form of each regular expression,
JSON schema, EBNF grammar and structural tag of a request until ``/flush_cache``, and xgrammar's compiler
keeps it a second time. It takes about 200 bytes per character, so that a client with ever new ones fills the
memory of the scheduler. The oldest go when all together have more than ``MAX_BYTES``, and the compiler is
replaced by one with that limit. `request_values` bounds the length of one grammar.

Why no extension point serves: the table is a plain dictionary, and the compiler is made without a limit.

For: any device.
Can go: when SGLang bounds the table in bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang_ext.patches.plugin_hooks import Hook, hook_patch

if TYPE_CHECKING:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

MAX_BYTES: Final = 64 << 20
"""Of all compiled grammars of a scheduler, and as much again in the compiler."""
ENTRY_BYTES: Final = 1024
"""Charged for an entry beside its text and its compiled form."""
_SIZES: Final = "_sglang_ext_sizes"
_COMPILER: Final = "grammar_compiler"
_COMPILED: Final = "ctx"
"""Attributes of xgrammar's backend and of its grammars."""


def size_of(key: tuple[str, str], grammar: Any) -> int:
    """Bytes of an entry: the text, and the compiled form where there is one."""
    compiled = getattr(grammar, _COMPILED, None)
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
    if hasattr(backend, _COMPILER) and hasattr(value, _COMPILED):
        _limit(backend, value)


def _limit(backend: XGrammarGrammarBackend, grammar: Any) -> None:
    """Replace a compiler that has no limit. Other backends have none, and grammars that failed no form."""
    compiler = backend.grammar_compiler
    if compiler.cache_limit_bytes < 0:
        compiled: Any = getattr(grammar, _COMPILED)
        backend.grammar_compiler = type(compiler)(compiled.tokenizer_info, cache_limit_bytes=MAX_BYTES)


PATCH = hook_patch(
    "grammars",
    "bound the compiled grammars that a scheduler keeps",
    Hook("sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache", "after", after_set),
)
