"""Where a request runs: expected times, the placement, and the fetches that it needs."""
