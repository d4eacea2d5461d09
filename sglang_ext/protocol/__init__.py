"""Messages between processes: what instances, routers and people say to each other."""
