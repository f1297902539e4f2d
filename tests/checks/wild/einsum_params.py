import torch
from torch import nn


class EinsumAttention(nn.Module):
    def __init__(self, dim=24, heads=3, head_dim=10):
        super().__init__()
        self.scale = head_dim**-0.5
        self.w_q = nn.Parameter(torch.randn(dim, heads, head_dim) * 0.02)
        self.w_k = nn.Parameter(torch.randn(dim, heads, head_dim) * 0.02)
        self.w_v = nn.Parameter(torch.randn(dim, heads, head_dim) * 0.02)
        self.w_o = nn.Parameter(torch.randn(heads, head_dim, dim) * 0.02)

    def forward(self, x):
        q = torch.einsum("bnd,dhe->bhne", x, self.w_q)
        k = torch.einsum("bnd,dhe->bhne", x, self.w_k)
        v = torch.einsum("bnd,dhe->bhne", x, self.w_v)
        attn = torch.einsum("bhie,bhje->bhij", q, k) * self.scale
        attn = attn.softmax(dim=-1)
        out = torch.einsum("bhij,bhje->bhie", attn, v)
        return torch.einsum("bhne,hed->bnd", out, self.w_o)


make = EinsumAttention
