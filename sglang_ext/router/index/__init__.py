"""How much of a prompt each instance holds, by tier."""
