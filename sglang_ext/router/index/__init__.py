"""Who holds how much of a prompt, in which tier."""
