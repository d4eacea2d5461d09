"""LiteLLM's proxy in front of a router: ``python litellm_proxy.py URL``."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

from openai import OpenAI
from sglang_ext_client import Client

KEY = "sk-example"
"""The proxy starts with a master key only."""
CONFIG = """
model_list:
  - model_name: default
    litellm_params:
      model: openai/default
      api_base: {url}/v1
      api_key: none
      # Clients name their session with x-litellm-session-id; the router reads it.
general_settings:
  forward_client_headers_to_llm_api: true
"""


def ask(proxy: str, router: Client) -> None:
    """Three turns through the proxy."""
    headers = {"x-litellm-session-id": "litellm-proxy"}
    client = OpenAI(base_url=f"{proxy}/v1", api_key=KEY, default_headers=headers)
    messages = [{"role": "system", "content": "You are an agent that edits code. " * 24}]
    for task in ("Read the file.", "Mend it.", "Run the tests again."):
        messages.append({"role": "user", "content": task})
        answer = client.chat.completions.create(
            model="default", messages=messages, max_tokens=8, temperature=0
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        explained = router.explain(answer.id)
        print(json.dumps({"prompt": explained["prompt"]["tokens"], "cached": explained["cached"]["tokens"]}))
    # The router knows the session by the header that the proxy has passed on.
    router.session("litellm-proxy").hint()


def main(url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.format(url=url), encoding="utf-8")
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config)]
        with (Path(folder) / "log").open("wb") as log:
            proxy = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                env={**os.environ, "LITELLM_MASTER_KEY": KEY},
                stdout=log,
                stderr=log,
            )
        try:
            deadline = time.monotonic() + 240
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
                    break
                except OSError:
                    if proxy.poll() is not None or time.monotonic() > deadline:
                        print(
                            (Path(folder) / "log").read_text("utf-8", errors="replace")[-3000:],
                            file=sys.stderr,
                        )
                        raise
                    time.sleep(0.5)
            ask(f"http://127.0.0.1:{port}", Client(url))
        finally:
            proxy.terminate()
            proxy.wait(30)
    print(json.dumps({"litellm": version("litellm")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
