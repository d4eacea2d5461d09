"""A cluster of SGLang instances that shares one KV cache."""

from pathlib import Path

from sglang_ext import native

native.use("sglang_ext", Path(__file__).parent)  # before any module that may be compiled is imported
