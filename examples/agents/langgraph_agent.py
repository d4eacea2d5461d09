"""LangGraph with a router: ``python langgraph_agent.py URL``."""

import json
import sys
from importlib.metadata import version

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from sglang_ext_client import Client, Hints, advise


def main(url: str) -> None:
    session = Client(url).session("langgraph")
    hints = Hints(url)

    def read(path: str) -> str:
        """Read a file."""
        with advise(hints, session=session.name):  # the session's KV is kept ready while the tool runs
            return f"{path} is empty"

    model = ChatOpenAI(
        model="default",
        base_url=f"{url}/v1",
        api_key="none",
        default_headers=session.headers,
        temperature=0,
        max_tokens=8,
    )
    instructions = "You are an agent that edits code. " * 24
    agent = create_agent(model, [read], system_prompt=instructions, checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": session.name}}
    for task in ("Read the file.", "Mend it.", "Run the tests again."):
        state = agent.invoke({"messages": [{"role": "user", "content": task}]}, thread)
        usage = state["messages"][-1].usage_metadata
        cached = usage.get("input_token_details", {}).get("cache_read", 0)
        print(json.dumps({"prompt": usage["input_tokens"], "cached": cached}))
    hints.close()
    print(json.dumps({"langgraph": version("langgraph")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
