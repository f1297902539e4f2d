import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def apply_rotary_emb(x, start, theta=10000.0):
    freqs = 1.0 / theta ** (torch.arange(0, x.size(-1), 2).double() / x.size(-1))
    angles = torch.outer(torch.arange(start, start + x.size(1)).double(), freqs)
    turned = torch.polar(torch.ones_like(angles), angles).view(1, x.size(1), 1, -1)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turned).flatten(3).type_as(x)


class MLA(nn.Module):
    def __init__(self, dim=48, n_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10):
        super().__init__()
        self.n_heads = n_heads
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.wq_a = nn.Linear(dim, q_lora_rank, bias=False)
        self.q_norm = RMSNorm(q_lora_rank)
        self.wq_b = nn.Linear(q_lora_rank, n_heads * self.qk_head_dim, bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(kv_lora_rank)
        self.wkv_b = nn.Linear(kv_lora_rank, n_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.wo = nn.Linear(n_heads * v_head_dim, dim, bias=False)
        self.softmax_scale = self.qk_head_dim**-0.5

    def forward(self, x, past_key_value=None, use_cache=False):
        bsz, seqlen, _ = x.size()
        start = 0 if past_key_value is None else past_key_value[0].size(1)
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(bsz, seqlen, self.n_heads, self.qk_head_dim)
        q_nope, q_pe = torch.split(q, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_pe = apply_rotary_emb(q_pe, start)
        kv, k_pe = torch.split(self.wkv_a(x), [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), start).squeeze(2)
        kv = self.kv_norm(kv)
        if past_key_value is not None:
            kv = torch.cat([past_key_value[0], kv], dim=1)
            k_pe = torch.cat([past_key_value[1], k_pe], dim=1)
        k, v = self.wkv_b(kv).view(bsz, -1, self.n_heads, self.qk_nope_head_dim + self.v_head_dim).split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        shared = k_pe.unsqueeze(2).expand(-1, -1, self.n_heads, -1)
        q, k = torch.cat([q_nope, q_pe], dim=-1), torch.cat([k, shared], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        future = torch.ones(seqlen, k.size(1), dtype=torch.bool).triu(start + 1)
        scores = scores.masked_fill(future[None, :, None], float("-inf"))
        out = torch.einsum("bsht,bthd->bshd", scores.softmax(dim=-1), v)
        out = self.wo(out.flatten(2))
        return (out, (kv, k_pe)) if use_cache else out


make = MLA
