"""Texts, and the batches of tokens that are made of them."""
