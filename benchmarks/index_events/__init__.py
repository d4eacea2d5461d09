"""What telling routers of every placement costs the scheduler, and how fast a router takes it in."""
