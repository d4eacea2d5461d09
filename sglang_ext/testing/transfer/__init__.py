"""The conformance suite of transports, and a rig with two ends."""
