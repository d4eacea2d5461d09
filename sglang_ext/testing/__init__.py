"""The test kit that ships, for tiers and transports of others: contracts, fakes, models."""
