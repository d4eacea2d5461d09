"""`sglang-ext simulate`: a cluster in virtual time, with the router's and the engine's own code."""
