"""Reading `LatentAttention` in both of its forms, against the definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multihead
from models.test_layers_under_reading import EARLIER, IDS, VALID, X
from multihead import Cache, LatentAttention, WindowCache
from multihead.layers import Rotary
from multihead.masks import causal, window
from multihead.models import find_sites
from oracles.compare import differences
from oracles.latent import attend_latent
from oracles.statistics import NAMES
from twins import as_before, call, sharpened, twin, watched

SIZES: dict[str, Any] = dict(kv_latent_dim=10, rotary_dim=4, head_dim=8, v_head_dim=5)


class Decoder(nn.Module):
    """Latent attention in two residual layers of a user's model."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 24)
        self.layers = nn.ModuleList(LatentAttention(24, 6, **SIZES, **options) for _ in range(2))

    def forward(self, input_ids: Tensor, caches: Any = (None, None), **given: Any) -> Tensor:
        x = self.embed(input_ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, mask=causal(), cache=cache, **given)
        return x


def decoder_twin(model: nn.Module, text: Any = None, special: frozenset[int] = frozenset()) -> Any:
    """What the definition gives for each site, and that it gives what the layer does."""
    with watched(model, LatentAttention) as seen, torch.no_grad():
        model(IDS, valid=text)
    allowed = EARLIER if text is None else EARLIER & text[:, None].numpy()
    found = []
    for path, layer, (x,), _ in seen:
        may = torch.tensor(np.broadcast_to(allowed, (3, 9, 9)))[:, None]
        update, weights, values = attend_latent(layer, x, may)
        with torch.no_grad():
            given = layer.forward(x, mask=may)
        torch.testing.assert_close(given, update, rtol=0, atol=1e-5)  # angles are of float32
        options = dict(rows=text, keys=text, ids=IDS, special=special)
        found.append((path, call(weights, values, layer.out_proj, allowed, **options)))
    return twin(found)


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@pytest.mark.parametrize("options", [{}, dict(q_latent_dim=12, bias=True)], ids=["", "q latent"])
@pytest.mark.parametrize("text", [None, VALID], ids=["whole", "padded"])
def test_one_pass(text: Any, options: dict[str, Any], form: str) -> None:
    model = sharpened(Decoder(**options))
    for layer in model.layers:
        layer.form = form
    before = as_before(model)
    table = multihead.read(model, [dict(input_ids=IDS, valid=text)], special_ids={3}, probe=False)
    assert as_before(model) == before and {layer.form for layer in model.layers} == {form}
    assert not differences(table, decoder_twin(model, text, frozenset({3})))
    with torch.no_grad():
        plain = model(IDS)
        with multihead.reading(model):
            torch.testing.assert_close(model(IDS), plain, rtol=0, atol=1e-12)
    assert [row["group"] for row in table.rows()] == [*range(6)] * 2


def test_steps_with_caches() -> None:
    """Steps, which are absorbed outside of a reading, give the table of one pass."""
    model = sharpened(Decoder())
    pieces = ((0, 4), (4, 5), (5, 6), (6, 9))
    caches, others = ([Cache() for _ in range(2)] for _ in range(2))
    assert all(layer._absorbs(1, 5) for layer in model.layers)
    with torch.no_grad():
        plain = [model(IDS[:, start:stop], others) for start, stop in pieces]
        with multihead.reading(model, special_ids={3}) as reading:
            read = [model(IDS[:, start:stop], caches) for start, stop in pieces]
    torch.testing.assert_close(read, plain, rtol=0, atol=1e-12)
    assert caches[0].length == 9 and caches[0].nbytes == others[0].nbytes
    names = [n for n in NAMES if not n.endswith(("special", "duplicate", "induction"))]
    assert not differences(reading.table(), decoder_twin(model, special=frozenset({3})), names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_lower_precision(dtype: torch.dtype) -> None:
    """The forms differ by rounding, which isn't taken for another output."""
    model = sharpened(Decoder()).to(dtype)
    caches = [Cache() for _ in range(2)]
    with torch.no_grad(), multihead.reading(model) as reading:
        for i in range(9):
            model(IDS[:, i : i + 1], caches)
    want = decoder_twin(sharpened(Decoder()))
    for name in ("layers.0", "layers.1"):
        got = [row["entropy"] for row in reading.table().rows() if row["site"] == name]
        close = 1e-4 if dtype == torch.float32 else 0.2
        np.testing.assert_allclose(got, want[name].values["entropy"], atol=close)


def test_maps_and_weights_of_a_call() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = LatentAttention(24, 6, **SIZES, positions=Rotary(4, theta=50.0))

        def forward(self, x: Tensor, **given: Any) -> Any:
            return self.attn(x, **given)

    model, given = sharpened(Alone()), dict(mask=causal() & window(left=3))
    found = multihead.read_maps(model, dict(x=X[:1], **given), "L0.H4")
    _, weights, _ = attend_latent(model.attn, X[:1], given["mask"].dense(9, 9))
    np.testing.assert_allclose(found.weights, weights[0, 4], atol=1e-6)
    model.attn.form = "absorbed"
    with torch.no_grad(), multihead.reading(model):
        _, under = model(X[:1], return_weights=True, **given)
    torch.testing.assert_close(under, weights, rtol=0, atol=1e-6)


def test_ablated_heads_are_off_in_both_forms() -> None:
    model = sharpened(Decoder())
    off = sharpened(Decoder())
    off.layers[1].out_proj.weight[:, 20:25] = 0
    with torch.no_grad():
        want = off(IDS)
        with multihead.ablate_heads(model, ["L1.H4"]):
            caches = [Cache(), Cache()]
            got = [model(IDS), torch.cat([model(IDS[:, i : i + 1], caches) for i in range(9)], 1)]
    for one in got:
        torch.testing.assert_close(one, want, rtol=0, atol=1e-12)
    assert not torch.allclose(model(IDS), want, atol=1e-3)


def test_slices_of_heads() -> None:
    site = find_sites(Decoder(q_latent_dim=12))[0]
    slices = site.slices()
    assert (site.num_heads, site.num_kv_heads, site.head_dim, slices.layout) == (6, 6, 5, "latent")
    assert [s.name for s in (slices.q, slices.k)] == ["q_up_proj", "kv_up_proj"]
    shapes = [list(s.index.shape) for s in (slices.q, slices.k, slices.v, slices.out)]
    assert shapes == [[6, 12], [6, 8], [6, 5], [6, 5]]


def test_what_cannot_be_read_is_named() -> None:
    class Halved(LatentAttention):
        def forward(self, query: Tensor, **given: Any) -> Any:
            return super().forward(query / 2, **given)

    model = sharpened(Decoder())
    caches = [WindowCache(4), WindowCache(4)]
    words = "LatentAttention with a cache that evicts keys, or whose rows have different lengths"
    with pytest.raises(ValueError, match=words):
        multihead.read(model, [dict(input_ids=IDS, caches=caches)])
    assert caches[0].length == 0
    model.layers = nn.ModuleList(Halved(24, 6, **SIZES).double() for _ in range(2))
    with pytest.raises(ValueError, match="Halved: its forward isn't that of LatentAttention"):
        multihead.read(model, [dict(input_ids=IDS)])
