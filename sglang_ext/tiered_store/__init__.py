"""Where the bytes of blocks are: DRAM and disk, below the engine's own pool.

tier.py           the contract of a tier, in both directions; outcomes; memory that tiers read and write
dram.py           the arena: one mapping, cut into blocks       (arena_memory.py: huge, shared, pinned)
arena_tier.py     blocks in the arena, by key
copy.py           pool <-> arena, layer by layer, without the GIL                (_kernels.py: compiled)
disk.py           the disk tier             (disk_state, disk_read, disk_write, disk_reclaim: its parts)
  index.py        key -> run, in LMDB                               (index_rows.py: what is stored there)
  segments.py     the files                        (segment_format.py: their bytes; files.py: the calls)
  reclaim.py      which segments go when room is needed
  owner.py        one owner per directory
  disk_check.py   check, repair and measure a directory
layers.py         which layer of which request is read next
loader.py         threads that read layers in that order
write_behind.py   a thread that writes blocks to a slower tier in groups
"""
