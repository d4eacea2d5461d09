"""The tokenizer of the tiny models: byte-level BPE, 32,000 entries, ChatML-like chat template.

Nothing is downloaded or trained when a model is built: `static/vocabulary.txt.xz` is shipped and holds, one
per line and in the usual byte-level alphabet, first the merges ("left right"), then whole words ("Ġword"). It
was made once by `python -m tests.support.vocabulary_training FILE` from the docstrings, strings and
comments of the Python 3.11 standard library (PSF licence) and of numpy, scipy and networkx (BSD licences),
plus the 3,755 everyday Chinese characters of GB 2312 level 1, which need no corpus. Training is not
repeatable to the byte on another machine (it sees other library versions); the shipped file is what counts.
Real chat text takes a token for 3.5 characters in English and 1.1 in Chinese.

Two properties matter to a KV cache and are tested:

- The tokens of a chat prompt are a strict prefix of the tokens of the next turn's prompt. Every newline is a
  token of its own, so nothing that follows the generation prompt can merge into it.
- The answer of a tiny model re-tokenises to the ids it generated (`emitted_ids` defines for which ids). A
  pre-token that is an entry is taken whole (`ignore_merges`), so any sequence of entries of the form "space,
  letters" comes back as itself; the models' initialisation favours these entries, see `models.py`.
"""

from __future__ import annotations

import json
import lzma
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

VOCAB_SIZE = 32_000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2: beginning of text and padding; start of a message; end of a message (the stop token)."""
BOS_TOKEN_ID = 0
EOS_TOKEN_ID = 2
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Of a vision model, behind the others: around a picture, and in the place of a picture and of a video."""

_WORD = re.compile("Ġ[A-Za-z]+")
_STATIC = files("sglang_ext.testing") / "static"


@cache
def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte 0..255 in byte-level BPE (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    return tuple(chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256))


@cache
def vocabulary() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """(entries in the order of their ids, merges in the order of their rank)."""
    lines = lzma.decompress((_STATIC / "vocabulary.txt.xz").read_bytes()).decode("utf-8").splitlines()
    merges = tuple((left, right) for left, _, right in (line.partition(" ") for line in lines) if right)
    words = tuple(line for line in lines if " " not in line)
    entries = (*SPECIAL_TOKENS, *byte_alphabet(), *(left + right for left, right in merges), *words)
    if len(entries) != VOCAB_SIZE or len(set(entries)) != VOCAB_SIZE:
        raise ValueError(
            f"static/vocabulary.txt.xz gives {len(entries)} entries, {len(set(entries))} distinct, "
            f"not {VOCAB_SIZE}: the shipped file was changed; restore it from the release"
        )
    return entries, merges


@cache
def emitted_ids() -> tuple[int, ...]:
    """Ids of the entries "space, letters": any sequence of them decodes to text that encodes to itself."""
    return tuple(index for index, entry in enumerate(vocabulary()[0]) if _WORD.fullmatch(entry))


def chat_template(*, vision: bool = False) -> str:
    """The Jinja source of the chat template: <|im_start|>role, newline, content, <|im_end|>, newline.

    With `vision`, content may be parts, and a part that is no text becomes the tokens of a picture.
    """
    name = "chat_template_vision.jinja" if vision else "chat_template.jinja"
    return (_STATIC / name).read_text("utf-8").rstrip("\n")


def tokenizer_json(*, vision: bool = False) -> dict[str, Any]:
    """The tokenizer in the format of the `tokenizers` library. vision: with `VISION_TOKENS`."""
    entries, merges = vocabulary()
    special = dict(enumerate(SPECIAL_TOKENS)) | (dict(enumerate(VISION_TOKENS, VOCAB_SIZE)) if vision else {})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
            ],
        },
        "post_processor": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {entry: index for index, entry in enumerate(entries)},
            "merges": [list(pair) for pair in merges],
        },
    }


def tokenizer_config(context_length: int) -> dict[str, Any]:
    """The fields that transformers' AutoTokenizer reads besides tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }


def write_tokenizer(out_dir: Path, context_length: int, *, vision: bool = False) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `out_dir`."""
    compact = json.dumps(tokenizer_json(vision=vision), ensure_ascii=False, separators=(",", ":"))
    (out_dir / "tokenizer.json").write_text(compact, "utf-8")
    config = json.dumps(tokenizer_config(context_length), indent=2)
    (out_dir / "tokenizer_config.json").write_text(config + "\n", "utf-8")
    (out_dir / "chat_template.jinja").write_text(chat_template(vision=vision), "utf-8")
