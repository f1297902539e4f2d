"""One head of keys and values, in one matrix with the queries' heads."""

import math

import torch
from torch import nn


class MultiQueryAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.query_key_value = nn.Linear(hidden_size, hidden_size + 2 * self.head_dim)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def _split_heads(self, fused_qkv):
        batch_size, seq_length, _ = fused_qkv.shape
        fused_qkv = fused_qkv.view(batch_size, seq_length, self.num_heads + 2, self.head_dim)
        return fused_qkv[..., :-2, :], fused_qkv[..., [-2], :], fused_qkv[..., [-1], :]

    def forward(self, hidden_states, layer_past=None, use_cache=True):
        batch_size, query_length, _ = hidden_states.shape
        query, key, value = self._split_heads(self.query_key_value(hidden_states))
        query = query.transpose(1, 2).reshape(batch_size, -1, self.head_dim)
        key, value = key.squeeze(2), value.squeeze(2)
        if layer_past is not None:
            key = torch.cat((layer_past[0], key), dim=1)
            value = torch.cat((layer_past[1], value), dim=1)
        kv_length = key.shape[1]
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(self.head_dim)
        scores = scores.view(batch_size, self.num_heads, query_length, kv_length)
        at = torch.arange(kv_length, device=scores.device)
        future = at[None, :] > at[kv_length - query_length :, None]
        attention = torch.where(future, float("-inf"), scores).softmax(dim=-1)
        attention = attention.view(batch_size, self.num_heads * query_length, kv_length)
        context = torch.bmm(attention, value)
        context = context.view(batch_size, self.num_heads, query_length, self.head_dim)
        output = self.dense(context.transpose(1, 2).flatten(2))
        return output, (key, value) if use_cache else None


def make():
    return MultiQueryAttention(32, 4)
