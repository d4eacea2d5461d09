"""What one tenant notices of another that stays within its limits."""
