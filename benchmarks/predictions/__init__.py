"""Predicted times of the simulator beside those of real servers."""
