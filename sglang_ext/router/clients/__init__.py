"""Clients: where they name their sessions, and repairs of parts of their prompts that defeat caches."""
