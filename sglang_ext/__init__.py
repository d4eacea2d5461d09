"""A cluster of SGLang instances that shares one KV cache."""
