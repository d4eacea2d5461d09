"""From prompts to token ids, the same as the server's."""
