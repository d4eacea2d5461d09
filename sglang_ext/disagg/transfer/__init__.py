"""CONNECT, TRANSFER, COMPLETE: both ends of a connection between two ranks."""
