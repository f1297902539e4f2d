"""A model without some heads gives what the whole one gives with these heads at zero, in every family."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import multihead
from families import FAMILIES, Family, batches_of, model_of, real_outputs
from multihead.models.ablate import collect_head_means
from multihead.models.head_intervention import HeadIntervention
from multihead.models.site import Site, find_sites
from multihead.models.transformers import register_attention
from multihead.pruning import surgery
from multihead.pruning.compensation import Moments, fit_compensation
from multihead.pruning.shared_heads import write_shared_heads
from multihead.pruning.surgery import SurgeryError, remove_heads, share_heads
from pruning.sharing import share_weights
from small import IDS, llama

BY_NAME = {family.name: family for family in FAMILIES}


def chosen(sites: list[Site], kind: str) -> dict[str, list[int]]:
    """Heads to remove: a whole group, the first head of each group, one head (so that groups
    differ), or a layer.
    """
    found = {}
    for place, site in enumerate(sites):
        groups = site.slices().num_kv_heads
        each = site.num_heads // groups
        if kind == "groups" and groups > 1:
            found[site.name] = list(range(site.num_heads - each, site.num_heads))
        if kind == "even" and each > 1:
            found[site.name] = list(range(0, site.num_heads, each))
        if kind == "any" and each > 1:
            found[site.name] = [1]
        if kind == "layer" and place == len(sites) - 1:
            found[site.name] = list(range(site.num_heads))
    return found


CASES = [
    pytest.param(family, kind, id=f"{family.name}-{kind}")
    for family in FAMILIES
    for kind in ("groups", "even", "any", "layer")
    if chosen(find_sites(model_of(family)), kind)
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_pruned_equals_zeroed(family: Family, kind: str) -> None:
    model = model_of(family)
    removed = chosen(find_sites(model), kind)
    if family.name == "t5" and kind == "layer":
        with pytest.raises(ValueError, match="can't run without any head; keep at least one"):
            remove_heads(model, removed, batches_of(family, "none")[0])
        return
    smaller = remove_heads(model, removed, batches_of(family, "none")[0])
    off = [
        site.head_label(h)
        for site in find_sites(model)
        if site.name in removed
        for h in removed[site.name]
    ]
    for padding in family.paddings():
        for batch in batches_of(family, padding):
            with multihead.ablate_heads(model, off):
                expected = real_outputs(model, batch)
            np.testing.assert_allclose(
                real_outputs(smaller, batch), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
            )
    size = sum(p.numel() for p in smaller.parameters())
    assert size < sum(p.numel() for p in model.parameters())
    left = {site.head_label(h) for site in find_sites(smaller) for h in range(site.num_heads)}
    assert left == {
        site.head_label(h) for site in find_sites(model) for h in range(site.num_heads)
    } - set(off)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "gpt_neox", "phi3", "deepseek_v3"])
def test_means_go_into_the_bias(name: str) -> None:
    family = BY_NAME[name]
    model = model_of(family)
    sites = find_sites(model)
    removed = chosen(sites, "groups")
    batches = batches_of(family, "none")
    means = collect_head_means(model, sites, batches)
    constant = {name: means[name][heads].flatten() for name, heads in removed.items()}
    compensation = HeadIntervention(removed, constant=constant)
    smaller = remove_heads(model, removed, batches[0], compensation=compensation)
    off = [site.head_label(h) for site in sites if site.name in removed for h in removed[site.name]]
    for batch in batches:
        with multihead.ablate_heads(model, off, mode="mean", over=batches):
            expected = real_outputs(model, batch)
        np.testing.assert_allclose(
            real_outputs(smaller, batch), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
        )


def test_pruned_twice_is_pruned_once() -> None:
    family = BY_NAME["llama"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    names = [site.name for site in find_sites(model)]
    once = remove_heads(model, {names[0]: [0, 4, 5], names[1]: [2]}, batch)
    twice = remove_heads(
        remove_heads(model, {names[0]: [4]}, batch), {names[0]: [0, 4], names[1]: [2]}, batch
    )
    np.testing.assert_allclose(
        real_outputs(twice, batch), real_outputs(once, batch), rtol=0, atol=1e-5
    )
    assert [site.head_label(h) for site in find_sites(twice) for h in range(site.num_heads)] == [
        "L0.H1",
        "L0.H2",
        "L0.H3",
        "L1.H0",
        "L1.H1",
        "L1.H3",
        "L1.H4",
        "L1.H5",
    ]


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "gemma2"])
def test_shared_and_then_pruned(name: str) -> None:
    family = BY_NAME[name]
    model, batches = copy.deepcopy(model_of(family)), batches_of(family, "none")
    shared = share_heads(
        model, share_weights(model, 1, batches, method="mean", refit=False), batches[0]
    )
    smaller = remove_heads(shared, {site.name: [0, 2] for site in find_sites(shared)}, batches[0])
    assert all(
        site.num_heads + 2 == whole.num_heads
        for site, whole in zip(find_sites(smaller), find_sites(model), strict=True)
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_cross_attention_of_gpt2_is_cut_twice(groups: int) -> None:
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(
            n_embd=48, n_head=4, n_layer=2, n_positions=32, vocab_size=20, add_cross_attention=True
        )
    ).eval()
    batch = {
        "input_ids": torch.randint(0, 20, (2, 9)),
        "encoder_hidden_states": torch.randn(2, 5, 48),
    }
    shared = share_heads(
        model, share_weights(model, groups, [batch], method="mean", refit=False), batch
    )
    smaller = remove_heads(shared, {site.name: [0, 1] for site in find_sites(shared)}, batch)
    assert {site.num_heads for site in find_sites(smaller)} == {2}


def test_what_the_inputs_do_not_reach_is_not_cut() -> None:
    family = BY_NAME["clip"]
    model, batch = model_of(family), {"input_ids": batches_of(family, "none")[0]["input_ids"]}
    seen = [site for site in find_sites(model) if "vision" in site.name]
    model.forward = lambda input_ids: model.text_model(
        input_ids
    )  # a model that reads text alone, as those that chat do
    try:
        with pytest.raises(SurgeryError, match=r"vision_model.*: these inputs don't reach it"):
            remove_heads(model, {seen[0].name: [0]}, batch)
    finally:
        del model.forward


def test_new_biases_train_where_the_weights_do() -> None:
    family = BY_NAME["mistral"]  # whose model here is frozen
    model, batch = model_of(family), batches_of(family, "none")[0]
    name = find_sites(model)[0].name
    smaller = remove_heads(model, {name: [0]}, batch, compensation=HeadIntervention({name: [0]}))
    assert smaller.get_submodule(name).o_proj.bias is not None and not any(
        p.requires_grad for p in smaller.parameters()
    )


def test_a_wrong_table_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were queries and keys of a family named the wrong way round, the copy would be refused with
    both numbers.
    """
    family = BY_NAME["vit"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    from multihead.models import resize

    monkeypatch.setattr(
        resize,
        "_keep_inputs",
        lambda module, index, cut=resize._keep_inputs: cut(module, index.flip(0)),
    )
    with pytest.raises(
        SurgeryError,
        match=r"differs from the one whose heads are zero by .* of .* \(allowed 1e-05\)",
    ):
        remove_heads(model, {find_sites(model)[0].name: [0]}, batch)


def test_rounding_that_grows_from_layer_to_layer_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """24 layers with weights so large that a last digit becomes the fifth: each layer is right, and
    so is the copy.
    """
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=64,
            hidden_size=96,
            intermediate_size=96,
            num_hidden_layers=24,
            num_attention_heads=6,
            num_key_value_heads=3,
            initializer_range=0.5,
        )
    ).eval()
    sites, some = find_sites(model), torch.randn(500, 96, dtype=torch.float64)
    removed = {site.name: [1, 2, 4] for site in sites}
    moments = {site.name: Moments(500, some.mean(0), torch.cov(some.T)) for site in sites}
    apart: list[float] = []
    from multihead.pruning import surgery

    def compare(
        name: str, a: torch.Tensor, b: torch.Tensor, *rest: object, real=surgery._compare
    ) -> None:  # type: ignore
        apart.append(float((a - b).abs().max() / a.abs().max()))
        real(name, a, b, *rest)

    monkeypatch.setattr(surgery, "_compare", compare)
    remove_heads(
        model,
        removed,
        {"input_ids": torch.randint(64, (2, 40))},
        compensation=fit_compensation(sites, removed, moments, "refit"),
    )
    assert apart[-1] > 1e-5 and max(apart[:-1]) < 1e-5, apart


@pytest.mark.parametrize(
    ("wrong", "named", "allowed"),
    [
        ("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn", "1e-05"),
        ("lm_head", "the model's output", "0.0001"),
    ],
)
def test_an_error_is_named_where_it_is(
    wrong: str, named: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are compared on the same inputs, so what is wrong in one doesn't show in those behind
    it; the end is, too.
    """
    family = BY_NAME["llama"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    from multihead.pruning import surgery

    def cut(
        smaller: nn.Module, site: Site, *args: object, real=surgery._remove, **more: object
    ) -> None:  # type: ignore
        real(smaller, site, *args, **more)
        if site.name == "model.layers.1.self_attn":
            smaller.get_submodule(wrong).weight.data *= 1.001

    monkeypatch.setattr(surgery, "_remove", cut)
    with pytest.raises(
        SurgeryError, match=rf"^{named}: the smaller model differs .* \(allowed {allowed}\)"
    ):
        remove_heads(model, {site.name: [0] for site in find_sites(model)}, batch)


def test_a_family_whose_code_stumbles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME["vit"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    from multihead.models import resize

    monkeypatch.setattr(
        resize, "_keep_inputs", lambda module, index: None
    )  # W_O waits for all heads
    with pytest.raises(
        SurgeryError, match=r"its own code doesn't run with other numbers of heads \(RuntimeError"
    ):
        remove_heads(model, {find_sites(model)[0].name: [0]}, batch)


def test_what_cannot_be_cut_is_refused_in_words() -> None:
    family = BY_NAME["llama"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    name = find_sites(model)[0].name
    with pytest.raises(ValueError, match=r"head 6 doesn't exist; expected 0 to 5"):
        remove_heads(model, {name: [6]}, batch)
    with pytest.raises(
        ValueError,
        match=r"'nowhere' has no heads; this model's attention modules are model\.layers\.0",
    ):
        remove_heads(model, {"nowhere": [0]}, batch)
    adapted = copy.deepcopy(model)
    adapted.model.layers[0].self_attn.q_proj.lora_A = nn.ModuleDict()
    with pytest.raises(
        ValueError, match="q_proj carries an adapter; merge it into the model first"
    ):
        remove_heads(adapted, {name: [0]}, batch)
    normed = copy.deepcopy(model)
    normed.model.layers[0].self_attn.q_norm = nn.RMSNorm(60)
    with pytest.raises(ValueError, match="its q_norm normalises over all heads at once"):
        remove_heads(normed, {name: [0]}, batch)


def test_the_model_itself_stays_as_it_was() -> None:
    family = BY_NAME["gpt2"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    register_attention()
    remove_heads(model, {find_sites(model)[0].name: [0]}, batch)
    assert model.config._attn_implementation != "multihead"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert", "qwen3", "phi3", "t5"])
def test_shared_keys_and_values_are_those_repeated(name: str) -> None:
    """The smaller model gives what the model gives in which each shared head stands as often as it
    is shared.
    """
    family = BY_NAME[name]
    model = copy.deepcopy(model_of(family))
    batches = batches_of(family, "none")
    found = share_weights(model, 1, batches, refit=False)
    smaller = share_heads(model, found, batches[0])
    for site, one in zip(
        [s for s in find_sites(model) if any(f.site == s.name for f in found)], found, strict=True
    ):
        write_shared_heads(site, one)
    for padding in family.paddings():
        for batch in batches_of(family, padding):
            expected = real_outputs(model, batch)
            np.testing.assert_allclose(
                real_outputs(smaller, batch), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
            )
    assert all(site.slices().num_kv_heads == 1 for site in find_sites(smaller))
    names = [site.head_label(h) for site in find_sites(smaller) for h in range(site.num_heads)]
    assert sorted(names) == sorted(
        site.head_label(h) for site in find_sites(model) for h in range(site.num_heads)
    )
    if name == "bert":
        smaller.set_attn_implementation("eager")
        with pytest.raises(
            ValueError,
            match=r"'eager': this model's query heads share key/value heads in a way that only",
        ):
            smaller(**batches[0])


def test_keys_next_to_their_heads_cannot_be_shared() -> None:
    family = BY_NAME["gpt_neox"]
    model, batches = copy.deepcopy(model_of(family)), batches_of(family, "none")
    words = "query_key_value stores keys and values by head, so 4 heads can't read 2 of them"
    with pytest.raises(ValueError, match=words):
        share_heads(model, share_weights(model, 2, batches, refit=False), batches[0])


def test_the_proof_multiplies_in_full_precision() -> None:
    """Also where products of float32 are left to bfloat16, whose rounding would look like a
    difference.
    """
    model, products = llama(), torch.backends.mkldnn.matmul
    seen = []
    hook = model.lm_head.register_forward_hook(lambda *_: seen.append(products.fp32_precision))
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        remove_heads(model, {"model.layers.0.self_attn": [1]}, {"input_ids": IDS})
        assert products.fp32_precision == "bf16"
    finally:
        products.fp32_precision = before
        hook.remove()
    assert set(seen) == {"ieee"}


def test_products_that_cancel_out_may_differ_by_their_rounding() -> None:
    """As those of a refit over little text do; what is more than rounding is an error still."""
    model = llama()
    site = find_sites(model)[0]
    weight = site.out.weight.data
    weight[:, 1:8:2] = weight[:, 0:8:2].clone()
    site.module.v_proj.weight.data[1:8:2] = -site.module.v_proj.weight.data[0:8:2]  # type: ignore[union-attr]
    weight[:, :8] *= 300
    batch = {"input_ids": torch.arange(12)[None]}
    seen = surgery._run(model, [site], batch)
    moved = [update + 2e-5 * update.abs().max() for update in seen.updates[site.name]]
    surgery._prove(replace(seen, updates={site.name: moved}), model, [site], batch, "zero")
    wrong = [update + 1.0 for update in seen.updates[site.name]]
    with pytest.raises(SurgeryError, match="differs from the one whose heads are zero"):
        surgery._prove(replace(seen, updates={site.name: wrong}), model, [site], batch, "zero")
