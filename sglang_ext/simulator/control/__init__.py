"""The router's control of a simulated fleet: the limits of its tenants, and the roles of instances."""
