"""Bodies of requests made from the corpus, for a router that listens: with stand-ins and real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import orjson
from api_fuzz import bounded
from mutations import rewritten

CORPUS = Path(__file__).parent / "corpus"
FOLDERS = {
    "/generate": "body-generate",
    "/v1/chat/completions": "body-v1-chat-completions",
    "/v1/completions": "body-v1-completions",
    "/v1/responses": "body-v1-responses",
    "/v1/messages": "body-v1-messages",
    "/v1/messages/count_tokens": "messages-count",
    "/v1/advisory": "advisory",
}
OTHERS = ("/tokenize", "/detokenize", "/abort_request", "/v1/tokenize", "/cluster/instances")


def bodies(count: int, random: Random) -> Iterator[tuple[str, bytes]]:
    """So many (path, body); most at the path for which the seed was made. None generates for long."""
    seeds = {path: _read(folder) for path, folder in FOLDERS.items()}
    other = _read("http")
    everything = [seed for each in seeds.values() for seed in each]
    for _ in range(count):
        path = random.choice((*FOLDERS, *FOLDERS, *OTHERS))
        body = rewritten(random.choice(seeds.get(path, other)), everything, random)
        try:
            value = orjson.loads(body)
            bounded(path, value)
            body = orjson.dumps(value)
        except (orjson.JSONDecodeError, orjson.JSONEncodeError, TypeError):
            pass  # no JSON, or nothing that could be long
        yield path, body


def _read(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / folder).iterdir())]
