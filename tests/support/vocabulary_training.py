"""How `static/vocabulary.txt.xz` was made. Not used when a model is built; see `tokenizer.py` for the why."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import lzma
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sglang_ext.testing.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, byte_alphabet

LIBRARIES = ("numpy", "scipy", "networkx")
ENGLISH_MERGES = 7_500
CHINESE_PUNCTUATION = (
    "\u3001\u3002\u300a\u300b\u3010\u3011\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
    "\u2014\u2018\u2019\u201c\u201d\u2026"
)

_SKIPPED = re.compile(r"/(tests?|idle_test|lib2to3|site-packages|encodings)/")
_WORD_IN_PROSE = re.compile(r"(?<= )[A-Za-z]?[a-z]+(?=[ ,.;:!?)]|$)", re.MULTILINE)


def _prose(root: Path) -> Iterator[str]:
    """Strings with at least three spaces, and comments, of every module below `root`."""
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.search("/" + str(path.relative_to(root))):
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
            tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 3:
                yield node.value
        yield from (token.string[1:] for token in tokens if token.type == tokenize.COMMENT)


def _corpus() -> list[str]:
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"training needs {library} installed: pip install {library}")
        roots.append(Path(spec.origin).parent)
    return [text for root in roots for text in _prose(root)]


def _english_merges(corpus: list[str]) -> list[str]:
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split_newlines = pre_tokenizers.Split("\n", "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_newlines, byte_level])
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=256 + ENGLISH_MERGES, initial_alphabet=list(byte_alphabet()), show_progress=False
        ),
    )
    ascii_only = set(byte_alphabet()[:128])
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    return [f"{left} {right}" for left, right in pairs if set(left + right) <= ascii_only]


def _chinese_merges() -> list[str]:
    """Two merges per character (three UTF-8 bytes): GB 2312 level 1 is rows 16 to 55 of its table."""
    rows = (bytes((0xA0 + row, 0xA0 + cell)) for row in range(16, 56) for cell in range(1, 95))
    characters = "".join(code.decode("gb2312", errors="ignore") for code in rows) + CHINESE_PUNCTUATION
    alphabet = byte_alphabet()
    merges: dict[str, None] = {}
    for character in dict.fromkeys(characters):
        encoded = [alphabet[byte] for byte in character.encode()]
        for length in range(1, len(encoded)):
            merges["".join(encoded[:length]) + " " + encoded[length]] = None
    return list(merges)


def train() -> list[str]:
    """The lines of vocabulary.txt: merges, then as many of the most frequent words as there are ids left."""
    corpus = _corpus()
    merges = _english_merges(corpus) + _chinese_merges()
    taken = {merge.replace(" ", "") for merge in merges}
    counts = Counter(word for text in corpus for word in _WORD_IN_PROSE.findall(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    words = ["Ġ" + word for word in ranked if "Ġ" + word not in taken]
    left = VOCAB_SIZE - len(SPECIAL_TOKENS) - 256 - len(taken)
    if len(words) < left:
        raise ValueError(f"the corpus has {len(words)} further words, {left} are needed")
    return merges + words[:left]


def main(arguments: list[str] | None = None) -> int:
    """`FILE`: make a vocabulary from the libraries installed here."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.vocabulary_training", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="where to write it")
    options = parser.parse_args(arguments)
    options.file.write_bytes(lzma.compress(("\n".join(train()) + "\n").encode(), preset=9))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
