"""``make demo``: a conversation over a cluster, and the sources of its reused tokens.

``script`` holds the conversations, ``client`` sends them and reads the servers' reports, ``report`` prints
the results, and ``python -m examples.demo`` runs the cluster under it.
"""
