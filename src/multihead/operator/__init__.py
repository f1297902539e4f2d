"""The operator: masks, heads and the backends that compute it."""
