"""Membership: who joins, drains, leaves and dies, alone or shared by several routers."""
