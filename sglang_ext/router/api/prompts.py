"""Reading a request's prompts, and what keeps each apart from equal ones."""

from __future__ import annotations

from typing import Any

from sglang_ext.router.api.job import PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.validation import Json, check_ids, check_name, empty, wrong
from sglang_ext.router.http.types import RequestRefused


def take_prompts(
    value: Any,
    field: str,
    expected: str,
    limits: Limits,
    *,
    texts: bool = True,
    ids: bool = True,
    allow_empty: bool = False,
) -> tuple[list[PromptInput], bool]:
    """One prompt or an array of them, and whether it is an array: a batch.

    Args:
        expected: the allowed kinds, for the text of an error.
        texts, ids: whether prompts may be texts, and arrays of token ids.
        allow_empty: texts may be empty.
    """
    if type(value) is str and texts:
        if not value and not allow_empty:
            raise empty(field)
        return [PromptInput(text=value)], False
    if type(value) is not list:
        raise wrong(field, expected, value)
    if not value:
        raise empty(field)
    first = type(value[0])
    if ids and first is not list and not (texts and first is str):
        return [PromptInput(ids=check_ids(value, field, limits.vocab_size))], False
    kind = first if texts and ids else list if ids else str
    prompts = []
    for index, item in enumerate(value):
        where = f"{field}[{index}]"
        if type(item) is not kind:
            raise wrong(where, "a string" if kind is str else "an array of token ids", item)
        if not item and not (allow_empty and kind is str):
            raise empty(where)
        if isinstance(item, str):
            prompts.append(PromptInput(text=item))
        else:
            prompts.append(PromptInput(ids=check_ids(item, where, limits.vocab_size)))
    return prompts, True


def adapter_of(model: str | None) -> str | None:
    """The LoRA adapter in ``base-model:adapter``."""
    if not model:
        return None
    adapter = model.partition(":")[2].strip()
    check_name(adapter, "model")
    return adapter or None


def per_prompt(source: Json, name: str, count: int) -> list[str | None]:
    """A field that is one string for all prompts of a batch, or an array with one for each."""
    value = source.get(name)
    if value is None or type(value) is str:
        check_name(value or "", name)
        return [value or None] * count
    if type(value) is not list:
        raise wrong(name, "a string or an array of strings", value)
    if len(value) != count:
        raise RequestRefused(
            f"{name} has {len(value)} elements for {count} prompts", param=name, code="invalid_length"
        )
    for index, item in enumerate(value):
        if item is not None and type(item) is not str:
            raise wrong(f"{name}[{index}]", "a string", item)
        check_name(item or "", f"{name}[{index}]")
    return [item or None for item in value]


_NAMES_SPACES = frozenset({"lora_path", "extra_key", "cache_salt"})


def namespaces(source: Json, count: int, adapter: str | None = None) -> list[tuple[str | None, ...]]:
    """(adapter, extra_key, cache_salt), which keep each prompt of a batch apart from equal ones.

    Args:
        adapter: the LoRA adapter that the model's name asks for, which goes before ``lora_path``.
    """
    if _NAMES_SPACES.isdisjoint(source):
        return [(adapter, None, None)] * count
    adapters = [adapter] * count if adapter else per_prompt(source, "lora_path", count)
    keys, salts = per_prompt(source, "extra_key", count), per_prompt(source, "cache_salt", count)
    return list(zip(adapters, keys, salts, strict=True))
