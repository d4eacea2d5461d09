"""MemServe's memory pool without SGLang: python scripts/mempool_example.py DIRECTORY

A prompt's KV is allocated, written, indexed, moved down to DRAM and disk, and found again after a restart.
"""

import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import Namespace
from sglang_ext.mempool import MemPool
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier

layout = BlockLayout.uniform(n_layers=4, planes_per_layer=2, row_bytes=256, block_tokens=16)
namespace = Namespace("my-model", "weights-1", "float16", layout.facts())
prompt = range(64 * 16)
kv = np.random.default_rng(0).integers(0, 256, (64, layout.block_bytes), dtype=np.uint8)

with closing(DiskTier(DiskConfig(Path(sys.argv[1]), 64 << 20), layout)) as disk:
    pool = MemPool.create("one", layout, hbm_blocks=64, dram_blocks=32, disk=disk, namespace=namespace)
    blocks = pool.alloc_mem(64, id="request-1")
    pool.write(blocks, kv)
    pool.insert(prompt, blocks)
    print("moved down:", pool.swap_out(64), pool)

with closing(DiskTier(DiskConfig(Path(sys.argv[1]), 64 << 20), layout)) as disk:
    pool = MemPool.create("one", layout, hbm_blocks=64, dram_blocks=32, disk=disk, namespace=namespace)
    with pool.match(prompt, id="request-2") as hold:
        swapped = pool.swap_in(hold.addresses)
        found, _ = pool.read([block.address for block in swapped if block.address])
        print("found again:", hold.blocks, "as they were:", np.array_equal(found, kv))
