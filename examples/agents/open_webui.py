"""Open WebUI in front of a router: ``python open_webui.py URL``. Its data is in a temporary folder."""

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

SETTINGS = {
    "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "False",
    # Requests carry the id of their chat, by which the router knows the session.
    "ENABLE_FORWARD_USER_INFO_HEADERS": "True",
    # For this example: no accounts, and nothing is downloaded.
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "example",
    "OFFLINE_MODE": "True",
    "RAG_EMBEDDING_ENGINE": "openai",
}


def call(url: str, body: object = None, token: str = "") -> dict:
    """The JSON of an answer, to a GET without a body."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, sent, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def ask(webui: str) -> None:
    """Three turns of a chat."""
    token = call(f"{webui}/api/v1/auths/signin", {"email": "", "password": ""})["token"]
    model = call(f"{webui}/api/models", token=token)["data"][0]["id"]
    messages = [{"role": "system", "content": "You are an agent that edits code. " * 24}]
    for task in ("Read the file.", "Mend it.", "Run the tests again."):
        messages.append({"role": "user", "content": task})
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": False}
        answer = call(f"{webui}/api/chat/completions", body, token)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        print(json.dumps({"prompt": usage["prompt_tokens"], "cached": cached}))


def main(url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).parent / "open-webui")
    with tempfile.TemporaryDirectory() as folder:
        settings = {**os.environ, **SETTINGS, "DATA_DIR": folder, "OPENAI_API_BASE_URL": f"{url}/v1"}
        log = Path(folder) / "log"
        with log.open("wb") as written:
            server = subprocess.Popen(
                [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
                env=settings,
                cwd=folder,
                stdout=written,
                stderr=written,
            )
        try:
            deadline = time.monotonic() + 400
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        print(log.read_text("utf-8", errors="replace")[-3000:], file=sys.stderr)
                        raise
                    time.sleep(1)
            ask(f"http://127.0.0.1:{port}")
        finally:
            server.terminate()
            server.wait(60)
    print(json.dumps({"open-webui": version("open-webui")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
