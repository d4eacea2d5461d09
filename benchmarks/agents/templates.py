"""How much of a turn, its answer included, a chat template repeats in the next turn.

    python -m benchmarks.agents.templates TEMPLATE.jinja... [--keep-reasoning]

The answer of a turn is taken in the form that the template gives it as the last message, in which models are
trained to generate it. Characters are counted: a token is lost where its characters are.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
from collections.abc import Callable, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""(messages, whether a generation prompt follows) -> text."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "You are a coding agent. " * 40}
TEXT = "One line of the file after another. " * 20
REASONING = "I should look at the file first, and then think about its contents. " * 10
THINKS = {"enable_thinking": True, "thinking": True}
"""The arguments by which models of both kinds of template reason."""
KEEP = {"preserve_thinking": True, "drop_thinking": False}
"""The arguments by which templates keep the reasoning of earlier answers. GLM-5.3 keeps it by default."""


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def answer(text: str = "", *, reasoning: str = "", calls: bool = False) -> Message:
    """A message of the model, which calls a tool or does not."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        # Templates disagree on the name.
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        call = {"name": "read", "arguments": {"path": "a.py"}}
        message["tool_calls"] = [{"id": "c0", "type": "function", "function": call}]
    return message


RESULT: Message = {"role": "tool", "tool_call_id": "c0", "name": "read", "content": TEXT}
START = [SYSTEM, user("Read it.")]
CASES: dict[str, tuple[list[Message], Message, Message]] = {
    "answer, then the user": (START, answer(TEXT), user("And now?")),
    "reasoning and answer, then the user": (START, answer(TEXT, reasoning=REASONING), user("And now?")),
    "tool call, then its result": (START, answer(calls=True), RESULT),
    "reasoning and tool call, then its result": (START, answer(reasoning=REASONING, calls=True), RESULT),
    "tool calls with reasoning, answer, then the user": (
        [*START, answer(reasoning=REASONING, calls=True), RESULT],
        answer(TEXT, reasoning=REASONING),
        user("And now?"),
    ),
}
"""Kind of turn -> (messages before the answer, the answer, the message after it)."""


def share(render: Render, before: Sequence[Message], said: Message, after: Message) -> float:
    """The share of prompt and answer with which the next prompt begins."""
    prompt, told = render(before, True), render([*before, said], False)
    # Where the template does not keep the generation prompt, the answer follows it all the same; where it
    # leaves the reasoning out, that has been generated all the same.
    reasoning = said.get("reasoning", "")
    missing = "" if reasoning.strip() in told else reasoning
    whole = prompt + missing + told[_common(prompt, told) :]
    following = render([*before, said, after], True)
    return _common(whole, following) / len(whole)


def _common(one: str, other: str) -> int:
    both = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


def of_jinja(template: str, **arguments: Any) -> Render:
    """The rendering of a template as transformers makes it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Sequence[Message], answer_follows: bool) -> str:
        rendered, _ = render_jinja_template(
            [list(messages)],
            tools=TOOLS,
            chat_template=template,
            add_generation_prompt=answer_follows,
            **arguments,
        )
        text: str = rendered[0]
        return text

    return render


def of_glm(name: str, **arguments: Any) -> Render:
    """The rendering of GLM-5.3, which is a module of SGLang's and no template."""
    path = distribution("sglang").locate_file("sglang/srt/parser/glm53_chat_template.py")
    segments = getattr(_module(Path(str(path))), name)

    def render(messages: Sequence[Message], answer_follows: bool) -> str:
        return "".join(
            segments(list(messages), tools=TOOLS, add_generation_prompt=answer_follows, **arguments)
        )

    return render


def of_deepseek_v32(*, drop_thinking: bool) -> Render:
    """The rendering of DeepSeek V3.2, which is a module of SGLang's too."""
    path = distribution("sglang").locate_file("sglang/srt/entrypoints/openai/encoding_dsv32.py")
    encode = _module(Path(str(path))).encode_messages

    def render(messages: Sequence[Message], answer_follows: bool) -> str:
        first, *others = copy.deepcopy(list(messages))
        for message in others:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        first["tools"] = TOOLS
        text: str = encode([first, *others], thinking_mode="thinking", drop_thinking=drop_thinking)
        return text

    return render


def _module(path: Path) -> Any:
    """A module of SGLang's without the package, whose import takes seconds."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("templates", nargs="*", type=Path)
    parser.add_argument("--keep-reasoning", action="store_true", help="set the arguments that keep reasoning")
    given = parser.parse_args()
    kept = KEEP if given.keep_reasoning else {}
    renders = {
        path.stem: of_jinja(path.read_text(encoding="utf-8"), bos_token="", **THINKS, **kept)
        for path in given.templates
    }
    for name in ("render_glm53_segments", "render_glm53_flash_segments"):
        renders[name] = of_glm(name, enable_thinking=True)
    renders["encoding_dsv32"] = of_deepseek_v32(drop_thinking=not given.keep_reasoning)
    print("| template |", " | ".join(CASES), "|")
    print("|---" * (len(CASES) + 1) + "|")
    for name, render in renders.items():
        print(f"| {name} |", " | ".join(_cell(render, *case) for case in CASES.values()), "|")


def _cell(render: Render, before: Sequence[Message], said: Message, after: Message) -> str:
    try:
        return f"{share(render, before, said, after):.0%}"
    except Exception:  # noqa: BLE001 - of V3.2, whose answers have reasoning or call a tool
        return "-"


if __name__ == "__main__":
    main()
