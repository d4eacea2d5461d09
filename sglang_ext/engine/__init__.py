"""The cache inside SGLang's scheduler, without SGLang: tiers, prefetch, peers, PD, events."""
