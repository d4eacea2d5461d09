"""Hosts that share nothing, made of this machine's namespaces, and the network between them."""
