"""What prefill-decode disaggregation costs and saves, by who keeps KV."""
