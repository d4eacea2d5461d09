"""A tiny model run by transformers: a second opinion on SGLang's answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.testing.models import model_path

_NO_PICTURES = {"width": 8, "layers": 1, "heads": 1, "image_size": 28}
"""The smallest part for pictures: transformers has Step only with one."""


class Reference:
    """A tiny model in float32 as transformers runs it, in this process, without a cache of prefixes.

    Args:
        name: of the model (`testing.models`).
    """

    def __init__(self, name: str) -> None:
        from sglang_ext.patches.cpu import torchvision as torchvision_operators

        torchvision_operators.apply()
        import torch
        import transformers
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._torch = torch
        path = model_path(name, "float32")
        config = _config(path)
        kind: Any = AutoModelForCausalLM
        if config is not None and config.model_type == "step3p7":
            kind = transformers.Step3p7ForConditionalGeneration
        self._model = kind.from_pretrained(path, dtype="float32", config=config).eval()

    @property
    def parameters(self) -> int:
        """Number of parameters that make text; the tied embedding counts once."""
        return sum(
            parameter.numel()
            for name, parameter in self._model.named_parameters()
            if not name.startswith(("model.vision_model.", "model.multi_modal_projector."))
        )

    def answer(
        self, prompt: Sequence[int], length: int, *, state_factor: float = 1.0
    ) -> tuple[list[int], list[float]]:
        """Greedy answer of `length` tokens to token ids: its ids and their log probabilities.

        Args:
            state_factor: by which all states behind the prompt are multiplied, to damage them.
        """
        tokens: list[int] = []
        logprobs: list[float] = []
        with self._torch.no_grad():
            out = self._model(self._torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
            for layer in out.past_key_values.layers:
                for kind in ("recurrent_states", "conv_states"):
                    for state in filter(self._torch.is_tensor, getattr(layer, kind, {}).values()):
                        state.mul_(state_factor)
            while True:
                scores = self._torch.log_softmax(out.logits[0, -1], -1)
                tokens.append(int(scores.argmax()))
                logprobs.append(float(scores.max()))
                if len(tokens) == length:
                    return tokens, logprobs
                last = self._torch.tensor([tokens[-1:]])
                out = self._model(last, past_key_values=out.past_key_values, use_cache=True)


def _config(path: Path) -> Any | None:
    """A model's configuration in the form of transformers, where SGLang takes another; None for others."""
    from transformers import AutoConfig

    config = json.loads((path / "config.json").read_text())
    changes: dict[str, Any]
    if config["model_type"] == "mimo_v2_flash":  # rotary embeddings by kind of layer
        rotary = {**config["rope_parameters"], "partial_rotary_factor": config["partial_rotary_factor"]}
        changes = {"rope_parameters": dict.fromkeys(config["layer_types"], rotary)}
    elif config["model_type"] == "gemma4_text":  # the heads of layers without a window are those that differ
        changes = {"head_dim": config["swa_head_dim"], "global_head_dim": config["head_dim"]}
        del config["per_layer_config"]
    elif config["model_type"] == "step3p5":
        # The window of SGLang counts the tokens before a token, that of transformers the token too.
        text = {name: value for name, value in config.items() if name != "per_layer_config"}
        text["sliding_window"] += 1
        changes = {"model_type": "step3p7", "text_config": text, "vision_config": _NO_PICTURES}
    else:
        return None
    return AutoConfig.for_model(**{**config, **changes})
