"""A tiny model run by transformers: a second opinion on SGLang's answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.testing.models import model_path


class Reference:
    """A tiny model in float32 as transformers runs it, in this process, without a cache of prefixes.

    Args:
        name: of the model (`testing.models`).
    """

    def __init__(self, name: str) -> None:
        from sglang_ext.patches.cpu import torchvision as torchvision_operators

        torchvision_operators.apply()
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._torch = torch
        path = model_path(name, "float32")
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype="float32", **_changes(path)).eval()

    @property
    def parameters(self) -> int:
        """Number of parameters; the tied embedding counts once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

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


def _changes(path: Path) -> dict[str, Any]:
    """Changes of a model's configuration: MiMo-V2's rotary embeddings, which transformers takes by layer."""
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] != "mimo_v2_flash":
        return {}
    rotary = {**config["rope_parameters"], "partial_rotary_factor": config["partial_rotary_factor"]}
    return {"rope_parameters": dict.fromkeys(config["layer_types"], rotary)}
