"""Judging attention that somebody else wrote: how to call it, what must hold of it, and which known
bug reproduces it.
"""
