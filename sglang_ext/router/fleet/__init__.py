"""The instances: their facts, states and load."""
