"""Parts that SGLang lacks on a machine without a GPU: kernels, attention, the allocator, forked children."""
