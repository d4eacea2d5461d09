"""KV on its way into a rank's memory: one lifecycle, and the agreement of the ranks on each step of it"""
