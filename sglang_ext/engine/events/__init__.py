"""What an instance tells routers: placement events, heartbeats, its registration."""
