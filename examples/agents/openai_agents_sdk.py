"""OpenAI's Agents SDK with a router: ``python openai_agents_sdk.py URL``."""

import asyncio
import json
import sys
from importlib.metadata import version

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from sglang_ext_client import Client


@function_tool
def read(path: str) -> str:
    """Read a file."""
    return f"{path} is empty"


async def main(url: str) -> None:
    set_tracing_disabled(True)  # traces would go to OpenAI
    session = Client(url).session("openai-agents")
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", default_headers=session.headers)
    agent = Agent(
        name="editor",
        instructions="You are an agent that edits code. " * 24,
        tools=[read],
        model=OpenAIChatCompletionsModel(model="default", openai_client=client),
        model_settings=ModelSettings(max_tokens=8, temperature=0),
    )
    conversation = []
    for task in ("Read the file.", "Mend it.", "Run the tests again."):
        result = await Runner.run(agent, [*conversation, {"role": "user", "content": task}])
        conversation = result.to_input_list()
        usage = result.raw_responses[-1].usage
        cached = usage.input_tokens_details.cached_tokens
        print(json.dumps({"prompt": usage.input_tokens, "cached": cached}))
    print(json.dumps({"openai-agents": version("openai-agents")}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
