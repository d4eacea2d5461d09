"""How much slower one tenant gets beside another that stays within its limits."""
