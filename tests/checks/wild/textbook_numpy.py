import numpy as np


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def multi_head_attention(X, W_q, W_k, W_v, W_o, num_heads):
    seq_len, d_model = X.shape
    d_k = d_model // num_heads
    Q = (X @ W_q).reshape(seq_len, num_heads, d_k).transpose(1, 0, 2)
    K = (X @ W_k).reshape(seq_len, num_heads, d_k).transpose(1, 0, 2)
    V = (X @ W_v).reshape(seq_len, num_heads, d_k).transpose(1, 0, 2)
    scores = Q @ K.transpose(0, 2, 1) / np.sqrt(d_k)
    weights = softmax(scores, axis=-1)
    heads = weights @ V
    concat = heads.transpose(1, 0, 2).reshape(seq_len, d_model)
    return concat @ W_o
