"""What users of other attention layers run into, each with what is right here. The cases are those
of public threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead
from multihead import MultiHeadAttention, attention
from multihead.masks import causal, from_torch_mask, padding, window
from multihead.ops import merge_heads, split_heads


def qkv(
    batch: int = 2, heads: int = 4, groups: int = 2, length: int = 6, keys: int = 6, **options: Any
) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, n, s, 8, generator=g, **options)
        for n, s in ((heads, length), (groups, keys), (groups, keys))
    ]


def paths() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from (
        ("auto", {}),
        ("torch", {"backend": "torch"}),
        ("sdpa", {"backend": "sdpa"}),
        ("lse", {"return_lse": True}),
        ("weights", {"return_weights": True}),
        ("dropout", {"dropout": 0.3}),
        ("softcap", {"softcap": 2.0}),
    )


@pytest.mark.parametrize("options", [o for _, o in paths()], ids=[name for name, _ in paths()])
@pytest.mark.parametrize("kind", ["intervals", "bool", "float"])
def test_a_row_with_no_key_reads_zeros_with_finite_gradients(
    kind: str, options: dict[str, Any]
) -> None:
    mask: Any = padding(torch.tensor([0, 4])) & causal()
    given: dict[str, Any] = {"mask": mask}
    if kind != "intervals":
        given = {"mask": mask.dense(6, 6)}
    if kind == "float":
        given = {"bias": torch.zeros(2, 1, 6, 6).masked_fill(~mask.dense(6, 6), -torch.inf)}
    inputs = qkv(requires_grad=True)
    found = attention(*inputs, **given, **options)
    out = found[0] if isinstance(found, tuple) else found
    assert not out[0].any() and out[1].any()
    if "return_weights" in options:
        assert not found[1][0].any()
    for x in torch.autograd.grad(out.square().sum() + out.sum(), inputs):
        assert x.isfinite().all() and not x[0].any() and x[1].any()


def test_a_row_with_no_key_is_the_same_in_training_and_evaluation() -> None:
    layer, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    mask = padding(torch.tensor([0, 5]))
    want = layer.train()(x, mask=mask)
    assert torch.equal(want[0], layer.out_proj.bias.expand(5, 16))
    with torch.no_grad():
        assert torch.allclose(layer.eval()(x, mask=mask), want, atol=1e-6)


def test_asking_for_weights_changes_no_output_and_drops_no_mask() -> None:
    layer, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    for mask in (None, causal(), padding(torch.tensor([3, 5])) & causal(), torch.rand(5, 5) > 0.3):
        out, weights = layer(x, mask=mask, return_weights=True)
        assert torch.allclose(out, layer(x, mask=mask), atol=1e-6)
        if mask is not None:
            dense = mask if isinstance(mask, Tensor) else mask.dense(5, 5)
            assert not weights.masked_select(~dense).any()


def test_weights_are_those_of_each_head() -> None:
    layer = MultiHeadAttention(16, 4)
    weights = layer(torch.randn(2, 5, 16), return_weights=True)[1]
    assert weights.shape == (2, 4, 5, 5) and not torch.allclose(weights[:, 0], weights[:, 1])


def test_weights_are_those_before_dropout() -> None:
    layer = MultiHeadAttention(16, 4, dropout=0.5)
    weights = layer(torch.randn(2, 5, 16), mask=causal(), return_weights=True)[1]
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 5), atol=1e-6)


def test_true_means_may_read() -> None:
    q, k, v = qkv(groups=4)
    only_first = torch.tensor([True, False, False, False, False, False])
    assert torch.allclose(attention(q, k, v, only_first), v[:, :, :1].expand(-1, -1, 6, -1))
    inverted, _ = from_torch_mask(key_padding_mask=~only_first[None])
    assert torch.allclose(attention(q, k, v, inverted), v[:, :, :1].expand(-1, -1, 6, -1))
    for integers in (only_first.long(), only_first.to(torch.uint8)):
        with pytest.raises(TypeError, match=r"mask\.bool\(\)"):
            attention(q, k, v, integers)
    with pytest.raises(ValueError, match=r"only 0 and 1.*mask\.bool\(\)"):
        attention(q, k, v, only_first.float())


def test_floating_and_boolean_masks_are_combined_and_cast() -> None:
    q, k, v = qkv()
    bias, may = torch.randn(2, 1, 1, 6), torch.rand(6, 6) > 0.3
    want = attention(q, k, v, bias=bias.masked_fill(~may, -torch.inf), backend="reference")
    assert torch.allclose(attention(q, k, v, may, bias=bias), want, atol=1e-6)
    assert torch.allclose(
        attention(q, k, v, bias, bias=torch.zeros(6, 6).masked_fill(~may, -torch.inf)),
        want,
        atol=1e-6,
    )
    assert torch.allclose(
        attention(*(x.double() for x in (q, k, v)), may, bias=bias).float(), want, atol=1e-6
    )
    layer, x = MultiHeadAttention(16, 4), torch.randn(2, 6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, mask=may, attn_bias=bias)
    assert torch.allclose(out.float(), layer(x, mask=may, attn_bias=bias), atol=2e-2)


@pytest.mark.parametrize("backend", ["auto", "torch", "sdpa", "reference"])
def test_causal_with_more_keys_than_rows_says_where_the_rows_are(backend: str) -> None:
    q, k, v = qkv()
    whole = attention(q, k, v, causal(), backend=backend)
    for first in range(6):
        assert torch.allclose(
            attention(q[:, :, first:], k, v, causal(first), backend=backend),
            whole[:, :, first:],
            atol=1e-6,
        )
    step = attention(q[:, :, 5:], k, v, causal(5), return_weights=True)[1]
    assert (step > 0).all()  # decoding one token reads all keys, not the first alone


def test_a_mask_and_causal_both_hold() -> None:
    q, k, v = qkv()
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    weights = attention(q, k, v, causal() & padding(valid=valid), return_weights=True)[1]
    want = valid[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril()
    assert torch.equal(weights > 0, want.expand(-1, 4, -1, -1))
    dense = want & (torch.rand(6, 6) > 0.2)
    weights = attention(q, k, v, dense & causal().dense(6, 6), return_weights=True)[1]
    assert torch.equal(weights > 0, (dense & want).expand(-1, 4, -1, -1))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_the_soft_cap_comes_before_the_mask(backend: str) -> None:
    weights = attention(*qkv(), causal(), softcap=0.1, return_weights=True, backend=backend)[1]
    assert not weights.masked_select(torch.ones(6, 6).triu(1).bool()).any()


def test_one_definition_in_training_evaluation_and_inference() -> None:
    layer, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    for mask in (None, causal(), padding(torch.tensor([3, 5]))):
        want = layer.train()(x, mask=mask)
        layer.eval()
        outs = [layer(x, mask=mask)]
        with torch.no_grad():
            outs.append(layer(x, mask=mask))
        with torch.inference_mode():
            outs.append(layer(x, mask=mask).clone())
        assert all(torch.allclose(out, want, atol=1e-6) and out.shape == want.shape for out in outs)


def test_batch_first_and_a_mismatch_is_an_error_with_both_shapes() -> None:
    layer = MultiHeadAttention(16, 4)
    with pytest.raises(
        ValueError, match=r"query\[5, 2, 16\], key\[2, 5, 16\].*first axis is the batch"
    ):
        layer(torch.zeros(5, 2, 16), torch.zeros(2, 5, 16))
    with pytest.raises(ValueError, match=r"key\[2, 5, 16\], value\[2, 6, 16\]"):
        layer(torch.zeros(2, 5, 16), torch.zeros(2, 5, 16), torch.zeros(2, 6, 16))


def test_steps_with_a_cache_need_no_mask_of_their_own() -> None:
    layer, x, cache = MultiHeadAttention(16, 4), torch.randn(2, 5, 16), multihead.Cache()
    with torch.no_grad():
        steps = [layer(x[:, i : i + 1], mask=causal(), cache=cache) for i in range(5)]
    assert torch.allclose(torch.cat(steps, 1), layer(x, mask=causal()), atol=1e-5)


def test_grouped_heads_take_the_fused_path_and_keep_their_keys() -> None:
    q, k, v = qkv(heads=8)
    assert multihead.ops.backend_for(q, k, v, causal()).backend == "sdpa"
    want = attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), causal())
    assert torch.allclose(attention(q, k, v, causal()), want, atol=1e-6)


def test_the_width_of_a_head_is_free() -> None:
    layer = MultiHeadAttention(16, 3, head_dim=5, kdim=7, vdim=9, out_dim=11)
    out = layer(torch.randn(2, 4, 16), torch.randn(2, 6, 7), torch.randn(2, 6, 9))
    assert out.shape == (2, 4, 11) and layer.q_proj.weight.shape == (15, 16)


def test_every_projection_is_called_as_a_module() -> None:
    layer, called = MultiHeadAttention(16, 2, gate="head"), []
    names = ["q_proj", "k_proj", "v_proj", "gate_proj", "out_proj"]
    for name in names:
        getattr(layer, name).register_forward_hook(lambda *_, name=name: called.append(name))
    layer(torch.randn(1, 3, 16))
    assert called == names


def test_adapters_of_peft_take_effect_on_every_projection() -> None:
    from peft import LoraConfig, get_peft_model

    x = torch.randn(1, 4, 16)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        torch.manual_seed(0)
        layer = MultiHeadAttention(16, 2)
        before = layer(x)
        model = get_peft_model(layer, LoraConfig(target_modules=[name], init_lora_weights=False))
        after = model(x)
        assert not torch.allclose(after, before, atol=1e-3)
        after.square().sum().backward()
        grads = [p.grad for n, p in model.named_parameters() if "lora_" in n]
        assert len(grads) == 2 and all(g is not None and g.any() for g in grads)


def test_quantised_projections_serve() -> None:
    class Eight(nn.Module):
        """A linear layer whose weight is kept in eight bits, as quantised replacements do."""

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            self.weight, self.bias = (
                (linear.weight.detach() / self.scale).round().to(torch.int8),
                linear.bias.detach(),
            )

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight * self.scale, self.bias)

    layer, x = MultiHeadAttention(16, 2), torch.randn(1, 4, 16)
    want = layer(x)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(layer, name, Eight(getattr(layer, name)))
    assert torch.allclose(layer(x), want, atol=2e-2) and not torch.equal(layer(x), want)


def test_any_strides_serve() -> None:
    layer, x = MultiHeadAttention(16, 2), torch.randn(16, 5, 3)
    for view in (
        x.permute(2, 1, 0),
        x.permute(2, 1, 0)[:1].expand(3, -1, -1),
        torch.randn(3, 10, 16)[:, ::2],
    ):
        assert torch.allclose(
            layer(view, mask=causal()), layer(view.contiguous(), mask=causal()), atol=1e-6
        )


@pytest.mark.parametrize(
    "positions",
    [None, multihead.layers.Rotary(8), multihead.layers.ALiBi(2)],
    ids=["none", "rotary", "alibi"],
)
def test_exports_and_compiles_with_dynamic_batch_and_length(positions: Any) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MultiHeadAttention(
                16, 2, positions=positions, qk_norm="rms", gate="elementwise"
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, mask=causal())

    model = Causal()
    sizes = {0: torch.export.Dim("B"), 1: torch.export.Dim("L")}
    graph = torch.export.export(model, (torch.randn(2, 5, 16),), dynamic_shapes=(sizes,)).module()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, length in ((3, 17), (2, 4), (4, 9)):
        x = torch.randn(batch, length, 16)
        assert torch.allclose(graph(x), model(x), atol=1e-5) and torch.allclose(
            compiled(x), model(x), atol=1e-5
        )


def test_dropout_follows_training() -> None:
    layer, x = MultiHeadAttention(16, 2, dropout=0.5), torch.randn(1, 6, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_heads_merged_without_the_transpose_are_another_result() -> None:
    x = torch.randn(2, 3, 8)
    heads = split_heads(x, 2)
    flattened = heads.reshape(
        2, 3, 8
    )  # heads first, flattened as they lie: the shape is right and the tokens are mixed
    assert (
        torch.equal(merge_heads(heads), x)
        and flattened.shape == x.shape
        and not torch.allclose(flattened, x)
    )


def test_position_biases_have_their_place() -> None:
    q, k, v = qkv(heads=4, groups=4)
    x = torch.randn(2, 6, 16)
    at = torch.arange(6)
    for made in (
        multihead.layers.ALiBi(4),
        multihead.layers.T5Bias(4),
        multihead.layers.RelativeBias(4, 3),
    ):
        for parameter in made.parameters():
            nn.init.normal_(parameter)
        bias = made(at, at)
        with torch.no_grad():
            want = attention(q, k, v, causal(), bias=bias, backend="reference")
        assert torch.allclose(attention(q, k, v, causal(), bias=bias), want, atol=1e-6)
        layer = MultiHeadAttention(16, 4, positions=made)
        without = MultiHeadAttention(16, 4)
        without.load_state_dict(layer.state_dict(), strict=False)
        assert torch.allclose(
            layer(x, mask=causal()), without(x, mask=causal(), attn_bias=bias), atol=1e-6
        )
        assert not torch.allclose(layer(x, mask=causal()), without(x, mask=causal()), atol=1e-3)


def test_a_window_may_be_set_for_each_call() -> None:
    layer, x = MultiHeadAttention(16, 2), torch.randn(1, 9, 16)
    near = layer(x, mask=causal() & window(left=2))
    assert torch.allclose(near[:, 8], layer(x[:, 6:], mask=causal())[:, 2], atol=1e-6)
