"""Where the bytes of blocks are: DRAM and disk, below the engine's own pool.

`tier.py` is the contract of a tier, in both directions; `testing/tier_contract.py` holds every tier to it.
"""
