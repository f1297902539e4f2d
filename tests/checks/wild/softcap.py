import torch
from torch import nn


class CappedAttention(nn.Module):
    """Scores are capped as in Gemma 2."""

    def __init__(self, hidden_size=32, num_attention_heads=4, softcap=2.0):
        super().__init__()
        self.num_attention_heads, self.softcap = num_attention_heads, softcap
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, output_attentions=False):
        B, L, D = hidden_states.shape
        shape = (B, L, self.num_attention_heads, D // self.num_attention_heads)
        q, k, v = (f(hidden_states).reshape(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(2, 3) * (D // self.num_attention_heads) ** -0.5
        scores = torch.tanh(scores / self.softcap) * self.softcap
        future = torch.ones(L, L, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        probs = scores.softmax(-1)
        out = self.dense((probs @ v).transpose(1, 2).flatten(2))
        return (out, probs) if output_attentions else out


make = CappedAttention
