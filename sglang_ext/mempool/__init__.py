"""MemServe's memory pool (section 4, table 1): the memory, the index and the ledger of one rank's KV."""
