"""Reading torch's own attention, and attention written by hand, inside of modules of any make."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multihead
from multihead.errors import ReadingError
from multihead.models import foreign as modules
from multihead.models.foreign import is_other_sequence
from oracles.compare import differences
from twins import as_before, call, sharpened, torch_call, twin, watched

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True"
)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.empty(shape, dtype=torch.float64).normal_(
        generator=torch.Generator().manual_seed(seed)
    )


def padding(*lengths: int, left: bool = False) -> Tensor:
    """True at padding, as torch has it."""
    longest = max(lengths)
    at = torch.arange(longest)
    return torch.stack([at < longest - n if left else at >= n for n in lengths])


def never(length: int, as_numbers: bool = False) -> Tensor:
    """torch's causal mask: True, or -inf, where a row may not read."""
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (
        torch.zeros(length, length, dtype=torch.float64).masked_fill(mask, -torch.inf)
        if as_numbers
        else mask
    )


class Alone(nn.Module):
    """One attention module whose weights the model uses."""

    def __init__(self, weights: str = "none", **options: Any) -> None:
        super().__init__()
        self.batch_first = options.setdefault("batch_first", True)
        self.attn = nn.MultiheadAttention(
            options.pop("width", 24), options.pop("heads", 3), **options
        )
        self.weights = weights

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **masks: Any
    ) -> Any:
        key = query if key is None else key
        value = key if value is None else value
        kinds = {
            "none": dict(need_weights=False),
            "mean": {},
            "each": dict(average_attn_weights=False),
        }
        return self.attn(query, key, value, **kinds[self.weights], **masks)


CASES = {
    "plain": (dict(), [numbers(3, 9, 24)], dict()),
    "even number of heads, torch's fused code": (
        dict(heads=4),
        [numbers(3, 9, 24)],
        dict(key_padding_mask=padding(9, 7, 8)),
    ),
    "length first": (
        dict(batch_first=False),
        [numbers(9, 3, 24)],
        dict(key_padding_mask=padding(9, 7, 8)),
    ),
    "no batch": (dict(), [numbers(9, 24)], dict()),
    "no batch, padded": (dict(), [numbers(9, 24)], dict(key_padding_mask=padding(7, 9)[0])),
    "padding as numbers": (
        dict(),
        [numbers(3, 9, 24)],
        dict(
            key_padding_mask=torch.zeros(3, 9, dtype=torch.float64).masked_fill(
                padding(9, 7, 8), -torch.inf
            )
        ),
    ),
    "causal": (dict(), [numbers(3, 9, 24)], dict(attn_mask=never(9))),
    "causal by the hint": (dict(), [numbers(3, 9, 24)], dict(attn_mask=never(9), is_causal=True)),
    "causal as numbers": (dict(), [numbers(3, 9, 24)], dict(attn_mask=never(9, True))),
    "causal and padded": (
        dict(),
        [numbers(3, 9, 24)],
        dict(attn_mask=never(9), key_padding_mask=padding(9, 7, 8)),
    ),
    "a bias": (dict(), [numbers(3, 9, 24)], dict(attn_mask=numbers(9, 9, seed=2))),
    "a bias that forbids": (
        dict(),
        [numbers(3, 9, 24)],
        dict(
            attn_mask=torch.where(never(9), -1e9, numbers(9, 9, seed=2)),
            key_padding_mask=padding(9, 7, 8),
        ),
    ),
    "a mask for each text": (
        dict(),
        [numbers(2, 5, 24)],
        dict(
            attn_mask=(numbers(2, 1, 5, 5, seed=3).expand(-1, 3, -1, -1) > 0.5).reshape(6, 5, 5)
            & ~torch.eye(5, dtype=torch.bool)
        ),
    ),
    "no bias": (dict(bias=False), [numbers(3, 9, 24)], dict()),
    "widths of its own": (
        dict(kdim=10, vdim=14),
        [numbers(3, 9, 24), numbers(3, 7, 10), numbers(3, 7, 14)],
        dict(key_padding_mask=padding(7, 5, 6)),
    ),
    "cross": (
        dict(),
        [numbers(3, 9, 24), numbers(3, 7, 24, seed=2)],
        dict(key_padding_mask=padding(7, 5, 6, left=True)),
    ),
    "cross, length first": (
        dict(batch_first=False),
        [numbers(9, 3, 24), numbers(7, 3, 24, seed=2)],
        dict(),
    ),
    "add_zero_attn": (dict(add_zero_attn=True), [numbers(3, 9, 24)], dict(attn_mask=never(9))),
}


@pytest.mark.parametrize("weights", ["none", "mean", "each"])
@pytest.mark.parametrize("name", CASES)
def test_multihead_attention(name: str, weights: str) -> None:
    """Outputs (the weights that it returns among them) and statistics, against what the module
    itself returns.
    """
    options, inputs, masks = CASES[name]
    model = sharpened(Alone(weights, **options))
    before = as_before(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mask of each kind at once
        with torch.no_grad(), multihead.reading(model) as reading:
            under = model(*inputs, **masks)
        with torch.no_grad():
            plain = model(*inputs, **masks)
        with watched(model, nn.MultiheadAttention) as seen, torch.no_grad():
            model(*inputs, **masks)
        want = twin([(path, torch_call(m, args, kwargs)) for path, m, args, kwargs in seen])
    assert as_before(model) == before
    for got, expected in zip(under, plain, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert not differences(reading.table(), want)
    kind = "cross" if len(inputs) > 1 else "self"
    labels = {(kind, f"L0.H{n}") for n in range(options.get("heads", 3))}
    assert {(row["kind"], row["head"]) for row in reading.table().rows()} == labels


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, options.pop("heads", 4), 32, **options), 2
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(batch_first=True),
        dict(batch_first=True, norm_first=True),
        dict(batch_first=False),
        dict(batch_first=True, heads=3),
        dict(batch_first=True, activation="gelu", bias=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_encoder(options: dict[str, Any], masked: bool) -> None:
    """Its fused path, with nested tensors where there is padding, is off while it is read, and on
    again afterwards.
    """
    model = sharpened(encoder(**options))
    x, pad = numbers(3, 9, 24), padding(9, 7, 8)
    x = x if options["batch_first"] else x.transpose(0, 1)
    inputs: dict[str, Any] = dict(src=x, src_key_padding_mask=pad) | (
        dict(mask=never(9)) if masked else {}
    )
    before = as_before(model)
    table = multihead.read(model, [inputs])
    assert as_before(model) == before and torch.backends.mha.get_fastpath_enabled()
    with watched(model, nn.MultiheadAttention) as seen, torch.no_grad():
        model(**inputs)
    assert not differences(
        table, twin([(path, torch_call(m, args, kwargs)) for path, m, args, kwargs in seen])
    )
    assert [row["head"] for row in table.rows()][:: options.get("heads", 4)] == ["L0.H0", "L1.H0"]
    assert table.meta["documents"] == 3 and table.meta["tokens"] == 24 and not table.meta["notes"]


def test_transformer_of_encoder_and_decoder() -> None:
    model = sharpened(nn.Transformer(24, 3, 2, 2, 32, batch_first=True))
    source, target = padding(9, 7, 8), padding(6, 5, 4)
    inputs = dict(
        src=numbers(3, 9, 24),
        tgt=numbers(3, 6, 24, seed=2),
        tgt_mask=never(6),
        src_key_padding_mask=source,
        tgt_key_padding_mask=target,
        memory_key_padding_mask=source,
    )
    table = multihead.read(model, [inputs])
    with watched(model, nn.MultiheadAttention) as seen, torch.no_grad():
        model(**inputs)
    own = [
        (path, torch_call(m, args, kwargs))
        for path, m, args, kwargs in seen
        if path.endswith("self_attn")
    ]
    across = [
        (path, torch_call(m, args, kwargs, rows=~target))
        for path, m, args, kwargs in seen
        if path.endswith("multihead_attn")
    ]
    assert not differences(table, twin(own + across))
    labels = {row["head"][:-3]: row["kind"] for row in table.rows()}
    assert labels == {
        "encoder.L0": "self",
        "encoder.L1": "self",
        "decoder.L0": "self",
        "decoder.L0.cross": "cross",
        "decoder.L1": "self",
        "decoder.L1.cross": "cross",
    }
    assert "cross-attention" in table.reasons["decoder.layers.0.multihead_attn previous"]
    assert "token ids" in table.reasons["decoder.layers.0.self_attn induction"]


class Small(nn.Module):
    """A classifier of texts, as one writes it."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(24, 5)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        pad = torch.arange(tokens.shape[1]) >= lengths[:, None]
        x = self.encoder(self.embed(tokens), src_key_padding_mask=pad)
        return self.head(x.masked_fill(pad[..., None], 0).sum(1) / lengths[:, None])


TEXT = dict(
    tokens=torch.randint(3, 12, (3, 9), generator=torch.Generator().manual_seed(0)),
    lengths=torch.tensor([9, 7, 8]),
)


def test_a_model_of_ones_own_with_its_ids() -> None:
    """Which rows are text is what its attention was told, and the tokens are those that the whole
    model was given.
    """
    model = sharpened(Small())
    table = multihead.read(model, [TEXT], special_ids={3, 4})
    with watched(model, nn.MultiheadAttention) as seen, torch.no_grad():
        model(**TEXT)
    want = twin(
        [
            (path, torch_call(m, args, kwargs, ids=TEXT["tokens"], special=frozenset({3, 4})))
            for path, m, args, kwargs in seen
        ]
    )
    assert not differences(table, want)
    assert (table.count("duplicate") > 0).all() and table.meta["tokens"] == 24
    again = multihead.read(
        model,
        [dict(tokens=t[None, :n], lengths=n[None]) for t, n in zip(*TEXT.values(), strict=True)],
    )
    assert again.value("induction") == pytest.approx(
        table.value("induction"), rel=1e-9
    )  # padding was nobody's copy


def test_maps_are_the_weights_that_the_module_returns() -> None:
    model = sharpened(Small())
    one = {name: value[:1] for name, value in TEXT.items()}
    found = multihead.read_maps(model, one, ["L1.H3", "L0.H0"])
    with watched(model, nn.MultiheadAttention) as seen, torch.no_grad():
        model(**one)
    want = {path: torch_call(m, args, kwargs) for path, m, args, kwargs in seen}
    np.testing.assert_allclose(
        found[0].weights, want["encoder.layers.1.self_attn"].weights[0, 3], atol=1e-6
    )
    np.testing.assert_allclose(
        found[1].weights, want["encoder.layers.0.self_attn"].weights[0, 0], atol=1e-6
    )
    with pytest.raises(ValueError, match=r"holds 3 texts .* expected one"):
        multihead.read_maps(model, TEXT, "L1.H3")
    alone = sharpened(Alone(batch_first=False))
    assert multihead.read_maps(
        alone, {"query": numbers(9, 1, 24)}, "L0.H1", rows=[3, 5]
    ).weights.shape == (2, 9)


def without(model: nn.Module, path: str, head: int, width: int) -> nn.Module:
    """A copy whose head writes nothing: its columns of W_O are 0."""
    changed = copy.deepcopy(model)
    changed.get_submodule(path).out_proj.weight[:, head * width : (head + 1) * width] = 0
    return changed


def test_heads_switched_off_and_gates() -> None:
    model = sharpened(Small())
    before = as_before(model)
    want = without(model, "encoder.layers.1.self_attn", 2, 6)(**TEXT)
    with torch.no_grad(), multihead.ablate_heads(model, "L1.H2"):
        assert torch.allclose(model(**TEXT), want, atol=1e-12)
    gates = torch.ones(2, 4, dtype=torch.float64)
    gates[1, 2] = 0
    gates.requires_grad_(True)
    with multihead.ablate_heads(model, gates=gates):
        out = model(**TEXT)
    assert torch.allclose(out, want, atol=1e-12)
    out.sum().backward()
    assert gates.grad is not None and (gates.grad != 0).all()
    assert as_before(model) == before
    assert not torch.allclose(model(**TEXT), want, atol=1e-3)


@pytest.mark.parametrize("outer", ["heads", "reading"])
def test_a_reading_with_heads_switched(outer: str) -> None:
    model = sharpened(Small())
    before = as_before(model)
    off = multihead.ablate_heads(model, "L0.H1")
    changed = without(model, "encoder.layers.0.self_attn", 1, 6)
    with torch.no_grad():
        if outer == "heads":
            with off, multihead.reading(model) as reading:
                out = model(**TEXT)
        else:
            with multihead.reading(model) as reading, off:
                out = model(**TEXT)
        assert torch.allclose(out, changed(**TEXT), atol=1e-12)
    assert as_before(model) == before
    rows = reading.table().rows()
    assert rows[1]["norm"] == 0 and rows[5]["norm"] == pytest.approx(
        multihead.read(changed, [TEXT]).rows()[5]["norm"]
    )


def test_the_mean_of_a_head_is_over_its_text() -> None:
    """Padding that the inputs name by torch's word isn't counted into the mean."""
    model = sharpened(encoder(batch_first=True))
    x, pad = numbers(2, 9, 24), padding(9, 6)
    cut = [dict(src=x[:1]), dict(src=x[1:, :6])]
    with torch.no_grad():
        with multihead.ablate_heads(
            model, "L0.H1", mode="mean", over=[dict(src=x, src_key_padding_mask=pad)]
        ):
            padded = model(x)
        with multihead.ablate_heads(model, "L0.H1", mode="mean", over=cut):
            assert torch.allclose(padded, model(x), atol=1e-12)


def test_training_with_dropout_and_gradients() -> None:
    model = sharpened(Small(0.0)).requires_grad_(True).train()
    model(**TEXT).square().sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with multihead.reading(model) as reading:
        model(**TEXT).square().sum().backward()
    for expected, p in zip(want, model.parameters(), strict=True):
        assert torch.allclose(expected, p.grad, atol=1e-10 * float(expected.abs().max()) + 1e-12)
    dropping = copy.deepcopy(model)
    for module in dropping.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.9
    with torch.no_grad(), multihead.reading(dropping) as reading:
        dropped = dropping(**TEXT)
    assert not torch.allclose(dropped, model(**TEXT), atol=1e-3) and dropping.training
    first = reading.table().value("entropy")[:4]
    assert first == pytest.approx(
        multihead.read(model, [TEXT]).value("entropy")[:4]
    )  # the weights before dropout


class Stop(Exception):
    pass


def test_as_it_was_after_an_error() -> None:
    model = sharpened(Small())
    before, want = as_before(model), model(**TEXT)
    hook = model.encoder.layers[1].linear1.register_forward_hook(
        lambda *_: (_ for _ in ()).throw(Stop)
    )
    with pytest.raises(Stop), multihead.reading(model):
        model(**TEXT)
    with pytest.raises(Stop), multihead.ablate_heads(model, "L0.H0"):
        model(**TEXT)
    hook.remove()
    assert as_before(model) == before and torch.equal(model(**TEXT), want)


# What is wrong is caught, what isn't known is refused.


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("scale", lambda call: call._replace(scale=1.1 * call.scale)),
        ("mask", lambda call: call._replace(mask=None, start=None, stop=None, low=None, high=None)),
        ("heads", lambda call: call._replace(v=call.v.flip(1))),
        ("bias", lambda call: call._replace(bias=numbers(1, 1, 9, 9))),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_entry_that_computes_something_else_is_caught(
    name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharpened(Alone())
    inputs = dict(query=numbers(3, 9, 24), attn_mask=never(9, as_numbers=True))
    multihead.read(model, [inputs])
    right = modules.AttentionCall.lower
    changed = SimpleNamespace(lower=lambda *args, **kwargs: wrong(right(*args, **kwargs)))
    monkeypatch.setattr(modules, "AttentionCall", changed)
    with pytest.raises(
        ReadingError, match=r"attn \(MultiheadAttention\) gives another output under reading"
    ):
        multihead.read(model, [inputs])


def test_weights_that_are_returned_wrongly_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = modules.compute_weights
    monkeypatch.setattr(modules, "compute_weights", lambda call: right(call).flip(1).roll(1, -1))
    with pytest.raises(ReadingError, match="Alone gives another output '1' under reading"):
        multihead.read(sharpened(Alone("mean")), [dict(query=numbers(3, 9, 24))])


class Doubled(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(2 * query, *args, **kwargs)


class Renamed(nn.MultiheadAttention):
    """As its parent in all that it computes."""


def test_a_subclass_with_a_forward_of_its_own_is_refused_by_name() -> None:
    model = Alone()
    model.attn = Doubled(24, 3, batch_first=True)
    with pytest.raises(
        ValueError,
        match=r"Alone can't be read.*Doubled: its forward isn't that of MultiheadAttention",
    ):
        multihead.read(model, [dict(query=torch.randn(1, 3, 24))])
    model.second = nn.MultiheadAttention(24, 3, batch_first=True)
    with multihead.reading(model) as reading:
        model(torch.randn(1, 3, 24))
    assert any("Doubled: its forward isn't" in note for note in reading.table().meta["notes"])
    model.attn = Renamed(24, 3, batch_first=True)
    multihead.read(model, [dict(query=torch.randn(1, 3, 24))])


def test_what_is_not_known_is_refused_by_name() -> None:
    biased = Alone(add_bias_kv=True)
    with pytest.raises(
        ValueError, match="MultiheadAttention: its add_bias_kv adds a key that is no token's"
    ):
        multihead.read(biased, [dict(query=torch.randn(1, 3, 24))])
    patched = Alone()
    patched.attn.forward = patched.attn.forward
    with pytest.raises(
        ValueError, match="MultiheadAttention: its forward was replaced on this one object"
    ):
        multihead.read(patched, [dict(query=torch.randn(1, 3, 24))])
    nested = torch.nested.nested_tensor([torch.randn(3, 24), torch.randn(2, 24)])
    four = Alone(heads=4)
    with (
        pytest.raises(ValueError, match="nested tensors, which can't be read"),
        multihead.reading(four, verify=False),
    ):
        four(nested)
    with (
        pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"),
        multihead.reading(Alone()) as r,
    ):
        r.model(torch.randn(1, 3, 24), is_causal=True)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.attn(x, x, x, need_weights=False)[0]
        return self.attn(x, memory, memory, need_weights=False)[0]


def test_a_module_that_reads_itself_and_another_sequence_is_refused() -> None:
    with pytest.raises(
        ReadingError,
        match=r"attn \(MultiheadAttention\).*both as self-attention and as cross-attention",
    ):
        multihead.read(Both(), [dict(x=torch.randn(1, 3, 24), memory=torch.randn(1, 5, 24))])


def test_equal_sequences_are_one() -> None:
    """Many write attn(norm(x), norm(x), norm(x)): three tensors, one sequence."""
    x = torch.randn(2, 3, 4)
    assert not is_other_sequence(x, x) and not is_other_sequence(x, x.clone())
    assert is_other_sequence(x, x + 1) and is_other_sequence(x, x[:, :2])


# Attention written by hand.


class Written(nn.Module):
    """Causal self-attention as nanoGPT writes it, with shared key/value heads as Llama does."""

    dropout = 0.0

    def __init__(self, width: int = 24, n_head: int = 6, n_kv_heads: int = 2) -> None:
        super().__init__()
        self.n_head, self.n_kv_heads, self.size = n_head, n_kv_heads, width // n_head
        self.c_attn = nn.Linear(width, width + 2 * n_kv_heads * self.size)
        self.c_proj = nn.Linear(width, width)

    def split(self, x: Tensor) -> list[Tensor]:
        sizes = [self.n_head * self.size, *[self.n_kv_heads * self.size] * 2]
        return [
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in self.c_attn(x).split(sizes, -1)
        ]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        k, v = (part.repeat_interleave(self.n_head // self.n_kv_heads, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 24)
        self.blocks = nn.ModuleList(Written() for _ in range(2))

    def forward(self, idx: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(idx)
        for block in self.blocks:
            x = x + block(x, mask)
        return x


def by_hand(module: Written, x: Tensor, bias: Tensor) -> Tensor:
    """The weights, from the formula."""
    q, k, _ = module.split(x)
    k = k.repeat_interleave(module.n_head // module.n_kv_heads, 1)
    return (q @ k.mT * module.size**-0.5 + bias).softmax(-1)


@pytest.mark.parametrize(
    "kind", ["causal", "padded", "padded, with a hole", "padded, as numbers", "forbidding numbers"]
)
def test_attention_written_by_hand(kind: str) -> None:
    model, ids = sharpened(Gpt()), TEXT["tokens"]
    text = ~padding(9, 9, 9) if kind == "causal" else ~padding(9, 7, 8)
    allowed = text[:, None] & ~never(9)
    if kind == "padded, with a hole":
        allowed[:, 4:7, 2] = False
    bias = torch.zeros(3, 9, 9, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    mask = {
        "causal": None,
        "padded": allowed[:, None],
        "padded, with a hole": allowed[:, None],
        "padded, as numbers": bias[:, None],
        "forbidding numbers": bias.clamp(min=-1e9)[:, None],
    }[kind]
    table = multihead.read(
        model, [dict(idx=ids) | ({} if mask is None else dict(mask=mask))], special_ids={3}
    )
    with watched(model, Written) as seen, torch.no_grad():
        model(ids, mask)
    more: Any = dict(rows=text, keys=text, ids=ids, special=frozenset({3}))
    want = twin(
        [
            (
                path,
                call(
                    by_hand(m, args[0], bias[:, None]),
                    m.split(args[0])[2],
                    m.c_proj,
                    allowed,
                    **more,
                ),
            )
            for path, m, args, _ in seen
        ]
    )
    assert not differences(table, want)
    assert [row["group"] for row in table.rows()[:6]] == [0, 0, 0, 1, 1, 1]
    assert [row["head"] for row in table.rows()[::6]] == ["L0.H0", "L1.H0"]


def test_its_dropout_is_kept_and_its_weights_are_those_before() -> None:
    model, ids = sharpened(Gpt()), TEXT["tokens"]
    want, plain = multihead.read(model, [dict(idx=ids)]), model(ids)
    for block in model.blocks:
        block.dropout = 0.9
    with torch.no_grad(), multihead.reading(model.train()) as reading:
        assert not torch.allclose(model(ids), plain, atol=1e-3)
    assert reading.table().value("entropy")[:6] == pytest.approx(want.value("entropy")[:6])


class Unnamed(Written):
    def __init__(self) -> None:
        super().__init__()
        self.strange = self.c_proj
        del self.c_proj

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.strange(y.transpose(1, 2).reshape(x.shape))


class Twice(Written):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        y, z = (F.scaled_dot_product_attention(q, key, v, enable_gqa=True) for key in (k, -k))
        y = y - z
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class Three(Written):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part.repeat_interleave(6 // part.shape[1], 1).flatten(0, 1) for part in self.split(x)
        )
        y = F.scaled_dot_product_attention(q, k, v).unflatten(0, (-1, 6))
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class Gated(Written):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        y = (
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            .transpose(1, 2)
            .reshape(x.shape)
        )
        return self.c_proj(y * x.sigmoid())


class Mixed(Written):
    """One head's numbers in another's place."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        y = (
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            .transpose(1, 2)
            .reshape(x.shape)
        )
        return self.c_proj(y.roll(1, -1))


def test_a_gate_of_each_number_is_found_by_looking() -> None:
    module, x = Gated().eval(), torch.randn(2, 5, 24)
    entered = []
    handle = module.c_proj.register_forward_pre_hook(
        lambda _, args: entered.append(args[0].detach())
    )
    table = multihead.read(module, [dict(x=x)])
    handle.remove()
    width = 24 // len(table.heads)
    each = entered[0].unflatten(-1, (-1, width)).double()
    rows = module.c_proj.weight.detach().double().T.unflatten(0, (-1, width))
    want = torch.einsum("blhe,hed->blhd", each, rows).norm(dim=-1).mean((0, 1))
    assert table.value("norm") == pytest.approx(want.numpy(), rel=1e-5)
    assert not table.count("contribution:self").any() and table.count("self").all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            Unnamed,
            (
                r"Unnamed.*its output projection isn't among.*; rename it, or run.*register_family"
                r".*scaled_dot_product_attention"
            ),
        ),
        (Twice, r"Twice.*calls attention 2 times before its projection runs"),
        (Three, r"Three can't be read.*expected \[B, H, L, E\]"),
        (Mixed, r"Mixed.*what enters c_proj is neither the output of its heads"),
    ],
)
def test_what_is_written_otherwise_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        multihead.read(make(), [dict(x=torch.randn(2, 5, 24))])
