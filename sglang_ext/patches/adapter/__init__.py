"""Between SGLang's interfaces and the engine: radix cache, KV manager, scheduler view, and building them."""
