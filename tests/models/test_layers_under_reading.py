"""Reading this library's own layers inside of modules of any make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multihead
from multihead import Cache, MultiHeadAttention, TransformerBlock, WindowCache
from multihead.errors import ReadingError
from multihead.layers import Rotary
from multihead.layers.position_bias import ALiBi
from multihead.masks import causal, padding, window
from oracles.compare import differences
from oracles.statistics import MASSES, NAMES
from twins import as_before, call, sharpened, twin, watched

X = torch.empty(3, 9, 24, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(1))
MEMORY = torch.empty(3, 7, 10, dtype=torch.float64).normal_(
    generator=torch.Generator().manual_seed(2)
)
LENGTHS = torch.tensor([9, 7, 8])
VALID = torch.arange(9) < LENGTHS[:, None]
IDS = torch.randint(3, 12, (3, 9), generator=torch.Generator().manual_seed(0))
EARLIER = np.tril(np.ones((9, 9), bool))
ELEMENTWISE = [
    name
    for name in NAMES
    if name.partition(":")[0] not in ("contribution", "even", "cancellation", "reach")
]


class Alone(nn.Module):
    def __init__(self, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(24, 6, **options)
        self.weights = weights

    def forward(self, x: Tensor, memory: Tensor | None = None, **more: Any) -> Any:
        return self.attn(x, memory, return_weights=self.weights, **more)


def own_call(
    module: MultiHeadAttention, args: Any, kwargs: Any, allowed: Any = None, **more: Any
) -> Any:
    """A call of the layer, from the weights that it returns itself."""
    with torch.no_grad():
        _, weights = module.forward(*args, **kwargs | dict(return_weights=True))
        source = next(
            x for x in (args[1] if len(args) > 1 else kwargs.get("key"), args[0]) if x is not None
        )
        values = module.v_proj(source).unflatten(-1, (module.num_kv_heads, -1)).transpose(1, 2)
        if module.clip_qkv is not None:
            values = values.clamp(-module.clip_qkv, module.clip_qkv)
    return call(weights, values, module.out_proj, allowed, **more)


CASES: dict[
    str, tuple[dict[str, Any], dict[str, Any], Any, Any]
] = {  # options, arguments, allowed, which rows are text
    "plain": ({}, {}, None, None),
    "causal": ({}, dict(mask=causal()), EARLIER, None),
    "padded": ({}, dict(mask=causal(), valid=VALID), EARLIER & VALID[:, None].numpy(), VALID),
    "padded by a mask": (
        {},
        dict(mask=causal() & padding(LENGTHS)),
        EARLIER & VALID[:, None].numpy(),
        VALID,
    ),
    "window": (
        {},
        dict(mask=causal() & window(left=2)),
        EARLIER & ~np.tril(np.ones((9, 9), bool), -3),
        None,
    ),
    "dense": (
        {},
        dict(mask=(torch.tensor(EARLIER) & VALID[:, None])[:, None]),
        EARLIER & VALID[:, None].numpy(),
        VALID,
    ),
    "numbers": (
        {},
        dict(mask=torch.zeros(9, 9).masked_fill(~torch.tensor(EARLIER), -torch.inf).double()),
        EARLIER,
        None,
    ),
    "grouped": (dict(num_kv_heads=2), dict(mask=causal()), EARLIER, None),
    "sinks, cap, norm, rotary": (
        dict(num_kv_heads=3, sinks=True, softcap=2.0, qk_norm="rms", positions=Rotary(4)),
        dict(mask=causal()),
        EARLIER,
        None,
    ),
    "a mask, a scale, clipped, norms over all heads": (
        dict(
            num_kv_heads=3,
            mask=causal() & window(left=2),
            scale=0.7,
            clip_qkv=1.5,
            qk_norm="rms_all",
        ),
        {},
        EARLIER & ~np.tril(np.ones((9, 9), bool), -3),
        None,
    ),
    "biased by distance": (dict(positions=ALiBi(6)), {}, None, None),
    "head width": (dict(head_dim=10, bias=False), {}, None, None),
    "gated by head": (dict(gate="head"), {}, None, None),
    "gated by number": (dict(gate="elementwise"), {}, None, None),
}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_layer(name: str, weights: bool) -> None:
    options, given, allowed, text = CASES[name]
    model = sharpened(Alone(weights, **options))
    before = as_before(model)
    table = multihead.read(model, [dict(x=X, **given)])
    with torch.no_grad(), multihead.reading(model):
        under = model(X, **given)
    assert as_before(model) == before
    with watched(model, MultiHeadAttention) as seen, torch.no_grad():
        plain = model(X, **given)
    for got, want in zip(under if weights else [under], plain if weights else [plain], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    want = [
        (path, own_call(m, args, kwargs, allowed, rows=text, keys=text))
        for path, m, args, kwargs in seen
    ]
    gate = options.get("gate")
    names = [
        n
        for n in (NAMES if gate is None else ELEMENTWISE)
        if gate is None or n not in ("norm", "share")
    ]
    assert not differences(table, twin(want), names)
    assert [row["group"] for row in table.rows()] == [
        h * options.get("num_kv_heads", 6) // 6 for h in range(6)
    ]
    shares = sum(row["share"] for row in table.rows())
    assert shares == pytest.approx(1)
    if gate == "elementwise":
        assert all(row["contribution:self"] is None for row in table.rows())
        assert "gate or norm" in table.reasons["contribution:self"]
    if (
        gate == "head"
    ):  # contributions are scaled by the gate's size, so what a head adds is at most their sum
        assert all(0 < row["cancellation"] <= 1 for row in table.rows())


class Decoder(nn.Module):
    """Blocks of the library in a model of one's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 24)
        options = dict(hidden_dim=32, num_kv_heads=2, cross_attention=True, memory_dim=10) | options
        self.layers = nn.ModuleList(
            TransformerBlock(24, 6, positions=Rotary(4), **options) for _ in range(2)
        )

    def forward(
        self,
        input_ids: Tensor,
        memory: Tensor | None,
        caches: Any = None,
        memories: Any = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        x = self.embed(input_ids)
        for n, layer in enumerate(self.layers):
            x = layer(
                x,
                memory,
                mask=causal(),
                memory_mask=padding(torch.tensor([7, 5, 6])),
                valid=valid,
                cache=None if caches is None else caches[n],
                memory_cache=None if memories is None else memories[n],
            )
        return x


def decoder_twin(model: nn.Module, text: Any, special: frozenset[int]) -> Any:
    with watched(model, MultiHeadAttention) as seen, torch.no_grad():
        model(IDS, MEMORY, valid=None if text is None else text)
    found = []
    for path, m, args, kwargs in seen:
        if path.endswith("cross_attention"):
            keys = np.arange(7) < np.array([7, 5, 6])[:, None]
            found.append(
                (path, own_call(m, args, kwargs, keys[:, None], rows=text, keys=keys, cross=True))
            )
        else:
            allowed = EARLIER if text is None else EARLIER & text[:, None].numpy()
            found.append(
                (
                    path,
                    own_call(
                        m, args, kwargs, allowed, rows=text, keys=text, ids=IDS, special=special
                    ),
                )
            )
    return twin(found)


@pytest.mark.parametrize("text", [None, VALID], ids=["whole", "padded"])
def test_blocks_with_cross_attention(text: Any) -> None:
    model = sharpened(Decoder())
    table = multihead.read(
        model, [dict(input_ids=IDS, memory=MEMORY, valid=text)], special_ids={3}, probe=False
    )
    assert not differences(table, decoder_twin(model, text, frozenset({3})))
    assert {row["head"][:-3]: row["kind"] for row in table.rows()} == {
        "L0": "self",
        "L0.cross": "cross",
        "L1": "self",
        "L1.cross": "cross",
    }
    with torch.no_grad():
        plain = model(IDS, MEMORY, valid=text)
        with multihead.ablate_heads(model, ["L1.cross.H4"]):
            off = model(IDS, MEMORY, valid=text)
    model.layers[1].cross_attention.out_proj.weight[:, 16:20] = 0
    assert torch.allclose(off, model(IDS, MEMORY, valid=text), atol=1e-12) and not torch.allclose(
        off, plain
    )


def test_a_text_read_in_pieces_with_caches() -> None:
    """All but the tokens is what one piece gives: the layers' caches know where a row stands, not
    which tokens came before.
    """
    model = sharpened(Decoder())
    caches, memories = ([Cache() for _ in range(2)] for _ in range(2))
    with torch.no_grad(), multihead.reading(model, special_ids={3}) as reading:
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            model(IDS[:, start:stop], MEMORY if start == 0 else None, caches, memories)
    assert caches[0].length == 9  # the check's own pass had caches of its own
    want = decoder_twin(model, None, frozenset({3}))
    tokens = ("special", "duplicate", "induction")
    assert not differences(reading.table(), want, [n for n in NAMES if not n.endswith(tokens)])
    assert (
        reading.table().count("duplicate").max()
        < want["layers.0.attention"].counts["duplicate"].max()
    )
    with torch.no_grad(), multihead.reading(model, special_ids={3}) as reading:
        model(IDS[:, 8:], None, caches, memories)
    assert "own caches" in reading.table().reasons["layers.0.attention duplicate"]


def test_maps_of_the_layer() -> None:
    model = sharpened(Alone(True, sinks=True, num_kv_heads=3))
    found = multihead.read_maps(model, dict(x=X[:1], mask=causal()), "L0.H4")
    np.testing.assert_allclose(found.weights, model(X[:1], mask=causal())[1][0, 4], atol=1e-6)


def test_training_with_dropout() -> None:
    model = sharpened(Alone(dropout=0.9)).train()
    with torch.no_grad(), multihead.reading(model) as reading:
        dropped = model(X)
    assert model.training and not torch.allclose(dropped, model.eval()(X), atol=1e-3)
    assert reading.table().value("entropy") == pytest.approx(
        multihead.read(model, [dict(x=X)]).value("entropy")
    )


class Halved(MultiHeadAttention):
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(query / 2, *args, **kwargs)


def test_refused_by_name() -> None:
    model = Alone(bias_kv=True)
    with pytest.raises(
        ValueError, match="MultiHeadAttention: its bias_kv adds a key that is no token's"
    ):
        multihead.read(model, [dict(x=X.float())])
    model.attn = Halved(24, 6)
    with pytest.raises(ValueError, match="Halved: its forward isn't that of MultiHeadAttention"):
        multihead.read(model, [dict(x=X.float())])
    model = sharpened(Alone())
    for cache, more in ((WindowCache(4), {}), (Cache(), dict(valid=VALID))):
        with pytest.raises(
            ValueError,
            match="a cache that evicts keys, or whose rows have different lengths, can't be read",
        ):
            multihead.read(model, [dict(x=X, mask=causal(), cache=cache, **more)])
        assert cache.length == 0


@pytest.mark.parametrize("wrong", ["scale", "softcap"])
def test_an_entry_that_computes_something_else_is_caught(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multihead.models import foreign as modules

    model = sharpened(Alone(softcap=2.0))
    right = modules.AttentionCall.lower
    changed = SimpleNamespace(lower=lambda *a, **kw: right(*a, **kw)._replace(**{wrong: 1.3}))
    monkeypatch.setattr(modules, "AttentionCall", changed)
    with pytest.raises(
        ReadingError, match=r"attn \(MultiHeadAttention\) gives another output under reading"
    ):
        multihead.read(model, [dict(x=X)])


def test_names_of_masses_are_known() -> None:
    assert set(MASSES) <= set(NAMES)  # what the selections above are made from
