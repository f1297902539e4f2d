"""`copying` against the eigenvalues of the whole V x V matrix, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

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
from oracles.statistics import Floats
from small import IDS
from small import llama as small_llama

BY_NAME = {family.name: family for family in FAMILIES}


def qwen2() -> Any:
    return tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**DECODER, num_attention_heads=6, num_key_value_heads=3)
    )


def phi() -> Any:
    return tf.PhiForCausalLM(
        tf.PhiConfig(
            **DECODER, num_attention_heads=4, num_key_value_heads=2, partial_rotary_factor=0.5
        )
    )


def gemma() -> Any:
    return tf.GemmaForCausalLM(tf.GemmaConfig(**GROUPED))


QWEN2, PHI, GEMMA = (
    Family("qwen2", qwen2, "o_proj"),
    Family("phi", phi, "dense"),
    Family("gemma", gemma, "o_proj"),
)


def transposed(module: Any, width: int) -> Floats:
    return doubles(module.weight) if module.weight.shape[0] == width else doubles(module.weight).T


def parts(name: str, model: Any) -> list[tuple[str, Any, Floats, int]]:
    """For each site its name, the norm in front, W_V `[D, G*Ev]` and its width of a head."""
    found = []
    width = model.config.hidden_size
    layers = (
        model.transformer.h
        if name == "gpt2"
        else model.gpt_neox.layers
        if name == "gpt_neox"
        else model.model.layers
    )
    for n, layer in enumerate(layers):
        if name == "gpt2":
            found.append(
                (
                    f"transformer.h.{n}.attn",
                    layer.ln_1,
                    doubles(layer.attn.c_attn.weight)[:, 2 * width :],
                    12,
                )
            )
        elif name == "gpt_neox":  # q, k and v of a head lie side by side
            fused = doubles(layer.attention.query_key_value.weight).T.reshape(width, 4, 3, -1)
            found.append(
                (
                    f"gpt_neox.layers.{n}.attention",
                    layer.input_layernorm,
                    fused[:, :, 2].reshape(width, -1),
                    12,
                )
            )
        elif name == "phi3":
            fused = doubles(layer.self_attn.qkv_proj.weight).T
            found.append(
                (f"model.layers.{n}.self_attn", layer.input_layernorm, fused[:, -3 * 8 :], 8)
            )
        else:
            value = doubles(layer.self_attn.v_proj.weight).T
            head = {"llama": 10, "gemma": 10, "qwen3": 12, "qwen2": 8, "phi": 12, "gpt_oss": 10}[
                name
            ]
            found.append((f"model.layers.{n}.self_attn", layer.input_layernorm, value, head))
    return found


def folded(name: str, norm: Any, matrix: Floats) -> Floats:
    """What is read through a norm, `[D, ...]`, seen from before it."""
    gain = doubles(norm.weight) + (1 if name == "gemma" else 0)
    seen = gain[:, None] * matrix
    return seen - seen.mean(axis=0) if "Layer" in type(norm).__name__ else seen


def by_hand(family: Family, model: Any) -> dict[str, Floats]:
    name = family.name
    finals = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
    final = next(m for n, m in model.named_modules() if n.split(".")[-1] in finals)
    embed = doubles(model.get_input_embeddings().weight)  # [V, D]
    unembed = folded(name, final, doubles(model.get_output_embeddings().weight).T)  # [D, V]
    found = {}
    for site, norm, value, width in parts(name, model):
        out = projection_weight(family, model, site).reshape(
            -1, width, embed.shape[1]
        )  # [H, Ev, D]
        values = folded(name, norm, value).reshape(embed.shape[1], -1, width)  # [D, G, Ev]
        scores = []
        for head in range(len(out)):
            whole = (
                embed @ values[:, head * values.shape[1] // len(out)] @ out[head] @ unembed
            )  # V x V
            eigenvalues = np.linalg.eigvals(whole)
            scores.append(eigenvalues.real.sum() / np.abs(eigenvalues).sum())
        found[site] = np.array(scores)
    return found


def read(model: Any, **options: Any) -> Any:
    batches = [
        {"input_ids": torch.randint(2, 12, (1, 9), generator=torch.Generator().manual_seed(0))}
    ]
    return multihead.read(
        model, batches, special_ids=set(), probe=False, statistics="copying", **options
    )


@pytest.mark.parametrize(
    "family",
    [
        *(BY_NAME[n] for n in ("llama", "gpt2", "gpt_neox", "qwen3", "phi3", "gpt_oss")),
        QWEN2,
        PHI,
        GEMMA,
    ],
    ids=lambda family: family.name,
)
def test_copying_is_of_the_whole_matrix(family: Family) -> None:
    """gpt2 takes 32 positions at once and is 48 wide: its W_V comes in two runs."""
    model = model_of(family)
    table = read(model)
    got = table.value("copying")
    assert (np.abs(got) < 0.999).any() and np.ptp(got) > 0.1
    for site, want in by_hand(family, model).items():
        mine = [n for n, head in enumerate(table.heads) if head.site == site]
        np.testing.assert_allclose(got[mine], want, rtol=1e-4, atol=1e-5)
    assert table.count("copying").all()


@pytest.mark.parametrize(("limit", "runs"), [(64, 1), (12, 3), (5, 12)])
def test_few_positions_take_several_runs(limit: int, runs: int) -> None:
    model = small_llama()
    want = multihead.read(
        model, [{"input_ids": IDS[:, :4]}], probe=False, statistics="copying"
    ).value("copying")
    model.config.max_position_embeddings = limit
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda m, a: seen.append(a[0].shape[1])
    )
    got = multihead.read(
        model, [{"input_ids": IDS[:, :4]}], probe=False, statistics="copying"
    ).value("copying")
    handle.remove()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len([n for n in seen if n != 4]) == runs
    assert max(seen) <= limit


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_that_copies_and_one_that_suppresses(bias: bool) -> None:
    """W_V W_O is the identity on the head's part of the stream, or its negation."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
        head_dim=8,
        tie_word_embeddings=True,
        attention_bias=bias,
    )
    model = tf.LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight.data.copy_(torch.eye(24))
    attention.o_proj.weight.data.copy_(
        torch.diag(torch.tensor([1.0] * 8 + [-1.0] * 8 + [1.0] * 4 + [-1.0] * 4))
    )
    if bias:
        attention.v_proj.bias.data.normal_()
        attention.o_proj.bias.data.normal_()
    table = read(model)
    copies, suppresses, both = table.value("copying")
    assert copies == pytest.approx(1, abs=1e-6)
    assert suppresses == pytest.approx(-1, abs=1e-6)
    assert abs(both) < 0.9
    np.testing.assert_allclose(
        table.value("entropy"),
        multihead.read(
            model,
            [
                {
                    "input_ids": torch.randint(
                        2, 12, (1, 9), generator=torch.Generator().manual_seed(0)
                    )
                }
            ],
            special_ids=set(),
            probe=False,
        ).value("entropy"),
    )


def test_nothing_of_the_model_is_left_changed_and_nothing_is_counted() -> None:
    model = small_llama()
    want = {n: p.clone() for n, p in model.named_parameters()}
    logits = model(IDS).logits
    plain = multihead.read(model, [{"input_ids": IDS}], probe=False)
    table = multihead.read(model, [{"input_ids": IDS}], probe=False, statistics=["copying"])
    assert torch.equal(model(IDS).logits, logits)
    assert all(torch.equal(p, want[n]) for n, p in model.named_parameters())
    assert table.meta["tokens"] == plain.meta["tokens"]
    for column in plain.columns:
        np.testing.assert_array_equal(table.value(column), plain.value(column))


def test_in_bfloat16_nearly_the_same() -> None:
    model = small_llama()
    want, got = read(model).value("copying"), read(model.bfloat16()).value("copying")
    np.testing.assert_allclose(got, want, atol=0.05)


def test_a_fine_tuned_model_counts_as_it_acts() -> None:
    """A projection of another class that adds something of its own, as adapters do."""
    model = small_llama()
    attention = model.model.layers[0].self_attn
    more = 0.1 * torch.randn(8, 24, generator=torch.Generator().manual_seed(0))

    class Adapted(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + x @ more.T

    plain = attention.v_proj
    attention.v_proj = Adapted(plain)
    got = read(model).value("copying")
    attention.v_proj = plain
    plain.weight.data += more
    np.testing.assert_allclose(got, read(model).value("copying"), rtol=1e-4)


def bitnet() -> Any:
    return tf.BitNetForCausalLM(
        tf.BitNetConfig(**DECODER, num_attention_heads=6, num_key_value_heads=3)
    )


def olmo2() -> Any:
    return tf.Olmo2ForCausalLM(tf.Olmo2Config(**DECODER, num_attention_heads=4))


def bert() -> Any:
    sizes = dict(intermediate_size=40, num_hidden_layers=2, max_position_embeddings=32)
    return tf.BertForMaskedLM(
        tf.BertConfig(hidden_size=40, num_attention_heads=5, vocab_size=WORDS, **sizes)
    )


def gemma3n() -> Any:
    sizes = GROUPED | dict(
        num_kv_shared_layers=0, laurel_rank=4, altup_num_inputs=2, hidden_size_per_layer_input=8
    )
    words = dict(
        vocab_size_per_layer_input=WORDS,
        activation_sparsity_pattern=[0.0, 0.0],
        intermediate_size=[40, 40],
    )
    return tf.Gemma3nForCausalLM(
        tf.Gemma3nTextConfig(**sizes | words, layer_types=["full_attention"] * 2)
    )


def narrow_opt() -> Any:
    """Embeddings of another width than the stream, as OPT-350m has them."""
    sizes = dict(
        hidden_size=48,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return tf.OPTForCausalLM(tf.OPTConfig(word_embed_proj_dim=24, vocab_size=WORDS, **sizes, **BOS))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (BY_NAME["deepseek_v3"].make, "aren't linear"),
        (bitnet, "gate or norm"),
        (olmo2, "isn't added to the residual stream"),
        (bert, "causal"),
        (gemma3n, "soft cap|a factor"),
        (narrow_opt, "unembedding"),
        (BY_NAME["gemma2"].make, "soft cap"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_refused_with_a_reason(make: Any, why: str) -> None:
    family = Family(make.__name__, make, "")
    table = read(model_of(family))
    assert "copying" not in table.columns
    reasons = [
        table.reasons.get(f"{head.site} copying", table.reasons.get("copying", ""))
        for head in table.heads
    ]
    assert all(any(word in reason for word in why.split("|")) for reason in reasons), reasons


def test_a_value_that_is_normed_is_refused() -> None:
    """As in Gemma 4: the reading of values must be linear."""
    model = small_llama()
    attention = model.model.layers[1].self_attn
    attention.v_proj = torch.nn.Sequential(attention.v_proj, torch.nn.RMSNorm(8))
    table = read(model)
    assert table.count("copying").tolist() == [1, 1, 1, 0, 0, 0]
    assert "aren't linear" in table.reasons["model.layers.1.self_attn copying"]


def test_places_for_pictures_have_no_logits() -> None:
    """As in Mllama: more embeddings than logits."""
    model = small_llama()
    want = read(model).value("copying")
    weight = model.model.embed_tokens.weight.data
    model.model.embed_tokens = torch.nn.Embedding.from_pretrained(
        torch.cat([weight, torch.ones(3, 24)])
    )
    np.testing.assert_allclose(read(model).value("copying"), want)


def test_asked_for_an_unknown_one() -> None:
    with pytest.raises(
        ValueError,
        match=r"statistics='entropy': is always measured; expected some of copying, importance",
    ):
        multihead.read(small_llama(), [{"input_ids": IDS}], statistics="entropy")
    with pytest.raises(
        ValueError,
        match=r"statistics='copyng': did you mean 'copying'\? expected some of copying, importance",
    ):
        multihead.read(small_llama(), [{"input_ids": IDS}], statistics=["copyng"])
    table = multihead.read(
        small_llama(),
        [{"input_ids": batches_of(BY_NAME["llama"], "none")[0]["input_ids"]}],
        probe=False,
    )
    assert "only on request" in table.reasons["copying"]
