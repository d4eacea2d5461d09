"""What answers each endpoint."""
