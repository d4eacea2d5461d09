"""A stand-in for a server, without SGLang: ``stand_in.py -m MODULE FLAGS...``, as start lines call Python.

Its cache finds a prompt by its first 64 tokens: the last three in HBM, older ones in DRAM where its flags ask
for a DRAM tier of ours, or HiCache's. KV is 16 numbers for each prompt, in a memory file like that of a DRAM
tier, and the log probability of each token is the sum of these numbers. Its command line is appended to the
file STAND_IN_LOG.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

KNOWN = 64
IN_HBM = 3
NUMBERS = 16


class Cache:
    """Prompts, the latest last, and their KV. below: whether DRAM keeps what leaves HBM."""

    def __init__(self, below: bool) -> None:
        self._below = below
        self._lock = threading.Lock()
        self._order: list[tuple[int, ...]] = []
        self._row: dict[tuple[int, ...], int] = {}
        self._file = os.memfd_create("sglang-ext-dram-stand-in", 0)
        os.ftruncate(self._file, 1 << 16)

    def ask(self, ids: list[int]) -> tuple[dict[str, Any], float]:
        """Fields of an answer's ``meta_info`` on the cache, and the log probability of its tokens."""
        prompt = tuple(ids[:KNOWN])
        with self._lock:
            place = None
            if prompt in self._order:
                in_hbm = prompt in self._order[-IN_HBM:]
                place = "device" if in_hbm else "host" if self._below else None
                self._order.remove(prompt)
            self._order.append(prompt)
            at = 4 * NUMBERS * self._row.setdefault(prompt, len(self._row))
            if place != "host":
                os.pwrite(self._file, np.full(NUMBERS, 0.25, np.float32).tobytes(), at)
            kv = np.frombuffer(os.pread(self._file, 4 * NUMBERS, at), np.float32)
        cached = 0 if place is None else len(prompt)
        details = {} if place is None else {place: cached}
        return {"cached_tokens": cached, "cached_tokens_details": details}, -float(kv.sum(dtype=np.float64))


class Handler(BaseHTTPRequestHandler):
    cache: Cache

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        meta, logprob = self.cache.ask(body["input_ids"])
        self.send_response(200)
        self.end_headers()
        rows: list[list[Any]] = []
        for number in range(body["sampling_params"]["max_new_tokens"]):
            rows.append([logprob, number, None])
            if body["return_logprob"]:
                meta["output_token_logprobs"] = rows
            self.wfile.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        pass


def main(words: list[str]) -> None:
    """Serve until it is ended."""
    with open(os.environ["STAND_IN_LOG"], "a", encoding="utf-8") as log:
        log.write(json.dumps([os.environ.get("SGLANG_PLUGINS"), *words]) + "\n")
    dram = words[words.index("--kv-dram-size") + 1] if "--kv-dram-size" in words else "0"
    Handler.cache = Cache(dram != "0" or "--enable-hierarchical-cache" in words)
    port = int(words[words.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
