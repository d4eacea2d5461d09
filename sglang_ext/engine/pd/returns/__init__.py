"""The return: decode's KV of a request that has ended goes back to prefill (MemServe, PD-Caching-3).

    decode's schedulers    request ended: its blocks are locked and leased, within a budget
    decode's agents        send `Return` to prefill's first rank
    prefill's first rank   has all parts: `TakeBack` to all its schedulers, with SGLang's requests
    prefill's schedulers   reserve memory for the missing blocks (`reservations.py`), or answer why not
    prefill's agents       read one-sidedly the bytes that their shards need, COMPLETE
    prefill's schedulers   insert the blocks that no request has inserted meanwhile
    decode's schedulers    unlock

No request waits for a return: neither its own, which has its answer, nor another one. A return without room
is skipped, and counted with its reason. An emptied cache ends the returns from and to it at once.

The trees of an instance's ranks change in step: each lock, allocation, insertion and unlock follows from
state that all ranks have alike, or that they have agreed upon. One rank's own state (leases, connections,
reads) only delays them.
"""
