"""The projections of latent attention: found by name, in whatever order their outputs lie; and a
copy of the library's layer with a bug.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import multihead
from checks.samples import facts_of
from multihead import LatentAttention
from multihead.checks.latents import latent_assignments
from multihead.checks.load import load_target
from multihead.checks.projections import find_matrices
from multihead.layers import Rotary, latent


class Ordered(nn.Module):
    """Latent attention whose projections lie in a chosen order."""

    def __init__(self, *, rotary_first: bool, blocks: bool, query_first: bool) -> None:
        super().__init__()
        self.num_heads = 4
        self.rotary_first, self.blocks, self.query_first = rotary_first, blocks, query_first
        self.q_proj, self.kv_down = nn.Linear(24, 4 * 12), nn.Linear(24, 10 + 4)
        self.kv_ln, self.kv_up = nn.LayerNorm(10), nn.Linear(10, 4 * (8 + 5))
        self.o_proj = nn.Linear(20, 24)
        self.rotary = Rotary(4)

    def forward(self, x: Tensor) -> Tensor:
        down = self.kv_down(x)
        key, c = down.split([4, 10], -1) if self.rotary_first else down.split([10, 4], -1)[::-1]
        up = self.kv_up(self.kv_ln(c))
        if self.blocks:
            k, v = (part.unflatten(-1, (4, -1)) for part in up.split([32, 20], -1))
        else:
            k, v = up.unflatten(-1, (4, -1)).split([8, 5], -1)
        q = self.q_proj(x).unflatten(-1, (4, -1))
        turn, q = q.split([4, 8], -1) if self.query_first else q.split([8, 4], -1)[::-1]
        q, k, v, turn = (t.transpose(1, 2) for t in (q, k, v, turn))
        key = self.rotary(key[:, None]).expand(-1, 4, -1, -1)
        q, k = torch.cat([q, self.rotary(turn)], -1), torch.cat([k, key], -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({}, "(from the latent of kv_down)"),
        (dict(query_first=True), "(from the latent of kv_down)"),
        (dict(rotary_first=True), "the rotary key before the latent"),
        (dict(blocks=True), "all keys before all values"),
    ],
    ids=str,
)
def test_every_order_is_recomputed(order: dict[str, bool], words: str) -> None:
    options = dict(rotary_first=False, blocks=False, query_first=False) | order
    report = multihead.check(Ordered(**options))
    (recomputed,) = (line for line in report.passed if line.startswith("recomputed"))
    assert report.ok and words in recomputed, str(report)


class Separate(nn.Module):
    """The matrices of the paper, one by one; with and without rotary parts and latent queries."""

    def __init__(self, *, rotary: bool = True, q_latent: bool = True) -> None:
        super().__init__()
        self.num_heads, self.rotates = 4, rotary
        self.W_DKV, self.kv_norm = nn.Linear(24, 10, bias=False), nn.RMSNorm(10)
        self.W_UK, self.W_UV = nn.Linear(10, 4 * 8, bias=False), nn.Linear(10, 4 * 5)
        if q_latent:
            self.W_DQ, self.q_norm = nn.Linear(24, 7, bias=False), nn.RMSNorm(7)
            self.W_UQ = nn.Linear(7, 4 * 8, bias=False)
        else:
            self.W_Q = nn.Linear(24, 4 * 8, bias=False)
        if rotary:
            self.W_KR, self.W_QR = nn.Linear(24, 4), nn.Linear(7 if q_latent else 24, 4 * 4)
            self.rotary = Rotary(4, interleaved=True)
        self.W_O = nn.Linear(20, 24, bias=False)
        self.normalizes = True

    def forward(self, x: Tensor) -> Tensor:
        c = self.W_DKV(x)
        c = self.kv_norm(c) if self.normalizes else c
        c_q = self.q_norm(self.W_DQ(x)) if hasattr(self, "W_DQ") else x
        q = (self.W_UQ if hasattr(self, "W_DQ") else self.W_Q)(c_q)
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, self.W_UK(c), self.W_UV(c))
        )
        if self.rotates:
            turn = self.rotary(self.W_QR(c_q).unflatten(-1, (4, -1)).transpose(1, 2))
            key = self.rotary(self.W_KR(x)[:, None]).expand(-1, 4, -1, -1)
            q, k = torch.cat([q, turn], -1), torch.cat([k, key], -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.W_O(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("q_latent", [False, True])
def test_the_matrices_of_the_paper(rotary: bool, q_latent: bool) -> None:
    layer = Separate(rotary=rotary, q_latent=q_latent)
    report = multihead.check(layer)
    (recomputed,) = (line for line in report.passed if line.startswith("recomputed"))
    assert report.ok and "W_K is W_UK and W_UV" in recomputed, str(report)
    layer.normalizes = False
    assert multihead.check(layer).bugs == {"latent isn't normalised"}


@torch.no_grad()
def test_what_the_matrices_give() -> None:
    layer = LatentAttention(24, 4, kv_latent_dim=10, rotary_dim=4, head_dim=8, q_latent_dim=7)
    callee = facts_of(layer).callee
    module: Any = callee.module
    found = next(latent_assignments(callee, find_matrices(callee), [4]))
    x = callee.x()
    inputs = found.project(module, x, x, x, 24)
    latents = inputs.latents
    assert latents is not None and found.definition.latents == ("q", "kv")
    assert (found.definition.rotary_dim, found.definition.rotary_first) == (4, False)
    down = module.kv_down_proj(x)
    torch.testing.assert_close(torch.cat([latents.keys, latents.rotary], -1), down)
    torch.testing.assert_close(latents.queries, module.q_down_proj(x))
    up = module.kv_up_proj(latents.keys).unflatten(-1, (4, -1))
    torch.testing.assert_close(latents.up_k(latents.keys), up[..., :8].flatten(2))
    torch.testing.assert_close(latents.up_v(latents.keys), up[..., 8:].flatten(2))
    assert not list(latent_assignments(callee, find_matrices(callee)[1:], [4]))


# ---- A copy of the layer, as a user has it in a file


def copied(tmp_path: Path, old: str = "", new: str = "") -> Any:
    """What a file makes that holds the source of `LatentAttention`, with a pattern in it
    replaced.
    """
    source = inspect.getsource(latent)
    if old:
        source, count = re.subn(old, new, source)
        assert count == 1, old
    source = source.replace("from ..", "from multihead.")
    source = source.replace("from .", "from multihead.layers.")
    source += (
        "\n\ndef make():\n    return LatentAttention(24, 4, kv_latent_dim=10, rotary_dim=4,"
        " head_dim=8, v_head_dim=5, q_latent_dim=7)\n"
    )
    path = tmp_path / "copied.py"
    path.write_text(source)
    return load_target(f"{path}:make")[0]


@pytest.mark.parametrize(
    ("old", "new", "bug"),
    [
        (r"self\.kv_norm\(latent\)", "latent", "latent isn't normalised"),
        (r"self\.q_norm\(latent\)", "latent", "latent isn't normalised"),
        (r"self\.positions\(key, ids\)", "key", "rotary positions are wrong"),
        (
            r"(k = torch\.cat\(\[k, key\b.*)(\], -1\))",  # read by the first head alone
            r"\1 * (torch.arange(k.shape[1]) < 1)[:, None, None]\2",
            "rotary key isn't shared",
        ),
        (r"\bscale=self\.scale\b", "scale=self.head_dim**-0.5", "missing or wrong scale"),
        (
            r"visible = cache\.update\(rows,",  # with keys that aren't rotated
            "r = self.kv_latent_dim\n"
            "                key = self.kv_down_proj(query).unsqueeze(1)[..., r:]\n"
            "                visible = cache.update(torch.cat([rows[..., :r], key], -1),",
            "cache differs from the full pass",
        ),
    ],
    ids=lambda text: text[:30],
)
def test_a_bug_in_a_copy_is_named(tmp_path: Path, old: str, new: str, bug: str) -> None:
    report = multihead.check(copied(tmp_path, old, new))
    assert bug in report.bugs, str(report)
    others = report.bugs - {bug}
    assert others <= {"cache differs from the full pass"}, str(report)


def test_the_copy_itself_is_right(tmp_path: Path) -> None:
    report = multihead.check(copied(tmp_path))
    assert report.ok and "KV cache" in report.passed, str(report)
    assert any(line.startswith("recomputed") for line in report.passed)
