"""Cluster membership: instances join, drain, leave and die; kept by one router or shared by several."""
