"""How long the index takes to look a prompt up and to insert one."""
