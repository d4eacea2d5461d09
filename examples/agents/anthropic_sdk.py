"""Anthropic's SDK with a router: ``python anthropic_sdk.py URL``."""

import json
import sys

import anthropic
from sglang_ext_client import Client


def main(url: str) -> None:
    session = Client(url).session("anthropic-sdk")
    client = anthropic.Anthropic(base_url=url, api_key="none", default_headers=session.headers)
    messages = []
    for task in ("Read the file.", "Mend it.", "Run the tests again."):
        messages.append({"role": "user", "content": task})
        answer = client.messages.create(
            model="default",
            max_tokens=8,
            system="You are an agent that edits code. " * 24,
            messages=messages,
            extra_body={"temperature": 0},
        )
        messages.append({"role": "assistant", "content": answer.content})
        # Anthropic's API counts tokens that were read from a cache apart from the others.
        cached = answer.usage.cache_read_input_tokens or 0
        print(json.dumps({"prompt": answer.usage.input_tokens + cached, "cached": cached}))
    print(json.dumps({"anthropic": anthropic.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
