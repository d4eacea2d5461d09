"""OpenAI's SDK with a router: ``python openai_sdk.py URL``."""

import json
import sys

import openai
from sglang_ext_client import Client


def main(url: str) -> None:
    router = Client(url)
    session = router.session("openai-sdk")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=session.headers)
    messages = [{"role": "system", "content": "You are an agent that edits code. " * 24}]
    for task in ("Read the file.", "Mend it.", "Run the tests again."):
        messages.append({"role": "user", "content": task})
        answer = client.chat.completions.create(
            model="default", messages=messages, max_tokens=8, temperature=0
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        explained = router.explain(answer.id)
        print(json.dumps({"prompt": explained["prompt"]["tokens"], "cached": explained["cached"]["tokens"]}))
        session.hint(ttl_s=60)  # its KV is kept ready while the next task is thought of
    print(json.dumps({"openai": openai.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
