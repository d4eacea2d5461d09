"""Answer embeddings with the name under which the model is served.

What: after ``OpenAIServingEmbedding._build_embedding_response``, which names the model by its path on the
server's disk, also with ``--served-model-name``. All other answers have the served name, or the one that the
client sent.

Why no extension point serves: the path is in the middle of the function.

For: any device.
Can go: when SGLang answers embeddings with the served name.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.patches.plugin_hooks import Hook, hook_patch


def after_build(response: Any, serving: Any, *_args: Any, **_kwargs: Any) -> Any:
    """After ``_build_embedding_response``."""
    response.model = serving.tokenizer_manager.served_model_name
    return response


PATCH = hook_patch(
    "served_name",
    "embeddings are answered with the model's served name instead of its path on disk",
    Hook(
        "sglang.srt.entrypoints.openai.serving_embedding.OpenAIServingEmbedding._build_embedding_response",
        "after",
        after_build,
    ),
)
