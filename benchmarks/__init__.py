"""Benchmarks: every figure is a ratio to a named peer in the same run. `make bench` runs them."""
