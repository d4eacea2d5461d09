"""LiteLLM's SDK with a router: ``python litellm_sdk.py URL``."""

import json
import sys
from importlib.metadata import version

import litellm
from sglang_ext_client import Client


def main(url: str) -> None:
    router = Client(url)
    session = router.session("litellm-sdk")
    messages = [{"role": "system", "content": "You are an agent that edits code. " * 24}]
    for task in ("Read the file.", "Mend it.", "Run the tests again."):
        messages.append({"role": "user", "content": task})
        answer = litellm.completion(
            model="openai/default",
            api_base=f"{url}/v1",
            api_key="none",
            messages=messages,
            max_tokens=8,
            temperature=0,
            extra_headers=session.headers,
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        explained = router.explain(answer.id)
        print(json.dumps({"prompt": explained["prompt"]["tokens"], "cached": explained["cached"]["tokens"]}))
    print(json.dumps({"litellm": version("litellm")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
