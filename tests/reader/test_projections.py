"""Readings of models whose output projections hold their weights elsewhere, packed, adapted or
hooked: the table is that of the same model with plain weights.
"""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import numpy as np
import peft
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import multihead
from multihead.errors import MultiheadError, ReadingError
from multihead.models.foreign import PatchedForward
from multihead.pruning import Plan
from projections_of_all_kinds import KINDS, Wrapped
from small import IDS, llama
from untouched import assert_untouched, snapshot

pytestmark = pytest.mark.filterwarnings("ignore")


def read(model: Any, **options: Any) -> Any:
    return multihead.read(model, [{"input_ids": IDS}], **options)


def loop(model: Any) -> Any:
    with torch.no_grad(), multihead.reading(model) as reading:
        model(IDS)
    return reading.table()


def assert_equal(a: Any, b: Any, close: float = 1e-3) -> None:
    assert a.sums.keys() == b.sums.keys()
    for column in a.sums:
        np.testing.assert_allclose(
            a.value(column), b.value(column), atol=close, rtol=close, err_msg=column
        )


def with_projections(change: Any, **options: Any) -> Any:
    model = llama(attention_bias=True, **options)
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.data.normal_()
        layer.self_attn.o_proj = change(layer.self_attn.o_proj)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_output_projections_of_all_kinds(kind: str) -> None:
    make, twin = KINDS[kind]
    model = with_projections(make)
    want = read(with_projections(twin))
    before = None if kind in ("a tensor subclass", "sharded") else snapshot(model)
    assert_equal(read(model), want)
    if before is not None and "hook" not in kind and "since" not in kind:
        assert_untouched(model, before)
    assert not read(model).meta["notes"]


def test_maps_follow_a_hook_on_the_projection() -> None:
    make, twin = KINDS["a hook that changes the output"]
    maps = [
        multihead.read_maps(with_projections(change), {"input_ids": IDS[:1]}, "L1.H2")
        for change in (make, twin)
    ]
    np.testing.assert_allclose(maps[0].weights, maps[1].weights, atol=1e-5)
    np.testing.assert_allclose(maps[0].contributions, maps[1].contributions, rtol=1e-4)


def test_a_hook_that_only_looks_sees_no_unit_vectors() -> None:
    seen = set()

    def look(layer: nn.Module) -> nn.Module:
        layer.register_forward_hook(lambda module, args, out: seen.add(tuple(args[0].shape)))
        return layer

    model = with_projections(look)
    assert_equal(loop(model), loop(with_projections(copy.deepcopy)))
    assert seen == {(2, 12, 24)}


class Curved(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x) - self.inner.bias)


def test_a_projection_that_is_not_linear_is_refused() -> None:
    with pytest.raises(ReadingError, match=r"don't add up to what .*o_proj returned"):
        read(with_projections(Curved))


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        return llama()
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=64, initializer_range=0.3
        )
    ).eval()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("where", ["cpu", "disk", "device_map"])
def test_offloaded_models(where: str, family: str, tmp_path: Any) -> None:
    model = model_of(family)
    want = read(copy.deepcopy(model), statistics=["copying", "importance"])
    if where == "cpu":
        model = accelerate.cpu_offload(model, execution_device="cpu")
    elif where == "disk":
        model = accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    else:
        names = [n for n, m in model.named_modules() if n.count(".") == 2 or "embed" in n]
        names += ["lm_head", "model.norm", "model.rotary_emb", "transformer.ln_f"]
        names += ["transformer.wte", "transformer.wpe"]
        places = {
            n: "disk" if ".1" in n else "cpu" for n in names if n in dict(model.named_modules())
        }
        model = accelerate.dispatch_model(
            model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
        )
    table = read(model, statistics=["copying"])
    for column in table.sums:
        np.testing.assert_allclose(
            table.value(column), want.value(column), atol=1e-3, rtol=1e-3, err_msg=column
        )
    assert not table.meta["notes"]
    with pytest.raises(MultiheadError, match=r"accelerate.*load the model into memory"):
        multihead.prune(model, [{"input_ids": IDS}], remove=Plan(("L0.H0",)))


class Biased(nn.Module):
    """Attention by hand with a parameter next to its projections, which accelerate fetches for the
    module itself.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.qkv, self.proj = 4, nn.Linear(32, 96), nn.Linear(32, 32)
        self.table = nn.Parameter(torch.randn(4, 7, 7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.table[None])
        return self.proj(y.transpose(1, 2).flatten(2))


def test_offloaded_modules_of_other_libraries() -> None:
    x = torch.randn(2, 7, 32)
    tables = []
    for model in (
        nn.Sequential(Biased()),
        accelerate.cpu_offload(nn.Sequential(Biased()), execution_device="cpu"),
    ):
        with torch.no_grad(), multihead.reading(model.eval()) as reading:
            model(x)
        tables.append(reading.table())
    assert_equal(*tables)
    assert model[0].table.is_meta and not isinstance(vars(model[0])["forward"], PatchedForward)


def test_dynamically_quantised() -> None:
    """torch's: packed weights, and what enters is quantised too, so that updates add up nearly."""
    model = with_projections(copy.deepcopy)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    for module in model.modules():  # the twin has the weights that are stored
        if type(module) is nn.Linear:
            twin = torch.ao.quantization.quantize_dynamic(
                nn.Sequential(copy.deepcopy(module)), {nn.Linear}, dtype=torch.qint8
            )[0]
            module.weight.data = twin.weight().dequantize()
    table, want = read(quantised), read(model)
    for column in ("norm", "share", "contribution:previous", "even:self", "logit", "entropy"):
        np.testing.assert_allclose(
            table.value(column), want.value(column), atol=0.05, rtol=0.05, err_msg=column
        )
    assert [
        "isn't quite linear (it may quantise what enters it" in note for note in table.meta["notes"]
    ] == [True]
    with pytest.raises(MultiheadError, match=r"dynamic.*Linear.*float32 or bfloat16 first"):
        multihead.prune(quantised, [{"input_ids": IDS}], remove=Plan(("L0.H0",)))
    assert str(multihead.cost(quantised)) == str(multihead.cost(model))


def test_weights_that_cannot_be_split_are_refused_by_pruning() -> None:
    for kind, words in (
        ("a tensor subclass", "Elsewhere, which can't be split"),
        ("parametrized", "parametrized; make it a plain one first"),
        ("weight norm by a hook", "parametrized; make it a plain one first"),
        ("packed", "Packed, whose inputs can't be split"),
    ):
        model = with_projections(KINDS[kind][0])
        with pytest.raises(MultiheadError, match=words):
            multihead.prune(model, [{"input_ids": IDS}], remove=Plan(("L0.H0",)))


def adapted(**options: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["o_proj"], init_lora_weights=False, r=4, **options
    )
    return peft.get_peft_model(llama(), config).eval()


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"lora_dropout": 0.5}, {"use_rslora": True}], ids=str
)
def test_adapters_are_read_as_the_merged_model_is(options: Any) -> None:
    model = adapted(**options)
    want = read(copy.deepcopy(model).merge_and_unload(), statistics=["copying"])
    assert_equal(read(model, statistics=["copying"]), want)


def test_an_adapter_that_is_switched_between_two_passes() -> None:
    model = adapted()
    with model.disable_adapter():
        alone = loop(model)
    together = alone + loop(model)
    with torch.no_grad(), multihead.reading(model) as reading:
        with model.disable_adapter():
            model(IDS)
        model(IDS)
    assert_equal(reading.table(), together, 1e-5)


def test_dropout_of_an_adapter_in_training() -> None:
    """What it drops belongs to no head: updates are those without it, and a note says so."""
    model = adapted(lora_dropout=0.5)
    want = loop(model)
    model.train()
    with multihead.reading(model) as reading:
        for _ in range(2):
            model(IDS).logits.sum().backward()
    table = reading.table()
    assert any("has dropout" in note for note in table.meta["notes"])
    first = slice(0, 3)  # of the first layer, which nothing before changes
    for column in ("norm", "contribution:self", "even:self", "share"):
        got = table.value(column)[first]
        np.testing.assert_allclose(got, want.value(column)[first], rtol=1e-4, atol=1e-5)


def test_weights_that_are_trained_between_two_passes() -> None:
    model = with_projections(KINDS["weight norm by a hook"][0]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with multihead.reading(model) as reading:
        for _ in range(3):
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
    assert reading.table().meta["notes"] == []
