"""Telemetry of the router: metrics, logs, traces, and one record per request."""
