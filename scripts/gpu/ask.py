"""ask.py URL OUT.json: TTFT by where a prefix lies, of one server with the plugin or with HiCache.

Prompts are random token ids; 512 new tokens follow each known beginning. HBM is emptied by other prompts, as
many as fill the pool (`--pool TOKENS`); every answer says what it had cached, and one from elsewhere is
reported as such. Prints medians; a TTFT is the first streamed event's.
"""

import argparse
import json
import random
import statistics
import time
import urllib.request
from pathlib import Path

RNG = random.Random(1)


def prompt(n):
    """Random token ids."""
    return [RNG.randrange(100, 30_000) for _ in range(n)]


def ask(url, ids, new=1):
    """Seconds to the first event, cached tokens, and seconds to the end."""
    body = {
        "input_ids": ids,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    }
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin = time.perf_counter()
    first = meta = None
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begin
                meta = json.loads(line[6:])["meta_info"]
    return first, meta.get("cached_tokens", 0), time.perf_counter() - begin


def measured(given, length):
    """Medians for prompts of one length, in milliseconds, by place."""
    found = {"computed": [], "below HBM": [], "HBM": []}
    for _ in range(given.rounds):
        base = prompt(length - given.new)
        seconds, cached, _ = ask(given.url, base + prompt(given.new))
        assert cached < 16, cached
        found["computed"].append(seconds)
        time.sleep(0.1)
        seconds, cached, _ = ask(given.url, base + prompt(given.new))
        if cached >= 0.9 * len(base):
            found["HBM"].append(seconds)
        for _ in range(given.pool // 8192 + 1):
            ask(given.url, prompt(8192))
        time.sleep(0.2)
        seconds, cached, _ = ask(given.url, base + prompt(given.new))
        if cached >= 0.9 * len(base):
            found["below HBM"].append(seconds)
        else:
            print("not found again:", length, cached)
    return {"tokens": length, **{k: 1000 * statistics.median(v) if v else None for k, v in found.items()}}


def main():
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pool", type=int, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=512)
    given = parser.parse_args()
    rows = []
    for length in given.lengths:
        rows.append(measured(given, length))
        print(rows[-1], flush=True)
    first, _, whole = ask(given.url, prompt(512), new=128)
    print("decode alone, ms per token:", 1000 * (whole - first) / 127)
    given.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
