"""Costs and savings of prefill-decode disaggregation, by the side that keeps KV."""
