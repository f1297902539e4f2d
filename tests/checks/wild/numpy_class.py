import numpy as np


class MultiHeadAttention:
    def __init__(self, d_model=24, num_heads=4, seed=0):
        rng = np.random.default_rng(seed)
        self.d_model, self.num_heads, self.depth = d_model, num_heads, d_model // num_heads
        self.Wq = rng.normal(size=(d_model, d_model)) * 0.02
        self.Wk = rng.normal(size=(d_model, d_model)) * 0.02
        self.Wv = rng.normal(size=(d_model, d_model)) * 0.02
        self.Wo = rng.normal(size=(d_model, d_model)) * 0.02

    def split(self, x):
        batch, seq, _ = x.shape
        return x.reshape(batch, seq, self.num_heads, self.depth).transpose(0, 2, 1, 3)

    def forward(self, x, mask=None):
        batch, seq, _ = x.shape
        q, k, v = self.split(x @ self.Wq), self.split(x @ self.Wk), self.split(x @ self.Wv)
        scores = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(self.depth)
        if mask is not None:
            scores = np.where(mask, scores, -np.inf)
        top = np.max(scores, axis=-1, keepdims=True)
        e = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = e.sum(axis=-1, keepdims=True)
        attn = e / np.where(total == 0, 1, total)
        out = np.einsum("bhij,bhjd->bhid", attn, v)
        out = out.transpose(0, 2, 1, 3).reshape(batch, seq, self.d_model)
        return out @ self.Wo


make = MultiHeadAttention
