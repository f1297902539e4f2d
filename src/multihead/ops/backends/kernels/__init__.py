"""Kernels for the CPU, written in Python and compiled by Numba on first use."""
