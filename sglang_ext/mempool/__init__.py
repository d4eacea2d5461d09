"""MemServe's memory pool (section 4): memory, index and transfer of one rank's KV, in nine calls.

store.py     the rank's memory, index and ledger by key and tier: what serving paths call
address.py   the address of a block: instance, epoch, tier, place, and the grant it came with
grants.py    who was given which addresses, until when
regions.py   the bytes of a tier, and arenas
tiers.py     blocks of the index on their way between HBM, DRAM and disk; arenas as tiers of the store
pool.py      MemPool: the nine calls for owners; memory.py, indexing.py, holding.py, checks.py carry them out
peers.py     transfer and transfer_with_insert; receiving.py at the other end; envelope.py in between
"""

from sglang_ext.mempool.address import Address, AddressError, MemType
from sglang_ext.mempool.grants import Hold
from sglang_ext.mempool.holding import Swapped
from sglang_ext.mempool.indexing import Inserted
from sglang_ext.mempool.peers import Transferred, serve
from sglang_ext.mempool.pool import MemPool
from sglang_ext.mempool.receiving import PoolReceiver, Received
from sglang_ext.mempool.regions import ArenaRegion, OutOfBlocksError, Region
from sglang_ext.tiered_store.tier import Outcome

__all__ = [
    "Address",
    "AddressError",
    "ArenaRegion",
    "Hold",
    "Inserted",
    "MemPool",
    "MemType",
    "OutOfBlocksError",
    "Outcome",
    "PoolReceiver",
    "Received",
    "Region",
    "Swapped",
    "Transferred",
    "serve",
]
