"""A program in SGLang's own frontend language, against the router: nothing in it knows that it is one.

    python examples/frontend_program.py --url http://127.0.0.1:30000

It triages support tickets in a batch. Each ticket is classified with ``select``, judged from three sides at
once with ``fork``, and given an order number and a deadline with ``gen`` and a regular expression. All
tickets share the instructions, and the forks of a ticket share the ticket: with the prefix cache of one
server that costs one prefill, and so it does behind the router, because prompts go where their beginning is.

SGLang must be importable where this runs; for machines without a GPU see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os

import sglang as sgl

INSTRUCTIONS = """You are the triage desk of a web shop. Read the ticket, decide where it belongs, look at it
from every side, and fill in the form. Be brief, be fair, and never promise a refund.
"""
TEAMS = ["shipping", "billing", "returns", "abuse"]
SIDES = ["the customer", "the shop", "the carrier"]
TICKETS = [
    "My parcel was due on Monday and the tracking page has not changed since.",
    "You have charged my card twice for the same lamp.",
    "The lamp came in two pieces. I would like another one.",
    "Somebody orders things in my name.",
]


@sgl.function
def triage(s, ticket: str, tokens: int):  # type: ignore[no-untyped-def]
    s += INSTRUCTIONS + "Ticket: " + ticket + "\n"
    s += "Team: " + sgl.select("team", choices=TEAMS) + "\n"
    sides = s.fork(len(SIDES))
    for side, name in zip(sides, SIDES, strict=True):
        side += f"What matters to {name}: " + sgl.gen("view", max_tokens=tokens, stop="\n")
    s += "Sides:\n"
    for side, name in zip(sides, SIDES, strict=True):
        s += f"- {name}: " + side["view"] + "\n"
    s += "Order: " + sgl.gen("order", regex=r"[A-Z]{2}-[0-9]{4}", max_tokens=16) + "\n"
    s += "Days until it must be solved: " + sgl.gen("days", regex=r"[1-9]", max_tokens=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the router, or any SGLang server")
    parser.add_argument("--api-key", default=os.environ.get("SGLANG_API_KEY"))
    parser.add_argument("--tokens", type=int, default=24, help="tokens per side")
    parser.add_argument("--threads", type=int, default=4, help="tickets at a time")
    options = parser.parse_args()
    sgl.set_default_backend(sgl.RuntimeEndpoint(options.url, api_key=options.api_key))

    # One ticket as a stream, as a user would watch it.
    state = triage.run(ticket=TICKETS[0], tokens=options.tokens, stream=True)
    streamed = "".join(state.text_iter())

    states = triage.run_batch(
        [{"ticket": ticket, "tokens": options.tokens} for ticket in TICKETS], num_threads=options.threads
    )
    rows = [
        {"ticket": t, **{n: s[n] for n in ("team", "order", "days")}}
        for t, s in zip(TICKETS, states, strict=True)
    ]
    print(json.dumps({"streamed": len(streamed), "tickets": rows}, indent=2))


if __name__ == "__main__":
    main()
