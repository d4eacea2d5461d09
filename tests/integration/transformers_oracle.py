"""Greedy continuations by transformers, in float32: ``transformers_oracle.py MODEL TOKENS < prompts.json``.

A script of its own, so that what transformers starts and writes ends with it.
"""

from __future__ import annotations

import json
import os
import sys

from sglang_ext.patches.cpu import runtime


def main(path: str, new_tokens: int) -> None:
    """Read a JSON list of prompts (token ids), print one of continuations."""
    runtime.prepare_process(os.environ)
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers = []
    for prompt in json.load(sys.stdin):
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
