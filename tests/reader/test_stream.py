"""`logit` against what hooks see: each head's update, the frozen final norm and the column of the
token that comes next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import multihead
from families import (
    BOS,
    DECODER,
    FAMILIES,
    GROUPED,
    WORDS,
    Family,
    batches_of,
    doubles,
    model_of,
    projection_weight,
)
from multihead.reader.session import Reading
from oracles.statistics import Floats
from small import IDS
from small import llama as small_llama

Batches = list[dict[str, torch.Tensor]]
BY_NAME = {family.name: family for family in FAMILIES}
EVEN = DECODER | {"num_attention_heads": 4}  # heads


def phi() -> Any:
    return tf.PhiForCausalLM(tf.PhiConfig(**EVEN, num_key_value_heads=2, partial_rotary_factor=0.5))


def opt() -> Any:
    sizes = dict(
        hidden_size=48,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return tf.OPTForCausalLM(tf.OPTConfig(word_embed_proj_dim=48, vocab_size=WORDS, **sizes, **BOS))


def olmo() -> Any:
    return tf.OlmoForCausalLM(tf.OlmoConfig(**EVEN))


def stablelm() -> Any:
    options = dict(num_key_value_heads=2, partial_rotary_factor=0.5, use_parallel_residual=True)
    return tf.StableLmForCausalLM(tf.StableLmConfig(**EVEN, **options))


def gemma() -> Any:
    return tf.GemmaForCausalLM(tf.GemmaConfig(**GROUPED))


def qwen3_next() -> Any:
    experts = dict(
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    config = tf.Qwen3NextConfig(**GROUPED, **experts, layer_types=["full_attention"] * 2)
    return tf.Qwen3NextForCausalLM(config)


MORE = (
    Family("phi", phi, "dense"),
    Family("opt", opt, "out_proj"),
    Family("olmo", olmo, "o_proj"),
    Family("stablelm", stablelm, "o_proj"),
    Family("gemma", gemma, "o_proj"),
    Family("qwen3_next", qwen3_next, "o_proj"),
)
NAMES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "qwen3",
    "mistral",
    "gpt_oss",
    "phi3",
    "gpt_bigcode",
    "deepseek_v3",
    "llama4",
)
HAVE = [*(BY_NAME[name] for name in NAMES), *MORE]
CENTRED = ("gpt2", "gpt_neox", "gpt_bigcode", "phi", "opt", "stablelm", "olmo")  # LayerNorm


class Seen:
    """What hooks saw of one pass: what entered each W_O, the stream before the last norm, what
    entered and left the MLPs.
    """

    def __init__(self) -> None:
        self.entered: dict[str, Floats] = {}
        self.left: dict[str, Floats] = {}
        self.final: Floats = np.empty(0)
        self.logits: Floats = np.empty(0)


@contextmanager
def watched(model: Any, outs: dict[str, str]) -> Iterator[Seen]:
    """`outs`: site -> the module whose inputs and outputs are kept."""
    seen = Seen()
    modules = dict(model.named_modules())
    final = final_norm(model)

    def keep(site: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            seen.entered[site], seen.left[site] = doubles(args[0]), doubles(output)

        return hook

    def before(module: nn.Module, args: Any) -> None:
        seen.final = doubles(args[0])

    handles = [modules[out].register_forward_hook(keep(site)) for site, out in outs.items()]
    handles.append(final.register_forward_pre_hook(before))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def outs_of(family: Family, model: Any) -> dict[str, str]:
    return {
        site: f"{site}.{family.projection}"
        for site in sorted({s.name for s in Reading(model).sites})
    }


def final_norm(model: Any) -> nn.Module:
    names = [n for n, m in model.named_modules() if "norm" in n.split(".")[-1] or "ln_f" in n]
    return model.get_submodule(
        [n for n in names if not any(part.isdigit() for part in n.split("."))][-1]
    )


def columns(family: Family, model: Any, final: Floats, tokens: np.ndarray[Any, Any]) -> Floats:
    """For each row the direction of the stream along which the logit of a token grows, `[B, L, D]`,
    the final norm frozen.
    """
    norm = final_norm(model)
    eps = next(
        (float(getattr(norm, n)) for n in ("variance_epsilon", "eps") if hasattr(norm, n)), 1e-5
    )  # OLMo's has none
    gain = (
        doubles(norm.weight)
        if getattr(norm, "weight", None) is not None
        else np.ones(final.shape[-1])
    )
    gain = 1 + gain if family.name in ("gemma", "qwen3_next") else gain
    x = final - final.mean(axis=-1, keepdims=True) if family.name in CENTRED else final
    scale = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    along = doubles(model.get_output_embeddings().weight)[tokens] * gain * scale
    return along - along.mean(axis=-1, keepdims=True) if family.name in CENTRED else along


def expected(family: Family, batches: Batches) -> tuple[dict[str, Floats], int]:
    """Each head's mean, and the rows it rests on."""
    model = model_of(family)
    outs = outs_of(family, model)
    totals: dict[str, Floats] = {}
    rows = 0
    for batch in batches:
        with watched(model, outs) as seen, torch.no_grad():
            model(**batch)
        ids = batch["input_ids"].numpy()
        mask = batch["attention_mask"].numpy() if "attention_mask" in batch else np.ones_like(ids)
        counts = (mask[:, :-1] * mask[:, 1:]).astype(bool)
        if "position_ids" in batch:
            counts &= np.diff(batch["position_ids"].numpy(), axis=1) == 1
        rows += counts.sum()
        along = columns(family, model, seen.final[:, :-1], ids[:, 1:])
        for site, x in seen.entered.items():
            weight = projection_weight(family, model, site)
            heads = weight.shape[0] // Reading(model).sites[0].head_dim
            back = (
                (along @ weight.T * x.reshape(*ids.shape, -1)[:, :-1])
                .reshape(*counts.shape, heads, -1)
                .sum(axis=-1)
            )
            totals[site] = totals.get(site, 0) + back[counts].sum(axis=0)
    return {site: total / rows for site, total in totals.items()}, rows


def check(table: Any, family: Family, batches: Batches) -> None:
    want, rows = expected(family, batches)
    got, counts = table.value("logit"), table.count("logit")
    assert set(counts.tolist()) == {rows}
    for site, values in want.items():
        mine = [n for n, head in enumerate(table.heads) if head.site == site]
        np.testing.assert_allclose(got[mine], values, rtol=2e-5, atol=2e-6 * np.abs(values).max())


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", HAVE, ids=lambda family: family.name)
def test_logit_is_what_hooks_give(family: Family, padding: str) -> None:
    batches = batches_of(family, padding)
    table = multihead.read(model_of(family), batches, special_ids=set(), probe=False)
    check(table, family, batches)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_texts_packed_behind_one_another(name: str) -> None:
    """The last token of a text has none that comes next."""
    family = BY_NAME[name]
    ids = batches_of(family, "none")[0]["input_ids"]
    packed = {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(8), torch.arange(5)]).expand(3, -1),
        "use_cache": False,
    }
    check(
        multihead.read(model_of(family), [packed], special_ids=set(), probe=False), family, [packed]
    )


@pytest.mark.filterwarnings(
    "ignore:.past_key_values. is deprecated"
)  # the name that older transformers know
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_in_pieces_with_a_cache_as_in_one_pass(name: str) -> None:
    """The last row of a piece waits for the first token of the next."""
    family = BY_NAME[name]
    model, (batch, _) = model_of(family), batches_of(family, "left")
    pieces = ((0, 6), (6, 10), (10, 11), (11, 13))
    cache = tf.DynamicCache(config=model.config)
    with multihead.reading(model) as reading, torch.no_grad():
        for start, stop in pieces:
            model(
                input_ids=batch["input_ids"][:, start:stop],
                attention_mask=batch["attention_mask"][:, :stop],
                past_key_values=cache,
                use_cache=True,
            )
    ids, mask = batch["input_ids"].numpy(), batch["attention_mask"].numpy()
    counts = (mask[:, :-1] * mask[:, 1:]).astype(bool)
    assert set(reading.table().count("logit").tolist()) == {counts.sum()}
    outs = outs_of(family, model)
    with watched(model, outs) as seen, torch.no_grad():
        model(**batch)
    along = columns(family, model, seen.final[:, :-1], ids[:, 1:])
    site = next(iter(outs))
    weight = projection_weight(family, model, site)
    heads = [n for n, head in enumerate(reading.table().heads) if head.site == site]
    back = (
        (along @ weight.T * seen.entered[site][:, :-1])
        .reshape(*counts.shape, len(heads), -1)
        .sum(axis=-1)
    )
    np.testing.assert_allclose(
        reading.table().value("logit")[heads], back[counts].mean(axis=0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("name", "mlp"), [("llama", "mlp"), ("gpt2", "mlp"), ("gpt_neox", "mlp"), ("phi", "mlp")]
)
def test_all_parts_together_are_the_logit(name: str, mlp: str) -> None:
    """Embeddings and positions, heads, output biases, MLPs and the norm's shift: nothing is
    missing, nothing counted twice.
    """
    family = next(f for f in HAVE if f.name == name)
    model, (_, batch) = model_of(family), batches_of(family, "none")
    ids = batch["input_ids"].numpy()
    table = multihead.read(model, [batch], special_ids=set(), probe=False)
    sites = {s.name: s for s in Reading(model).sites}
    layers = {site: site.rpartition(".")[0] for site in sites}
    first: list[Floats] = []
    handle = model.get_submodule(next(iter(layers.values()))).register_forward_pre_hook(
        lambda m, args, kwargs: first.append(doubles(args[0] if args else kwargs["hidden_states"])),
        with_kwargs=True,
    )
    both = (
        watched(model, outs_of(family, model)),
        watched(model, {s: f"{at}.{mlp}" for s, at in layers.items()}),
    )
    with both[0] as seen, both[1] as mlps, torch.no_grad():
        out = doubles(model(**batch).logits)[:, :-1]
    handle.remove()
    along = columns(family, model, seen.final[:, :-1], ids[:, 1:])
    rest = first[0][:, :-1] + sum(left[:, :-1] for left in mlps.left.values())
    for site in sites.values():
        rest = rest + doubles(site.out_weight()[1])
    norm, head = final_norm(model), model.get_output_embeddings()
    constant = np.zeros(WORDS)
    if getattr(norm, "bias", None) is not None:
        constant += doubles(head.weight) @ doubles(norm.bias)
    if head.bias is not None:
        constant += doubles(head.bias)
    want = np.take_along_axis(out, ids[:, 1:, None], -1)[..., 0].mean()
    got = (
        (along * rest).sum(axis=-1).mean()
        + constant[ids[:, 1:]].mean()
        + table.value("logit").sum()
    )
    assert got == pytest.approx(want, rel=1e-4, abs=1e-4)


# Where it has no such meaning.


def granite() -> Any:
    sizes = DECODER | {"hidden_size": 60}
    return tf.GraniteForCausalLM(
        tf.GraniteConfig(**sizes, num_attention_heads=6, residual_multiplier=0.3)
    )


def granite_logits() -> Any:
    sizes = DECODER | {"hidden_size": 60}
    return tf.GraniteForCausalLM(
        tf.GraniteConfig(**sizes, num_attention_heads=6, logits_scaling=4.0)
    )


def cohere() -> Any:
    return tf.CohereForCausalLM(tf.CohereConfig(**EVEN, num_key_value_heads=2))


def olmo2() -> Any:
    return tf.Olmo2ForCausalLM(tf.Olmo2Config(**EVEN))


def glm4() -> Any:
    return tf.Glm4ForCausalLM(tf.Glm4Config(**GROUPED))


def modernbert_decoder() -> Any:
    return tf.ModernBertDecoderForCausalLM(
        tf.ModernBertDecoderConfig(**EVEN, layer_types=["full_attention"] * 2)
    )


def bare() -> Any:
    return tf.LlamaModel(tf.LlamaConfig(**GROUPED))


def bert() -> Any:
    sizes = dict(intermediate_size=40, num_hidden_layers=2, max_position_embeddings=32)
    return tf.BertForMaskedLM(
        tf.BertConfig(hidden_size=40, num_attention_heads=5, vocab_size=WORDS, **sizes)
    )


def albert() -> Any:
    """Its one layer runs twice."""
    sizes = dict(
        intermediate_size=40, num_hidden_layers=2, max_position_embeddings=32, embedding_size=40
    )
    return tf.AlbertForMaskedLM(
        tf.AlbertConfig(hidden_size=40, num_attention_heads=5, vocab_size=WORDS, **sizes)
    )


def t5() -> Any:
    sizes = dict(num_layers=2, num_heads=5, d_ff=40, vocab_size=WORDS)
    return tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=48, d_kv=6, decoder_start_token_id=0, **sizes, **BOS)
    )


def bart() -> Any:
    sizes = dict(
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_position_embeddings=32,
    )
    heads = dict(encoder_attention_heads=6, decoder_attention_heads=4)
    return tf.BartForConditionalGeneration(
        tf.BartConfig(d_model=48, vocab_size=WORDS, **sizes, **heads, **BOS)
    )


FACTOR, NORM, ADDED, NONE = (
    "a factor or soft cap",
    "isn't the output of the last norm",
    "a norm or a factor",
    "no linear unembedding",
)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (BY_NAME["gemma2"].make, FACTOR),
        (BY_NAME["gemma3"].make, ADDED),
        (granite, ADDED),
        (granite_logits, FACTOR),
        (cohere, FACTOR),
        (olmo2, ADDED),
        (glm4, ADDED),
        (modernbert_decoder, "isn't directly on the way"),
        (bare, NONE),
        (bert, "isn't causal"),
        (albert, "isn't causal"),
        (t5, NORM),
        (bart, NORM),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_empty_where_the_stream_is_another(make: Any, why: str) -> None:
    family = Family(make.__name__, make, "", inputs="both" if make in (t5, bart) else "decoder")
    model = model_of(family)
    batches = [{"input_ids": torch.randint(3, WORDS, (2, 9))}]
    if family.inputs == "both":
        batches[0]["decoder_input_ids"] = torch.randint(3, WORDS, (2, 7))
    table = multihead.read(model, batches, special_ids=set(), probe=False)
    assert "logit" not in table.columns and not table.count("logit").any()
    for site in {head.site for head in table.heads}:
        found = table.reasons.get(f"{site} logit", table.reasons.get("logit", ""))
        assert why in found or "another sequence" in found, found


@pytest.mark.parametrize("how", ["twice", "scaled", "slightly", "later", "dropped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_that_was_tampered_with_is_noticed(how: str, dtype: torch.dtype) -> None:
    """A layer that runs twice or whose output is scaled, a factor on the update beside a stream of
    huge numbers.
    """
    model = small_llama().to(dtype)
    layers = model.model.layers
    handles = []
    if how == "twice":
        layers.insert(1, layers[0])
        model.config.num_hidden_layers = 3
        layers[0].self_attn.layer_idx = 0
    elif how == "scaled":
        handles.append(layers[1].register_forward_hook(lambda m, a, out: out * 0.5))
    elif (
        how == "slightly"
    ):  # a factor on the update alone, one dimension of the stream being a thousand times as long
        model.model.embed_tokens.weight.data[:, 3] = 1000
        attention = layers[0].self_attn
        handles.append(attention.register_forward_hook(lambda m, a, out: (out[0] * 0.5, *out[1:])))
    elif how == "later":  # the second layer reads something else than the first returned
        handles.append(layers[1].register_forward_pre_hook(lambda m, a: (a[0] * 2, *a[1:])))
    else:
        handles.append(model.lm_head.register_forward_pre_hook(lambda m, a: (a[0].tanh(),)))
    with multihead.reading(model, verify=False) as reading, torch.no_grad():
        model(IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    table = reading.table()
    first = [n for n, head in enumerate(table.heads) if head.layer == 0]
    assert not table.count("logit")[first].any()
    assert any("logit" in key for key in table.reasons)


def test_in_bfloat16_nearly_the_same() -> None:
    model = small_llama()
    want = multihead.read(model, [{"input_ids": IDS}], probe=False).value("logit")
    got = multihead.read(model.bfloat16(), [{"input_ids": IDS}], probe=False).value("logit")
    np.testing.assert_allclose(got, want, atol=0.05 * np.abs(want).max())


def test_a_part_of_a_model_gives_none_and_keeps_nothing() -> None:
    model = small_llama()
    with multihead.reading(model) as reading, torch.no_grad():
        for _ in range(3):
            model.model(IDS)
        assert not reading.stream._pending and not reading.stream._seen
    assert "a part of the model" in reading.table().reasons["logit"]


def test_updates_of_nothing_say_nothing_of_where_they_go() -> None:
    """W_O begins with zeros here, as in some trainings: the stream is looked at when there is
    something to be seen.
    """
    model = small_llama()
    weights = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    before = [weight.data.clone() for weight in weights]
    want = multihead.read(model, [{"input_ids": IDS}], probe=False)
    with multihead.reading(model) as reading, torch.no_grad():
        for weight in weights:
            weight.data.zero_()
        model(IDS)
        assert "below rounding error" in reading.table().reasons["logit"]
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
        model(IDS)
    np.testing.assert_allclose(reading.table().value("logit"), want.value("logit"), rtol=1e-5)
    with multihead.ablate_heads(
        model, ["L1.H0", "L1.H1", "L1.H2"]
    ):  # a layer that is off says nothing of itself alone
        table = multihead.read(model, [{"input_ids": IDS}], probe=False)
    assert "below rounding error" in table.reasons["model.layers.1.self_attn logit"]
    assert table.count("logit").tolist() == [22, 22, 22, 0, 0, 0]


def test_layers_without_attention_hand_the_stream_on() -> None:
    experts = dict(
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    sizes = dict(
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    config = tf.Qwen3NextConfig(
        **GROUPED, **experts, **sizes, layer_types=["full_attention", "linear_attention"]
    )
    family = Family("qwen3_next", lambda: tf.Qwen3NextForCausalLM(config), "o_proj")
    batches = batches_of(family, "none")
    table = multihead.read(model_of(family), batches, special_ids=set(), probe=False)
    assert len(table.heads) == 6
    check(table, family, batches)


def test_one_token_has_none_that_follows() -> None:
    model = small_llama()
    table = multihead.read(model, [{"input_ids": IDS[:, :1]}], probe=False, statistics=["copying"])
    assert table.reasons["logit"] == "each text is one token long"
    assert "two tokens" in table.reasons["copying"]
    table += multihead.read(model, [{"input_ids": IDS}], probe=False)
    assert "logit" not in table.reasons


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_a_training_loop_under_reading_keeps_nothing_and_counts_each_pass_once() -> None:
    model = small_llama().train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with multihead.reading(model) as reading:
        for _ in range(3):
            model(IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
            assert not reading.stream._pending and not reading.stream._seen
            assert not reading._reader._pending
    table = reading.table()
    assert set(table.count("logit").tolist()) == {3 * 22} and set(
        table.count("entropy").tolist()
    ) == {3 * 24}


def test_a_pass_that_failed_is_not_counted() -> None:
    model = small_llama()
    want = multihead.read(model, [{"input_ids": IDS}], probe=False)
    with multihead.reading(model) as reading, torch.no_grad():
        for _ in range(2):
            hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(IDS)
            hook.remove()
            model(IDS[:, : 0 or None])
    np.testing.assert_allclose(reading.table().value("logit"), want.value("logit"), rtol=1e-6)
    assert set(reading.table().count("logit").tolist()) == {44}


def test_a_norm_that_takes_something_besides_is_no_reason_not_to_read() -> None:
    model = small_llama()

    class Odd(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.weight = inner, inner.weight

        def forward(self, hidden_states: torch.Tensor, *, much: float) -> torch.Tensor:
            return self.inner(hidden_states) * much

    model.model.norm = Odd(model.model.norm)
    model.model.norm.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {"much": 1.5}), with_kwargs=True
    )
    table = multihead.read(model, [{"input_ids": IDS}], probe=False, statistics="copying")
    assert (
        "isn't linear with its scale frozen" in table.reasons["logit"]
        and table.reasons["copying"] == table.reasons["logit"]
    )
    assert np.isfinite(table.value("entropy")).all()


@pytest.mark.parametrize("spoil", [torch.nan, torch.inf])
def test_numbers_that_are_none_stop_a_reading(spoil: float) -> None:
    model = small_llama()
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = spoil
    with pytest.raises(multihead.errors.ReadingError, match="the model's outputs are NaN here"):
        multihead.read(model, [{"input_ids": IDS}], probe=False)


@pytest.mark.parametrize("pieces", [(1, 5), (1,) * 6, (1, 1, 4), (2, 4), (5, 1)], ids=str)
def test_pieces_of_one_token_are_followed_by_the_next(pieces: tuple[int, ...]) -> None:
    """Also the first: no query of such a pass has a next token yet."""
    model, ids = small_llama(), torch.tensor([[1, 5, 9, 7, 5, 9], [9, 5, 7, 9, 5, 1]])
    with torch.no_grad(), multihead.reading(model) as whole:
        model(ids)
    cache, start = tf.DynamicCache(config=model.config), 0
    with torch.no_grad(), multihead.reading(model) as reading:
        for length in pieces:
            model(ids[:, start : start + length], past_key_values=cache)
            start += length
    got, want = reading.table(), whole.table()
    assert (got.count("logit") == 10).all() and (want.count("logit") == 10).all()
    np.testing.assert_allclose(got.value("logit"), want.value("logit"), rtol=1e-4, atol=1e-6)
