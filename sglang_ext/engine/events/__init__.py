"""An instance's messages to routers: placement events, heartbeats, its registration."""
