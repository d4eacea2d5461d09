"""Answer a chat template that fails with a 400 instead of a 500.

Change: around ``OpenAIServingChat._process_messages``, from which chat completions, responses and messages
get their prompt. A template is a program that is given the client's messages, tools and
``chat_template_kwargs``. SGLang reports errors of Jinja's own and ``TypeError`` as the client's; others, such
as a division by an argument that is 0, end in "Internal Server Error".

Why no extension point serves: there is none between the request and the template.

For: any device. The router refuses such arguments itself where it renders the template.
Can go: when SGLang reports every error of a template as the client's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_ext.patches.plugin_hooks import Hook, hook_patch

logger = logging.getLogger(__name__)


def around_process(stock: Callable[..., Any], serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``_process_messages``.

    Raises:
        ValueError: the template fails; the message names the field.
    """
    given = request.chat_template_kwargs
    try:
        return stock(serving, request, *args, **kwargs)
    except ValueError:
        raise
    except Exception as error:
        logger.warning("the chat template failed", exc_info=error)
        field = "chat_template_kwargs" if given else "messages"
        kind = type(error).__name__
        why = f"the chat template failed: {kind}: {error}"
        raise ValueError(f"{field} cannot be used: {why}") from error


PATCH = hook_patch(
    "template_errors",
    "answer a chat template that fails with a 400 that names the field",
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        "around",
        around_process,
    ),
)
