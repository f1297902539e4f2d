"""`replace_attention`: models on our layers compute, generate and train as before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from families import FAMILIES, Family, batches_of, model_of, real_outputs
from multihead.errors import MultiheadError
from multihead.layers import replace_attention, restore_attention
from multihead.layers.interval_tensor import IntervalTensor
from multihead.layers.model_attention import ModelAttention
from multihead.layers.replace import NAME, model_mask
from small import IDS, llama

REFUSED = {"llama4": "attn_temperature_tuning=True"}
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0


def pair(model: Any) -> tuple[Any, Any]:
    return model, replace_attention(copy.deepcopy(model))


def generate(model: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        IDS, do_sample=False, pad_token_id=0, **{"max_new_tokens": 20} | options
    )
    return found


def state_is_equal(model: Any, other: Any) -> bool:
    a, b = model.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.name not in (*REFUSED, "gpt_neox")], ids=lambda f: f.name
)
def test_families_compute_as_before_and_come_back(family: Family) -> None:
    model = model_of(family)
    changed = replace_attention(copy.deepcopy(model))
    assert any(isinstance(m, ModelAttention) for m in changed.modules())
    for padding in family.paddings():
        batch = batches_of(family, padding)[0]
        want = real_outputs(model, batch)
        np.testing.assert_allclose(
            real_outputs(changed, batch), want, rtol=0, atol=1e-5 * np.abs(want).max()
        )
    assert state_is_equal(restore_attention(changed), model)
    assert changed.config._attn_implementation == model.config._attn_implementation
    np.testing.assert_array_equal(real_outputs(changed, batch), want)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma3", "gpt_oss", "deepseek_v3"])
def test_families_generate_as_before(name: str) -> None:
    family = next(f for f in FAMILIES if f.name == name)
    model, changed = pair(model_of(family))
    batch = batches_of(family, "left")[0]
    options: dict[str, Any] = dict(max_new_tokens=14, min_new_tokens=14, do_sample=False)
    want = model.generate(**batch, **options)
    assert torch.equal(changed.generate(**batch, **options), want)


def test_encoder_and_decoder_generate_as_before() -> None:
    """Steps of cross attention read the encoder's keys from the cache; T5's layers share a bias."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(d_kv=6, d_ff=16, num_layers=2, num_heads=3, vocab_size=50)
    config = tf.T5Config(d_model=18, decoder_start_token_id=0, **sizes)
    model, changed = pair(tf.T5ForConditionalGeneration(config).eval())
    for options in ({"attention_mask": MASK}, {"num_beams": 2}, {"cache_implementation": "static"}):
        want = generate(model, **options)
        assert torch.equal(generate(changed, **options), want), options


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_mask": MASK},
        {"num_beams": 3, "attention_mask": MASK},
        {"cache_implementation": "static", "attention_mask": MASK},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 5},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=str,
)
def test_ways_of_generation(options: dict[str, Any]) -> None:
    model, changed = pair(llama())
    if "prompt_lookup_num_tokens" in options:
        ids = IDS[:1].repeat(1, 2)
        found = [
            m.generate(ids, do_sample=False, max_new_tokens=9, **options) for m in (model, changed)
        ]
        assert torch.equal(*found)
        return
    assert torch.equal(generate(changed, **options), generate(model, **options))


def test_a_cache_is_continued_copied_and_cropped() -> None:
    model, changed = pair(llama())
    outputs = []
    for each in (model, changed):
        cache, logits = tf.DynamicCache(config=each.config), []
        with torch.no_grad():
            for i in range(4):
                each(IDS[:, i : i + 1], past_key_values=cache)
            other = copy.deepcopy(cache)
            logits.append(each(IDS[:, 4:6], past_key_values=cache).logits)
            logits.append(each(IDS[:, 7:9], past_key_values=other).logits)
            cache.crop(-2)
            cache.reorder_cache(torch.tensor([1, 0]))
            logits.append(each(IDS[:, 9:10], past_key_values=cache).logits)
            logits.append(each(IDS[:, 10:], past_key_values=cache).logits)
        logits.append(each(IDS[:, :3], past_key_values=other).logits)  # with gradients
        outputs.append(logits)
    for got, want in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_training_step_is_the_same(name: str) -> None:
    """Loss, gradients of all parameters, and the model that is restored after the step."""
    model = copy.deepcopy(model_of(next(f for f in FAMILIES if f.name == name)))
    model, changed = pair(model.requires_grad_(True))  # in evaluation, without dropout
    ids = IDS % model.config.vocab_size
    # outputs at padding differ between transformers' own implementations too
    labels = ids.masked_fill((MASK * MASK.roll(1, 1)) == 0, -100)
    losses = []
    for each in (model, changed):
        optimiser = torch.optim.SGD(each.parameters(), lr=0.1)
        loss = each(ids, attention_mask=MASK, labels=labels).loss
        loss.backward()
        losses.append(loss)
        optimiser.step()
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=0)
    restore_attention(changed)
    for (path, theirs), ours in zip(model.named_parameters(), changed.parameters(), strict=True):
        moved = float(theirs.grad.abs().max())
        tolerance = 1e-5 * max(moved, 1e-3)
        np.testing.assert_allclose(
            ours.detach(), theirs.detach(), rtol=1e-6, atol=tolerance, err_msg=path
        )
        assert ours.requires_grad


def test_unchanged_weights_are_the_same_parameters() -> None:
    model = llama()
    before = dict(model.named_parameters())
    replace_attention(model)
    names = {
        name.replace(".attention.", ".").replace("out_proj", "o_proj"): weight
        for name, weight in model.named_parameters()
    }
    assert all(names[name] is weight for name, weight in before.items())
    assert "model.layers.1.self_attn.attention.out_proj.weight" in model.state_dict()
    restore_attention(model)
    assert all(dict(model.named_parameters())[name] is weight for name, weight in before.items())


def test_state_copies_dtypes_and_modes() -> None:
    model, changed = pair(llama())
    twin = copy.deepcopy(changed)
    twin.load_state_dict(changed.state_dict())
    assert torch.equal(twin(IDS).logits, changed(IDS).logits)
    assert state_is_equal(restore_attention(twin), model)
    half = restore_attention(copy.deepcopy(changed).bfloat16().train())
    assert half.model.layers[0].self_attn.training
    assert half.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert not any(isinstance(m, ModelAttention) for m in half.modules())
    with torch.inference_mode():
        assert torch.equal(generate(changed), generate(model))


def test_graphs() -> None:
    model, changed = pair(llama())
    compiled = torch.compile(changed, backend="eager", fullgraph=True)
    with torch.no_grad():
        got, want = (each(IDS, attention_mask=MASK).logits[1] for each in (compiled, model))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
        exported = torch.export.export(changed, (IDS,), kwargs={"use_cache": False}).module()
        got = exported(IDS, use_cache=False).logits
        torch.testing.assert_close(got, model(IDS).logits, atol=1e-5, rtol=0)


def test_masks_of_other_kinds() -> None:
    """Packed sequences, dense booleans and numbers, from the model or from the user."""
    model, changed = pair(llama())
    ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
    dense = torch.ones(2, 1, 12, 12).tril().bool()
    dense[:, :, 6, 2] = False
    low = torch.zeros(dense.shape).masked_fill(~dense, torch.finfo(torch.float32).min)
    for given in ({"position_ids": ids}, {"attention_mask": dense}, {"attention_mask": low}):
        x = IDS[: len(next(iter(given.values())))]
        want = model(x, **given).logits
        torch.testing.assert_close(changed(x, **given).logits, want, atol=1e-5, rtol=0)


def test_readings_are_those_of_the_model() -> None:
    model, changed = pair(llama())
    batches = [{"input_ids": IDS, "attention_mask": MASK}]
    tables = [multihead.read(each, batches, probe=False) for each in (model, changed)]
    for measure in ("entropy", "previous", "norm", "contribution:first"):
        theirs, ours = (table.value(measure) for table in tables)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    with multihead.reading(changed):
        inside = generate(changed)
    assert torch.equal(inside, generate(model))


# ---- refusals


@pytest.mark.parametrize("name", REFUSED)
def test_what_layers_cant_express_is_named_and_nothing_changes(name: str) -> None:
    model = copy.deepcopy(model_of(next(f for f in FAMILIES if f.name == name)))
    modules, before = list(model.modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(MultiheadError, match=rf"layers\.0.*{REFUSED[name]}"):
        replace_attention(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert model.config._attn_implementation != NAME


def test_a_later_module_that_cant_be_replaced_leaves_the_first(monkeypatch: Any) -> None:
    model = llama()
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(MultiheadError, match=r"model\.layers\.1\.self_attn.*has hooks"):
        replace_attention(model)
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"
    assert not model.model.layers[0].self_attn.q_proj.weight.is_meta


def test_words() -> None:
    changed = replace_attention(llama())
    with pytest.raises(MultiheadError, match="replaced already"):
        replace_attention(changed)
    with pytest.raises(MultiheadError, match="output_attentions: the layer in place of Llama"):
        changed(IDS, output_attentions=True)
    with pytest.raises(MultiheadError, match=r"passes temperature= to LlamaAttention"):
        changed(IDS, temperature=2.0)
    with pytest.raises(MultiheadError, match=r"save_pretrained: its attention is replaced"):
        changed.save_pretrained("nowhere")
    with pytest.raises(MultiheadError, match=r"save_pretrained"):
        copy.deepcopy(changed).model.save_pretrained("nowhere")
    changed.model.layers[0].self_attn.attention.q_proj = torch.nn.Identity()
    with pytest.raises(MultiheadError, match=r"can't be restored: .*q_proj\.weight"):
        restore_attention(changed)
    for function in (replace_attention, restore_attention):
        with pytest.raises(TypeError, match="model=3: expected a transformers model"):
            function(3)
        with pytest.raises(MultiheadError, match="Linear is no transformers model"):
            function(torch.nn.Linear(2, 2))
    with pytest.raises(MultiheadError, match="isn't replaced, so there is nothing to restore"):
        restore_attention(llama())


def test_a_restored_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model, changed = pair(llama())
    restore_attention(changed).save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_masks_that_arent_needed_arent_made() -> None:
    given: dict[str, Any] = dict(batch_size=2, device="cpu")
    plain = dict(q_length=6, kv_length=6)
    assert model_mask(**given, **plain) is None
    assert model_mask(**given, q_length=1, kv_length=6, q_offset=5) is None
    later = model_mask(**given, q_length=2, kv_length=6, q_offset=4)
    assert isinstance(later, IntervalTensor) and later.materialize()[0, 0].sum(-1).tolist() == [
        5,
        6,
    ]
    valid = torch.ones(2, 6, dtype=torch.bool)
    assert model_mask(**given, **plain, attention_mask=valid) is None
    valid[0, :2] = False
    assert isinstance(model_mask(**given, **plain, attention_mask=valid), IntervalTensor)


# ---- trained models


@pytest.mark.slow
def test_smollm2_generates_as_before(smollm2_gguf: Path) -> None:
    given: dict[str, Any] = dict(gguf_file=smollm2_gguf.name)
    model = tf.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, dtype=torch.float32, **given
    ).eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(smollm2_gguf.parent, **given)
    texts = ["The harbour of Marnstad had two lights. The first", "Attention is"]
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert not batch["attention_mask"].all()
    options: dict[str, Any] = dict(max_new_tokens=64, min_new_tokens=64, do_sample=False)
    want = model.generate(**batch, **options, pad_token_id=tokenizer.pad_token_id)
    replace_attention(model)
    got = model.generate(**batch, **options, pad_token_id=tokenizer.pad_token_id)
    assert got.shape[1] == batch["input_ids"].shape[1] + 64 and torch.equal(got, want)


def test_minilm_embeds_as_before(minilm_dir: Path) -> None:
    model = tf.AutoModel.from_pretrained(minilm_dir).eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(minilm_dir)
    batch = tokenizer(
        ["One light.", "The old harbour had two lights."], return_tensors="pt", padding=True
    )
    valid = batch["attention_mask"][..., None]

    @torch.no_grad()
    def embed() -> torch.Tensor:
        return (model(**batch).last_hidden_state * valid).sum(1) / valid.sum(1)

    want = embed()
    replace_attention(model)
    assert type(model.encoder.layer[0].attention.output.dense) is torch.nn.Identity
    torch.testing.assert_close(embed(), want, atol=1e-5, rtol=0)
