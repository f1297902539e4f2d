"""Backends of `attention`: the reference, torch's own operators, and kernels for the CPU."""
