"""LMCache's local disk backend in a process of its own: run by `lmcache.py`, with another interpreter.

LMCache wants other versions of common packages than SGLang, so it lives in an environment of its own, without
this package and its dependencies: this file imports nothing but the standard library, torch and LMCache. It
reads commands from its input, `clear`, `write` or `read`, one a line, and answers each with the seconds that
it took, in JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

LAYERS = 16
"""Layers of the shape that LMCache gets: its chunks are bytes to the disk, however they are cut."""


PROBE = 64
"""Values at the beginning of each chunk that are looked at after every read."""


class Backend:
    """The backend over `folder`, with its own staging memory for all `chunks` of `chunk_bytes` bytes."""

    def __init__(self, folder: Path, chunk_bytes: int, chunks: int, threads: int, direct: bool) -> None:
        import torch
        from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found,unused-ignore]
        from lmcache.v1.config import LMCacheEngineConfig  # type: ignore[import-not-found,unused-ignore]
        from lmcache.v1.metadata import LMCacheMetadata  # type: ignore[import-not-found,unused-ignore]
        from lmcache.v1.storage_backend import (  # type: ignore[import-not-found,unused-ignore]
            local_cpu_backend,
            local_disk_backend,
        )

        self.folder = folder
        self.direct = direct
        folder.mkdir(parents=True, exist_ok=True)
        gib = chunk_bytes * chunks / 2**30
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            # Twice: chunks that were read are given back before the next read, chunks being written are kept
            # beside them.
            max_local_cpu_size=2 * gib + 0.1,
            local_disk=str(folder),
            max_local_disk_size=2 * gib + 1,
            extra_config={"use_odirect": direct, "disk_io_threads": threads},
        )
        tokens, heads = 256, chunk_bytes // (LAYERS * 2 * 256 * 64 * 2)
        metadata = LMCacheMetadata("benchmark", 1, 1, 0, 0, torch.bfloat16, (LAYERS, 2, tokens, heads, 64))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        memory = local_cpu_backend.LocalCPUBackend(config, metadata, dst_device="cpu")
        self.disk = local_disk_backend.LocalDiskBackend(config, self.loop, memory, dst_device="cpu")
        self.keys = [CacheEngineKey("benchmark", 1, 0, number, torch.bfloat16) for number in range(chunks)]
        shape = torch.Size((2, LAYERS, tokens, heads * 64))
        self.objects: list[Any] = [memory.allocate(shape, torch.bfloat16) for _ in self.keys]
        generator = torch.Generator().manual_seed(20240625)
        for found in self.objects:
            assert found.tensor.nbytes == chunk_bytes
            found.tensor.view(torch.int16).random_(generator=generator)
        self.beginnings = [found.tensor.view(torch.int16).view(-1)[:PROBE].clone() for found in self.objects]

    def clear(self) -> None:
        """Remove every chunk."""
        for key in self.keys:
            if self.disk.contains(key):
                self.disk.remove(key)

    def write(self) -> None:
        """Put every chunk, not synced: the backend has no way to ask for it."""
        left = threading.Semaphore(0)
        for key, found in zip(self.keys, self.objects, strict=True):
            self.disk.submit_put_task(key, found, on_complete_callback=lambda _key: left.release())
        for _ in self.keys:
            if not left.acquire(timeout=120):
                raise TimeoutError("LMCache does not end a put")

    def read(self) -> None:
        """Get every chunk at once, which is how the backend reads in parallel."""
        found = self.disk.batched_get_blocking(self.keys)
        for chunk, beginning in zip(found, self.beginnings, strict=True):
            values = chunk.tensor.view(beginning.dtype).view(-1)[:PROBE]
            assert bool((values == beginning).all())
            # The memory is used again by the next read, which has to bring the values again.
            values.zero_()
            chunk.ref_count_down()

    def close(self) -> None:
        self.disk.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def main() -> int:
    """Arguments as JSON: folder, chunk_bytes, chunks, threads, direct."""
    # LMCache logs to standard output, which is for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    arguments = json.loads(sys.argv[1])
    backend = Backend(Path(arguments.pop("folder")), **arguments)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command = line.strip()
        begin = time.perf_counter()
        {"clear": backend.clear, "write": backend.write, "read": backend.read}[command]()
        answers.write(json.dumps({"seconds": time.perf_counter() - begin}) + "\n")
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
