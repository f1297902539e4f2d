"""Slices of projections by head, in every layout, against what attention receives; and errors for
what can't be split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from families import FAMILIES, batches_of, model_of
from multihead.errors import MultiheadError
from multihead.models import Site, Tap, find_sites, instrument
from multihead.models.slices import HeadSlices, in_features, inner_weight, list_head_parameters
from multihead.ops.call import AttentionCall
from small import llama

# Families whose queries and keys are at most rotated on their way to attention.
UNNORMED = ("gpt2", "llama", "bert", "gpt_neox", "phi3", "gpt_bigcode", "mistral")


class Projected(Tap):
    """Compares what attention receives with the slices applied to the projections' inputs."""

    def __init__(self, model: nn.Module, by_norm: bool) -> None:
        self.by_norm, self.inputs, self.compared = by_norm, {}, 0
        self.handles = [
            module.register_forward_pre_hook(self.keep)
            for site in find_sites(model)
            for module in {getattr(site.slices(), name).module for name in "qkv"}
        ]

    def keep(self, module: nn.Module, args: Any) -> None:
        self.inputs[module] = args[0]

    def project(self, slices: HeadSlices) -> Tensor:
        """[B, heads, L, width]"""
        x, bias = self.inputs[slices.module], slices.bias()
        x = x.flatten(1, -2)  # DeepSeek's latent has an axis of one head
        y = torch.einsum("bld,hed->bhle", x, slices.weight())
        return y if bias is None else y + bias[:, None]

    def attend(
        self, site: Site, call: AttentionCall, compute: Callable[[AttentionCall], Tensor]
    ) -> Tensor:
        slices, where = site.slices(), site.name
        assert call.q.shape[1] == site.num_heads, where
        assert call.k.shape[1] == site.num_kv_heads == slices.num_kv_heads, where
        torch.testing.assert_close(self.project(slices.v), call.v, msg=lambda m: f"{where} v: {m}")
        if self.by_norm:
            for name, x in (("q", call.q), ("k", call.k)):
                wanted = self.project(getattr(slices, name)).norm(dim=-1)
                torch.testing.assert_close(
                    wanted, x.norm(dim=-1), msg=lambda m, name=name: f"{where} {name}: {m}"
                )
        self.compared += 1
        return compute(call)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_slices_are_what_attention_receives(family: Any) -> None:
    model = model_of(family)
    tap = Projected(model, family.name in UNNORMED)
    with torch.no_grad(), instrument(model, tap) as sites:
        model(**batches_of(family, "none")[0])
    for handle in tap.handles:
        handle.remove()
    assert tap.compared == len(sites)


def test_the_output_slices_are_the_inputs_of_w_o() -> None:
    for model in (llama(), tf.GPT2Model(tf.GPT2Config(n_embd=24, n_layer=1, n_head=4))):
        for site in find_sites(model):
            by_head = site.out_weight()[0].unflatten(0, (site.num_heads, site.head_dim))
            torch.testing.assert_close(site.slices().out.weight().mT, by_head.mT)


def test_put_writes_the_slices() -> None:
    site = find_sites(tf.GPT2Model(tf.GPT2Config(n_embd=24, n_layer=1, n_head=4)))[0]
    k, v = site.slices().k, site.slices().v
    before, new = v.weight().clone(), torch.randn(4, 6, 24)
    k.put(new, new[..., 0])
    torch.testing.assert_close(k.weight(), new)
    torch.testing.assert_close(k.bias(), new[..., 0])
    torch.testing.assert_close(v.weight(), before)


def test_gates_sinks_and_norms_by_head() -> None:
    site = find_sites(llama())[0]
    site.module.g_proj = nn.Linear(24, 3)
    site.module.gate_proj = nn.Linear(24, 24)
    site.module.gate = nn.Linear(24, 7)
    site.module.sinks = nn.Parameter(torch.zeros(3))
    site.module.q_norm = nn.Module()
    site.module.q_norm.weight = nn.Parameter(torch.ones(3, 8))
    shapes = {name: list(index.shape) for name, index in list_head_parameters(site).items()}
    assert shapes == {"gate_proj": [3, 8], "g_proj": [3, 1], "sinks": [3, 1], "q_norm": [3, 1]}


def _adapted(module: Any) -> None:
    module.v_proj.lora_A = nn.Linear(1, 1)


def _narrow_keys(module: Any) -> None:
    module.k_proj = nn.Linear(24, 4)


def _odd_values(module: Any) -> None:
    module.v_proj = nn.Linear(24, 12)


def _no_values(module: Any) -> None:
    del module.v_proj


def _unnamed(module: Any) -> None:
    module.ask = module.q_proj
    del module.q_proj


def _convolved(module: Any) -> None:
    module.q_proj = nn.Bilinear(2, 2, 24)


def _adapted_out(module: Any) -> None:
    module.o_proj.lora_A = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_adapted, "v_proj carries an adapter; merge it"),
        (_narrow_keys, "k_proj has 4 outputs, expected 1 keys of 8, as wide as the queries"),
        (_odd_values, "v_proj has 12 outputs, expected heads of 8, as many as divide its 3 query"),
        (_no_values, "has q_proj but no projection for keys and values"),
        (_unnamed, r"aren't among .*; run .*register_family\('LlamaAttention', q="),
        (_convolved, "q_proj is a Bilinear, whose outputs can't be split by heads"),
        (_adapted_out, "its output projection carries an adapter"),
    ],
)
def test_what_cant_be_split_is_refused_by_name(change: Callable[[Any], None], words: str) -> None:
    site = find_sites(llama())[1]
    change(site.module)
    with pytest.raises(MultiheadError, match=rf"layers\.1\.self_attn \(LlamaAttention\).*{words}"):
        site.slices()


def test_key_value_heads_where_projections_cant_be_split() -> None:
    """From attributes: the group size first, then the count, then as many as query heads."""
    site = find_sites(llama())[0]
    assert site.num_kv_heads == 1
    _adapted(site.module)
    assert site.num_kv_heads == 1
    del site.module.num_key_value_groups
    assert site.num_kv_heads == 3
    site.module.num_kv_heads = 1
    assert site.num_kv_heads == 1


@pytest.mark.parametrize("layout", ["blocks", "heads", "groups"])
def test_a_fused_projection_in_every_layout(layout: str) -> None:
    site = find_sites(llama())[0]
    module: Any = site.module
    heads, groups = (3, 3) if layout == "heads" else (3, 1)
    del module.q_proj, module.k_proj, module.v_proj
    module.qkv = nn.Linear(24, (heads + 2 * groups) * 8)
    slices = site.slices(layout)
    starts = [part.index[:, 0].tolist() for part in (slices.q, slices.k, slices.v)]
    assert (
        starts
        == {
            "blocks": [[0, 8, 16], [24], [32]],
            "heads": [[0, 24, 48], [8, 32, 56], [16, 40, 64]],
            "groups": [[0, 8, 16], [24], [32]],
        }[layout]
    )
    with pytest.raises(MultiheadError, match="layout='rows': expected one of blocks"):
        site.slices("rows")


def test_the_width_of_what_wraps_a_linear() -> None:
    wrapped = nn.Module()
    wrapped.linear = nn.Linear(5, 3)
    conv = Conv1D(3, 5)
    assert in_features(wrapped) == in_features(conv) == 5
    assert inner_weight(wrapped) is wrapped.linear.weight and inner_weight(conv) is conv.weight
    assert inner_weight(nn.Embedding(5, 3)) is None and inner_weight(nn.LayerNorm(5)) is None
    with pytest.raises(MultiheadError, match="LayerNorm without an input width"):
        in_features(nn.LayerNorm(5))
