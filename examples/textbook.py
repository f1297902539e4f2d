"""Multi-head attention as in a textbook, in NumPy, and the same numbers from the library's layer.

python examples/textbook.py
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def multi_head_attention(
    x: Array, w_q: Array, w_k: Array, w_v: Array, w_o: Array, n_heads: int
) -> Array:
    """The update of every position: x [n, d] or [B, n, d]; w_q, w_k, w_v, w_o [d, d] -> like x.

    Each head is a slice of neighbouring columns: it reads with its queries, keys and values, and
    its rows of w_o turn what it read into its part of the update. Concatenating the heads and
    multiplying by w_o is the same sum.
    """
    d = x.shape[-1]
    if d % n_heads:
        raise ValueError(f"n_heads={n_heads} doesn't divide the width {d} of x{list(x.shape)}")
    width = d // n_heads
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    update = np.zeros_like(x)
    for head in range(n_heads):
        columns = slice(head * width, (head + 1) * width)
        scores = q[..., columns] @ k[..., columns].swapaxes(-1, -2) / np.sqrt(width)
        update += softmax(scores) @ v[..., columns] @ w_o[columns]
    return update


def main() -> None:
    import torch

    from multihead import MultiHeadAttention
    from multihead.ops import split_heads

    batch, n, d, heads = 2, 3, 8, 2
    random = np.random.default_rng(0)
    x = random.normal(size=(batch, n, d))
    weights = [random.normal(size=(d, d)) / np.sqrt(d) for _ in range(4)]

    layer = MultiHeadAttention(d, heads, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for module, weight in zip(
            (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj), weights, strict=True
        ):
            module.weight.copy_(torch.from_numpy(weight).T)  # nn.Linear keeps [out, in]
        by_layer, read = layer(torch.from_numpy(x), return_weights=True)

    q = torch.from_numpy(x @ weights[0])
    print("x                     ", list(x.shape))
    print("q                     ", list(q.shape))
    print("q, cut into heads     ", list(q.unflatten(-1, (heads, d // heads)).shape))
    print("q, heads first        ", list(split_heads(q, heads).shape))
    print("weights, one map each ", list(read.shape))
    by_hand = multi_head_attention(x, *weights, heads)
    print("update                ", list(by_hand.shape))
    print(
        "largest difference between the textbook and the layer:"
        f" {abs(by_hand - by_layer.numpy()).max():.1e}"
    )


if __name__ == "__main__":
    main()
