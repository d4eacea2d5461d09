"""How fast blocks move between the engine's pool, DRAM and disk."""
