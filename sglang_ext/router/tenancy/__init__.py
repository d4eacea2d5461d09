"""Who may ask what: keys, tenants, limits, and the fields of a request that are reserved."""
