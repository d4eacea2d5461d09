"""``make demo``: a conversation over a cluster, and what of it was reused from where.

``script`` is what is said, ``client`` says it and reads what the servers report, ``report`` prints it, and
``python -m examples.demo`` runs the cluster under it.
"""
