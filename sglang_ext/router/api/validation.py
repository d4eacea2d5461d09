"""Checks that every kind of request shares: JSON, the kinds of its fields, and the limits of the model.

A check raises ``RequestRefused`` with a sentence that names the field, the mistake and the allowed values.
Mistakes that SGLang answers with a 400 are left to SGLang, unless the router has to look anyway.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import orjson

from sglang_ext.router.api.limits import Limits
from sglang_ext.router.http.types import RequestRefused

MAX_CHOICES = 4096
"""Largest ``n``: SGLang repeats the prompt in memory that many times before it checks anything."""

LARGE_JSON_BYTES = 1 << 20
MAX_CONTAINERS = 1 << 17
"""Objects and arrays of a body: each can be two bytes long, and takes a hundred bytes of memory and a
microsecond of the event loop's time."""
MAX_VALUES = 1 << 22
"""Elements of a body's objects and arrays, each of which takes about a tenth of that."""

INT32: Final = 1 << 31
"""Integers are below this: servers make 32-bit tensors of most."""
INT64: Final = 1 << 63
MOST_NUMBER: Final = 3.4028234663852886e38
"""Largest number: that of 32 bits."""

MAX_NAME_CHARACTERS: Final = 512
"""Of what clients call a thing (a request, a session) or a part of the cache (``extra_key``): the router and
the servers keep such names, each of another length, long after the request."""

FEW = 16
"""So many brackets of a body are looked for one by one."""
MAX_DEPTH = 250
"""Levels of a body: a little less than orjson writes, so that fields can be put around it."""

Json: TypeAlias = dict[str, Any]


def parse_json_object(body: bytes) -> Json:
    """The JSON object in a request body."""
    if not body:
        raise RequestRefused("the request body is empty; send a JSON object", code="invalid_json")
    containers = _containers(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestRefused(
            f"the request body must be a JSON object, not {json_type(value)}", code="invalid_json"
        )
    if containers > MAX_DEPTH:
        # orjson reads deeper nesting than it writes, and parts of many bodies are written again.
        try:
            orjson.dumps([[[[value]]]])
        except orjson.JSONEncodeError:
            raise RequestRefused(
                f"the request body is nested deeper than {MAX_DEPTH} levels", code="invalid_json"
            ) from None
    return value


def _containers(body: bytes) -> int:
    """The most objects and arrays that a body can have; a body with too many would take too long to parse and
    is refused.

    Brackets in strings count, too; a text with so many of them is longer than most contexts.
    """
    containers = _count(body, b"{") + _count(body, b"[")
    # A body of no more bytes has no more values: counting takes as long as parsing.
    values = body.count(b",") if len(body) > MAX_VALUES else 0
    for what, count, most in (
        ("objects and arrays", containers, MAX_CONTAINERS),
        ("values", values, MAX_VALUES),
    ):
        if count > most:
            raise RequestRefused(
                f"the request body has more than {most} {what}; send fewer prompts per request",
                status=413,
                code="request_too_large",
            )
    return containers


def _count(body: bytes, what: bytes) -> int:
    """As ``body.count(what)``, which looks at one byte after the other: soon done where there are few."""
    found, at = 0, body.find(what)
    while at >= 0:
        found += 1
        if found == FEW:
            return found + body.count(what, at + 1)
        at = body.find(what, at + 1)
    return found


def json_type(value: Any) -> str:
    """JSON's name of the type of ``value``, with its article."""
    names: Mapping[type, str] = {
        dict: "an object", list: "an array", str: "a string", bool: "a boolean",
        int: "an integer", float: "a number", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)


def wrong(field: str, expected: str, value: Any) -> RequestRefused:
    """The error for a value of the wrong type."""
    return RequestRefused(
        f"{field} must be {expected}, not {json_type(value)}", param=field, code="invalid_type"
    )


# A server takes many values of another type than a field's, as pydantic coerces them: "8" for 8. So does the
# router, which puts the coerced value into the parsed body; the server is sent the body as it came.

MAX_PATTERN: Final = 256
MAX_PATTERNS: Final = 32
"""Longest ``stop_regex`` that SGLang takes, and how many."""
_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE: Final = frozenset({"0", "off", "f", "false", "n", "no"})
_INTEGER: Final = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")
_SPACE: Final = " \t\n\x0b\x0c\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""White space by Unicode, which pydantic leaves out around numbers. Python has more."""
_MAX_DIGITS: Final = 4300
"""Of a string that stands for an integer, as pydantic and Python have it."""


def coerced_int(value: Any) -> Any:
    """``value`` as pydantic makes an integer of it; unchanged where it makes none."""
    if type(value) is bool:
        return int(value)
    if type(value) is float:
        return int(value) if value.is_integer() and -(2.0**63) <= value < 2.0**63 else value
    if type(value) is str and len(value) <= _MAX_DIGITS and _INTEGER.fullmatch(text := value.strip(_SPACE)):
        return int(text.partition(".")[0])
    return value


def coerced_number(value: Any) -> Any:
    """``value`` as pydantic makes a finite number of it; unchanged where it makes none."""
    if type(value) is bool:
        return float(value)
    if type(value) is str and (text := value.strip(_SPACE)).isascii() and text == text.strip():
        try:
            number = float(text)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def coerced_bool(value: Any) -> Any:
    """``value`` as pydantic makes a boolean of it; unchanged where it makes none."""
    if type(value) in (int, float) and value in (0, 1):
        return value == 1
    if type(value) is str:
        lower = value.lower()
        return True if lower in _TRUE else False if lower in _FALSE else value
    return value


def take_bool(source: Json, name: str, prefix: str = "") -> bool:
    """A boolean field; absent means false, and so does null, as in SGLang's own clients."""
    value = source.get(name)
    if value is not None and type(value) is not bool:
        value = source[name] = coerced_bool(value)
    if value is not None and type(value) is not bool:
        raise wrong(prefix + name, "a boolean", value)
    return value is True


def take_int(
    source: Json, name: str, *, least: int = -INT32, most: int = INT32 - 1, prefix: str = ""
) -> int | None:
    """An integer field, or ``None`` when absent or null. Of 32 bits, unless other bounds are given."""
    value = source.get(name)
    if value is None:
        return None
    field = prefix + name
    if type(value) is not int:
        value = source[name] = coerced_int(value)
    if type(value) is not int:
        raise wrong(field, "an integer", value)
    if value < least:
        raise RequestRefused(
            f"{field} must be at least {least}, not {value}", param=field, code="out_of_range"
        )
    if value > most:
        raise RequestRefused(f"{field} must be at most {most}, not {value}", param=field, code="out_of_range")
    return value


def take_number(source: Json, name: str, prefix: str = "") -> None:
    """Check that a field is a number of 32 bits, null or absent."""
    value = source.get(name)
    if value is None:
        return
    field = prefix + name
    if type(value) not in (int, float):
        value = source[name] = coerced_number(value)
    if type(value) not in (int, float):
        raise wrong(field, "a number", value)
    if not -MOST_NUMBER <= value <= MOST_NUMBER:
        raise RequestRefused(
            f"{field} must be from {-MOST_NUMBER:g} to {MOST_NUMBER:g}, not {value:g}",
            param=field,
            code="out_of_range",
        )


def take_string(source: Json, name: str, prefix: str = "", *, most: int | None = None) -> str | None:
    """A string field, or ``None`` when absent or null. most: characters."""
    value = source.get(name)
    if value is not None and type(value) is not str:
        raise wrong(prefix + name, "a string", value)
    if most is not None and value is not None:
        check_name(value, prefix + name, most)
    return value


def take_name(source: Json, name: str, prefix: str = "") -> str | None:
    """A string field that is a name, or ``None`` when absent or null."""
    return take_string(source, name, prefix, most=MAX_NAME_CHARACTERS)


def check_name(value: str, field: str, most: int = MAX_NAME_CHARACTERS) -> None:
    """Refuse a name that is too long to be kept."""
    if len(value) > most:
        raise RequestRefused(
            f"{field} has {len(value)} characters, and may have {most}", param=field, code="out_of_range"
        )


def take_objects(source: Json, name: str, expected: str, *, needed: bool = True) -> list[Json]:
    """A field that is an array of objects.

    Args:
        expected: the name of its elements, for the text of an error.
        needed: refuse a missing or empty field.
    """
    value = source.get(name)
    if value is None and not needed:
        return []
    if type(value) is not list:
        raise wrong(name, expected, value)
    if not value and needed:
        raise empty(name)
    for index, item in enumerate(value):
        if type(item) is not dict:
            raise wrong(f"{name}[{index}]", "an object", item)
    return value


def take_parts(content: Any, field: str, what: str = "parts") -> Iterator[tuple[str, Json]]:
    """(field, part) of the parts of a message's content; none for a text."""
    if type(content) is str:
        return
    if type(content) is not list:
        raise wrong(field, f"a string or an array of {what}", content)
    for index, part in enumerate(content):
        where = f"{field}[{index}]"
        if type(part) is not dict:
            raise wrong(where, "an object", part)
        yield where, part


def empty(field: str) -> RequestRefused:
    """The error for a field that has nothing in it."""
    return RequestRefused(f"{field} is empty", param=field, code="empty_prompt")


def check_strings(source: Json, name: str, prefix: str = "") -> None:
    """Check that a field is a string, an array of strings, null or absent."""
    value = source.get(name)
    if value is None or type(value) is str:
        return
    if type(value) is not list:
        raise wrong(prefix + name, "a string or an array of strings", value)
    for index, item in enumerate(value):
        if type(item) is not str:
            raise wrong(f"{prefix}{name}[{index}]", "a string", item)


def check_patterns(source: Json, name: str, prefix: str = "") -> None:
    """Check that a field is a regular expression of Python's, an array of them, null or absent. More or
    longer ones than a server takes are left to it, unparsed."""
    check_strings(source, name, prefix)
    value = source.get(name)
    for index, pattern in enumerate(value[:MAX_PATTERNS] if type(value) is list else [value]):
        if type(pattern) is not str or len(pattern) > MAX_PATTERN:
            continue
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            field = f"{prefix}{name}[{index}]" if type(value) is list else prefix + name
            raise RequestRefused(
                f"{field} is not a regular expression: {error}", param=field, code="invalid_value"
            ) from None


def check_object(source: Json, name: str, prefix: str = "") -> None:
    """Check that a field is an object, null or absent."""
    value = source.get(name)
    if value is not None and type(value) is not dict:
        raise wrong(prefix + name, "an object", value)


_CHECKS: Mapping[str, Callable[[Json, str, str], object]] = {
    "number": take_number, "boolean": take_bool, "string": take_string, "strings": check_strings,
    "name": take_name,
    "object": check_object, "patterns": check_patterns,
}  # fmt: skip
RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "integer": (-INT32, INT32 - 1), "seed": (-INT64, INT64 - 1), "count": (0, INT32 - 1),
    "positive": (1, INT32 - 1), "choices": (1, MAX_CHOICES), "top": (0, INT32 - 1),
}  # fmt: skip
"""Kind of integer -> least and most. ``top`` is a number of likeliest tokens: at most the vocabulary's."""


def kinds(**names: str) -> dict[str, str]:
    """Field -> kind, for ``check_fields`` and schemas: the names of each kind's fields, parted by blanks."""
    return {name: kind for kind, fields in names.items() for name in fields.split()}


SAMPLING: Final = kinds(
    number="temperature top_p min_p frequency_penalty presence_penalty repetition_penalty",
    integer="top_k min_new_tokens min_tokens",
    seed="seed sampling_seed",
    choices="n",
    boolean="ignore_eos skip_special_tokens no_stop_trim spaces_between_special_tokens",
    string="regex ebnf structural_tag",
    strings="stop",
    patterns="stop_regex",
    stops="stop_token_ids",
)
"""Sampling parameters, wherever they stand."""


def check_fields(
    source: Json, fields: Mapping[str, str], limits: Limits, prefix: str = "", *, coerces: bool = True
) -> None:
    """Check the kinds of fields (null counts as absent), and values that would crash a stock scheduler.

    Args:
        coerces: the server takes values of other types as pydantic coerces them.

    SGLang checks most ranges itself. It does not check ``stop_token_ids`` (kind ``stops``), which index the
    logits as soon as ``min_new_tokens`` (``min_tokens``) is set, and are harmless otherwise.
    """
    for name in source:
        kind = fields.get(name)
        if kind is None:
            continue
        if not coerces and kind != "stops":
            _check_exact(source[name], kind, prefix + name)
        if (check := _CHECKS.get(kind)) is not None:
            check(source, name, prefix)
        elif kind == "stops":
            if source[name] is not None:
                if coerces and type(source[name]) is list:
                    source[name] = [coerced_int(item) for item in source[name]]
                least_length = source.get("min_new_tokens") or source.get("min_tokens")
                check_ids(source[name], prefix + name, limits.vocab_size if least_length else None)
        else:
            least, most = RANGES[kind] if kind != "top" else (0, limits.vocab_size)
            take_int(source, name, least=least, most=most, prefix=prefix)


def _check_exact(value: Any, kind: str, field: str) -> None:
    """Refuse values that a check would coerce."""
    kept = type(value)
    if kind == "number" and type(coerced_number(value)) is not kept:
        raise wrong(field, "a number", value)
    if kind == "boolean" and type(coerced_bool(value)) is not kept:
        raise wrong(field, "a boolean", value)
    if kind in RANGES and type(coerced_int(value)) is not kept:
        raise wrong(field, "an integer", value)


def _no_integer(value: list[Any], field: str) -> RequestRefused:
    index = next(i for i, item in enumerate(value) if type(item) is not int)
    return wrong(f"{field}[{index}]", "an integer", value[index])


def check_ids(value: Any, field: str, vocab_size: int | None) -> array[int]:
    """Token ids as an array of 64-bit integers; may be empty. Without ``vocab_size`` any integers will do."""
    if type(value) is not list:
        raise wrong(field, "an array of token ids", value)
    try:
        ids = array("q", value)
    except OverflowError:
        raise RequestRefused(
            f"{field} has an integer of more than 64 bits", param=field, code="out_of_range"
        ) from None
    except TypeError:
        raise _no_integer(value, field) from None
    if not ids:
        return ids
    numbers = np.frombuffer(ids, dtype=np.int64)
    # Of all that JSON has, an array takes integers and, as 0 and 1, booleans.
    maybe = np.flatnonzero((numbers == 0) | (numbers == 1)).tolist()
    if bool in set(map(type, map(value.__getitem__, maybe))):
        raise _no_integer(value, field)
    if vocab_size is None:
        return ids
    if int(numbers.min()) < 0 or int(numbers.max()) >= vocab_size:
        index = int(np.flatnonzero((numbers < 0) | (numbers >= vocab_size))[0])
        raise RequestRefused(
            f"{field}[{index}] is {value[index]}, which is not a token id: the vocabulary of this model "
            f"has {vocab_size} entries, 0 to {vocab_size - 1}",
            param=f"{field}[{index}]",
            code="token_out_of_vocabulary",
        )
    return ids


def fits(tokens: int, max_new_tokens: int | None, limits: Limits) -> bool:
    """Whether a prompt and its answer fit into the context, by SGLang's own rule."""
    length = limits.context_length
    return limits.truncates or (tokens < length and tokens + (max_new_tokens or 0) <= length)


def check_length(tokens: int, max_new_tokens: int | None, limits: Limits, field: str) -> None:
    """Refuse what does not fit into the context, in SGLang's own words."""
    if fits(tokens, max_new_tokens, limits):
        return
    length = limits.context_length
    if tokens >= length:
        raise RequestRefused(
            f"The input ({tokens} tokens) is longer than the model's context length ({length} tokens).",
            param=field,
            code="context_length_exceeded",
        )
    if max_new_tokens is not None and tokens + max_new_tokens > length:
        raise RequestRefused(
            f"Requested token count exceeds the model's maximum context length of {length} tokens. "
            f"You requested a total of {tokens + max_new_tokens} tokens: {tokens} tokens from the input "
            f"messages and {max_new_tokens} tokens for the completion. Please reduce the number of tokens "
            "in the input messages or the completion to fit within the limit.",
            param=field,
            code="context_length_exceeded",
        )
