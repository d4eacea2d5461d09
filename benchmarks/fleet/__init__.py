"""A fleet of hundreds of instances, and the papers' large figures, in the simulator."""
