import torch


def attention(q, k, v, mask=None, is_causal=False):
    """q, k, v: [batch, heads, length, width]"""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    return weights @ v
