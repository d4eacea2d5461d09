"""Greedy continuations by transformers, in float32: ``transformers_oracle.py TOKENS MODEL... < prompts``.

A script of its own, so that threads and files of transformers end with it.
"""

from __future__ import annotations

import json
import os
import sys

from sglang_ext.patches.cpu import runtime


def main(new_tokens: int, *paths: str) -> None:
    """Read a JSON list of prompts (token ids), print one of continuations for each model."""
    runtime.prepare_process(os.environ)
    import torch
    from transformers import AutoModelForCausalLM

    prompts = json.load(sys.stdin)
    answers = []
    for path in paths:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        answers.append([])
        for prompt in prompts:
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers[-1].append(out[0, len(prompt) :].tolist())
    print(json.dumps(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
