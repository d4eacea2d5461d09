"""The cost to the scheduler of sending every placement to routers, and the rate at which a router takes them
in."""
