"""Hooks into SGLang's scheduler, tokenizer process and flags: one module per thing that SGLang calls."""
