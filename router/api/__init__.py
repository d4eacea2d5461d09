"""The HTTP APIs: what a body must look like, which prompt it means, what its answer reports."""
