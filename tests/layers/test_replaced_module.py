"""Where the weights of an attention module go, and how they come back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from families import FAMILIES, model_of
from multihead.errors import MultiheadError
from multihead.layers import replace_attention
from multihead.layers.replaced_module import convert_unit, find_units, rebuild_unit, swap_unit
from small import llama


def family(name: str) -> nn.Module:
    return copy.deepcopy(model_of(next(f for f in FAMILIES if f.name == name)))


def test_units_are_innermost() -> None:
    bert, t5 = find_units(family("bert")), find_units(family("t5"))
    assert {u.path.rpartition(".")[2] for u in bert} == {"self"}
    assert all(u.parent is not None and u.whole is u.parent for u in bert)
    assert {type(u.module).__name__ for u in t5} == {"T5Attention"}
    assert all(u.parent is None and u.whole is u.module for u in t5)


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gemma3", "whisper", "bert", "deepseek_v3"])
def test_changed_weights_come_back(name: str) -> None:
    """A module that is restored computes what its layer does, whatever became of the weights."""
    model = family(name)
    unit = find_units(model)[0]
    converted = convert_unit(unit, model)
    swap_unit(unit, converted, model)
    layer = converted.layer
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(1.25)
    attention = model.get_submodule(unit.path)
    parent = model.get_submodule(unit.path.rpartition(".")[0])
    for path, module in rebuild_unit(unit.path, attention, parent).items():
        model.set_submodule(path, module)
    assert model.get_submodule(unit.path) is unit.module
    again = convert_unit(find_units(model)[0], model).layer
    for (key, got), want in zip(again.named_parameters(), layer.parameters(), strict=True):
        if want.requires_grad or want.any():
            torch.testing.assert_close(got, want, msg=key)


def test_hooks_and_own_forwards_are_refused() -> None:
    model = llama()
    unit = find_units(model)[0]
    unit.module.q_proj.forward = unit.module.q_proj.forward
    with pytest.raises(MultiheadError, match=r"layers\.0\.self_attn .*Linear in it has hooks, or"):
        convert_unit(unit, model)


def arrangement(model: nn.Module) -> list[str]:
    return [convert_unit(unit, model).pairs for unit in find_units(model)]


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("llama", "halves"),
        ("gemma3", "halves"),
        ("gpt_oss", "halves"),
        ("phi3", "halves"),
        ("gpt2", "unknown"),
    ],
)
def test_rotations_are_recognised(name: str, pairs: str) -> None:
    assert set(arrangement(family(name))) == {pairs}


SIZES = dict(vocab_size=60, hidden_size=48, intermediate_size=40, num_hidden_layers=1)


@pytest.mark.parametrize("kind", ["Cohere", "GPTJ", "Falcon"])
def test_rotations_of_other_kinds(kind: str) -> None:
    """Neighbours with one angle twice; sines in front, which aren't taken for cosines; and an
    argument for ALiBi that a model with rotations leaves None.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | dict(num_attention_heads=6, pad_token_id=0)
    if kind == "GPTJ":
        sizes = dict(vocab_size=60, n_embd=48, n_head=6, n_layer=1, rotary_dim=4)
    model = getattr(tf, f"{kind}ForCausalLM")(getattr(tf, f"{kind}Config")(**sizes)).eval()
    assert arrangement(model) == [{"Cohere": "neighbours", "GPTJ": "unknown"}.get(kind, "halves")]
    ids = torch.arange(3, 15)[None]
    want = model(ids).logits
    torch.testing.assert_close(replace_attention(model)(ids).logits, want, atol=1e-5, rtol=0)


def test_arguments_that_every_call_has_are_refused_at_once() -> None:
    model = tf.BloomForCausalLM(tf.BloomConfig(hidden_size=16, n_head=2, n_layer=1, vocab_size=60))
    with pytest.raises(MultiheadError, match=r"self_attention .*its forward needs residual="):
        replace_attention(model)
    config = tf.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=60, max_seq_len=8)
    with pytest.raises(MultiheadError, match=r"attn .*its forward needs position_bias="):
        replace_attention(tf.MptForCausalLM(config))


def test_rotations_of_blocks_whose_attention_does_not_know_its_type() -> None:
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = tf.ModernBertConfig(
        vocab_size=60, pad_token_id=0, local_attention=4, **sizes, **special
    )
    model = tf.ModernBertModel._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.Wqkv.weight[:32] *= 30
    ids = torch.arange(3, 15)[None]
    want = model(ids)[0]
    torch.testing.assert_close(replace_attention(model)(ids)[0], want, atol=1e-5, rtol=0)
