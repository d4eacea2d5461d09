"""The test kit that ships: contracts, servers, stand-ins, fakes, models."""
