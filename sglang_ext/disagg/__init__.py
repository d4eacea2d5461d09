"""One-sided KV transfer between ranks: KVDirect's section 4 and MemServe's section 4.3, without SGLang.

Start reading at `transfer/engine.py` (the endpoint) and `docs/transfer.md`.
"""
