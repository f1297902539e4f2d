"""Matrices and which projection each is, by name and by shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import multihead
from checks.samples import Separate, facts_of
from multihead.checks.projections import (
    assignments,
    find_matrices,
    find_norms,
    possible_head_counts,
    projection_of_path,
)


@pytest.mark.parametrize(
    ("paths", "projection"),
    [
        ("q_proj layers.0.attn.to_q.weight W_q query lin_q.weight heads.0.query", "q"),
        ("k_proj.weight key W_k keys", "k"),
        ("v_proj.weight value W_v values", "v"),
        ("qkv.weight c_attn in_proj_weight query_key_value to_qkv", "qkv"),
        ("kv_proj to_kv", "kv"),
        ("out_proj.weight o_proj W_o c_proj dense to_out.0.weight", "o"),
        ("norm.weight mlp.up_proj rotary", None),
    ],
)
def test_names(paths: str, projection: str | None) -> None:
    found = {path: projection_of_path(path) for path in paths.split()}
    assert found == dict.fromkeys(paths.split(), projection)


class Fused(nn.Module):
    """[H, 3, E] in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (4, 3, 6)).permute(3, 0, 2, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_matrices_are_in_by_out_with_their_bias() -> None:
    callee = facts_of(Separate()).callee
    matrices = {m.name: m for m in find_matrices(callee)}
    assert list(matrices) == ["q", "k", "v", "o"]
    x = callee.x()
    for name, matrix in matrices.items():
        torch.testing.assert_close(matrix(x), getattr(callee.module, name)(x))
    (first, transposed) = assignments(callee, [4])
    assert first.description == "W_Q is q, W_K is k, W_V is v, W_O is o" and first.fits
    assert transposed.how == "transposed"
    assert possible_head_counts(callee, None, list(matrices.values()))[:4] == [1, 2, 3, 4]
    assert possible_head_counts(callee, 4, []) == [4]


@torch.no_grad()
def test_the_parts_of_a_fused_matrix() -> None:
    callee = facts_of(Fused()).callee
    by_how = {a.how: a for a in assignments(callee, [4])}
    x, part = callee.x(), by_how["fused as q, k, v, of each of 4 heads in turn"]
    expected = callee.module.qkv(x).unflatten(-1, (4, 3, 6))  # type: ignore[union-attr,operator]
    for n, matrix in enumerate((part.q, part.k, part.v)):
        torch.testing.assert_close(matrix(x), expected[..., n, :].flatten(2))
    assert len(by_how) == 4 * 6  # layouts times orders


class Shared(nn.Module):
    """One matrix for all heads, in each of the projections."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.heads, self.embed_size, self.size = 4, 32, scale
        self.values, self.keys, self.queries = (
            nn.Linear(8, 8, bias=b) for b in (True, False, False)
        )
        self.fc_out = nn.Linear(32, 32)

    def forward(self, values: Tensor, keys: Tensor, query: Tensor) -> Tensor:
        v, k, q = (
            f(x.unflatten(-1, (4, 8))).transpose(1, 2)
            for f, x in ((self.values, values), (self.keys, keys), (self.queries, query))
        )
        return self.fc_out(((q @ k.mT * self.size).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_matrix_that_all_heads_share() -> None:
    report = multihead.check(Shared(8**-0.5))
    assert report.ok and "independent queries" in report.passed, str(report)
    assert multihead.check(Shared(32**-0.5)).bugs == {"missing or wrong scale"}


def test_norms_of_queries_and_keys() -> None:
    layer = Separate()
    assert find_norms(layer) == (None, None)
    layer.q_norm, layer.norm_k = nn.LayerNorm(6), nn.Identity()
    assert find_norms(layer) == (layer.q_norm, None)
