"""The HTTP APIs: one module per API holds all that the router knows of it.

To add one, write its module (see ``dialect.Dialect``) and name it here.
"""

from sglang_ext.router.api.chat import CHAT, INVOCATIONS
from sglang_ext.router.api.completions import COMPLETIONS
from sglang_ext.router.api.dialect import register
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.messages import MESSAGES
from sglang_ext.router.api.pooling import (
    CLASSIFY,
    EMBEDDINGS,
    ENCODE,
    NATIVE_CLASSIFY,
    RERANK,
    SCORE,
)
from sglang_ext.router.api.responses import RESPONSES
from sglang_ext.router.api.rewritten.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from sglang_ext.router.api.rewritten.vertex import VERTEX

register(GENERATE, CHAT, INVOCATIONS, COMPLETIONS, RESPONSES, MESSAGES)
register(EMBEDDINGS, ENCODE, CLASSIFY, NATIVE_CLASSIFY, SCORE, RERANK)
register(OLLAMA_CHAT, OLLAMA_GENERATE, VERTEX)
