"""Prefill-decode disaggregation: hand-over, returns, and the thread that serves them."""
