"""The definition equals torch's operator; each step can be replaced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from multihead.checks.definition import Definition, Latents, Projected, compute_definition


def projected(num_kv_heads: int = 4, output: bool = True) -> Projected:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    out = (draw(24, 24), draw(24)) if output else None
    width = 6 * num_kv_heads
    return Projected(draw(2, 5, 24), draw(2, 5, width), draw(2, 5, width), out, embed_dim=24)


def projected_latents() -> Projected:
    """Latents of 4 heads with queries of 4 + 2 and values of 6, whose inputs have large norms."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    up_q, up_k, up_v = draw(7, 24), draw(5, 16), draw(5, 24)
    latents = Latents(
        3 * draw(2, 5, 7),
        3 * draw(2, 5, 5),
        draw(2, 5, 2),
        lambda x: x @ up_q,
        lambda x: x @ up_k,
        lambda x: x @ up_v,
        torch.nn.RMSNorm(7).double(),
        torch.nn.RMSNorm(5).double(),
    )
    nothing = torch.zeros(2, 5, 0)
    out = (draw(24, 24), draw(24))
    return Projected(nothing, nothing, nothing, out, embed_dim=24, latents=latents)


LATENT = Definition(4, 4, rotary="half", rotary_dim=2, latents=("q", "kv"))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_torchs_operator(num_kv_heads: int, scale: float | None) -> None:
    inputs, allowed = projected(num_kv_heads), torch.ones(5, 5).tril().bool()
    q = inputs.q.unflatten(-1, (4, 6)).transpose(1, 2)
    k, v = (t.unflatten(-1, (num_kv_heads, 6)).transpose(1, 2) for t in (inputs.k, inputs.v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)
    weight, bias = inputs.out or (None, None)
    expected = out.transpose(1, 2).flatten(2) @ weight + bias
    got = compute_definition(inputs, allowed, Definition(4, num_kv_heads, scale=scale))
    torch.testing.assert_close(got, expected)


def test_rotary_pairs_are_llamas_and_gpt_js() -> None:
    from multihead.layers import Rotary

    inputs, allowed = projected(output=False), torch.ones(5, 5).bool()
    for kind in ("half", "interleaved"):
        rotary = Rotary(6, interleaved=kind == "interleaved")
        q, k, v = (t.unflatten(-1, (4, 6)).transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        expected = F.scaled_dot_product_attention(rotary(q), rotary(k), v)
        got = compute_definition(inputs, allowed, Definition(4, 4, rotary=kind, output=False))
        torch.testing.assert_close(
            got, expected.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-6, msg=kind
        )


def test_soft_cap_and_hidden_queries() -> None:
    inputs, allowed = projected(output=False), torch.zeros(5, 5).bool()
    allowed[1:, 0] = True
    out = compute_definition(inputs, allowed, Definition(4, 4, softcap=2.0))
    assert out[:, 0].isnan().all() and out[:, 1:].isfinite().all()
    filled = compute_definition(inputs, allowed, Definition(4, 4, softcap=2.0, fill="-1e9"))
    torch.testing.assert_close(filled[:, 0], inputs.v.mean(1))
