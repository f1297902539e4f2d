"""Fewer key/value heads: equal ones stay equal, changes of basis are found, and the rest is no
worse than pooling.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf

from data.test_tokenizing import small_tokenizer
from families import FAMILIES, model_of
from multihead.data.batch import Batch
from multihead.errors import MultiheadError
from multihead.models.site import Site, find_sites
from multihead.pruning.basis import align_heads, key_moments
from multihead.pruning.gqa import share
from multihead.pruning.grouping import _best_partition, _grown_partition
from multihead.pruning.layerwise import LayerwiseRunner, run_layerwise
from multihead.pruning.shared_heads import (
    METHODS,
    SharedHeads,
    SharingOptions,
    fit_shared_heads,
    write_shared_heads,
)
from multihead.pruning.shared_heads import _key_basis as key_basis_of
from pruning.sharing import share_weights

BATCHES = [
    {"input_ids": torch.randint(2, 12, (1, 24), generator=torch.Generator().manual_seed(seed))}
    for seed in range(4)
]
SMALL = dict(
    hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, vocab_size=17
)
MAKE = {
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**SMALL, head_dim=8, num_key_value_heads=4)
    ),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(**SMALL | {"hidden_size": 32}, rotary_pct=0.5)
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=24, n_head=4, n_layer=2, n_positions=32, vocab_size=17)
    ),
    "cohere": lambda: tf.CohereForCausalLM(
        tf.CohereConfig(**SMALL, num_key_value_heads=4, pad_token_id=0)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(
        tf.Qwen3Config(**SMALL, head_dim=8, num_key_value_heads=4)
    ),
}


def make(name: str, seed: int = 0) -> Any:
    """A small model without groups whose attention is far from even, with biases where the family
    has them.
    """
    torch.manual_seed(seed)
    model = MAKE[name]().eval()
    for key, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in key and "wte" not in key:
            weight.data = (
                torch.randn_like(weight) * 1.3 * (weight.shape[0 if "gpt2" in name else 1]) ** -0.5
            )
        elif key.endswith("bias"):
            weight.data = 0.2 * torch.randn_like(weight)
    return model


def held_at(model: Any, site: Site) -> Any:
    with run_layerwise(model, [Batch(b) for b in BATCHES], [site]) as runner:
        return runner.capture(site)


def copies(site: Site, of: list[int], turn: bool) -> None:
    """Gives each key/value head m the keys and values of head of[m]; turned and scaled, in a way
    that changes no output.
    """
    rows, shape = site.slices(), None
    generator = torch.Generator().manual_seed(5)
    k, v, w = (
        rows.k.weight()[of].clone(),
        rows.v.weight()[of].clone(),
        site.out_weight()[0].view(site.num_heads, site.head_dim, -1),
    )
    kb, vb = (None if r.bias() is None else r.bias()[of].clone() for r in (rows.k, rows.v))  # type: ignore[index]
    q, qb = rows.q.weight().clone(), rows.q.bias()
    qb = None if qb is None else qb.clone()
    w = w.clone()
    if turn:
        shape = SHAPES[type(site.module).__name__](site.head_dim)
        for m in range(len(of)):
            if of[m] == m:
                continue
            basis = (
                torch.linalg.qr(torch.randn(site.head_dim, site.head_dim, generator=generator))[0]
                * 1.7
            )
            v[m], w[m] = basis.T @ v[m], torch.linalg.inv(basis) @ w[m]
            vb = vb if vb is None else torch.cat([vb[:m], (vb[m] @ basis)[None], vb[m + 1 :]])
            pairs, free = shape
            turns = torch.zeros(site.head_dim, site.head_dim)
            for a, b in pairs:
                angle, scale = torch.rand(2, generator=generator) * torch.tensor(
                    [6.0, 0.0]
                ) + torch.tensor([0.0, 0.6])
                turns[a, a] = turns[b, b] = scale * angle.cos()
                turns[a, b], turns[b, a] = scale * angle.sin(), -scale * angle.sin()
            if free:
                turns[torch.tensor(free)[:, None], torch.tensor(free)] = (
                    0.6 * torch.linalg.qr(torch.randn(len(free), len(free), generator=generator))[0]
                )
            k[m], q[m] = turns.T @ k[m], torch.linalg.inv(turns) @ q[m]
            kb = kb if kb is None else torch.cat([kb[:m], (kb[m] @ turns)[None], kb[m + 1 :]])
            qb = (
                qb
                if qb is None
                else torch.cat([qb[:m], (qb[m] @ torch.linalg.inv(turns).T)[None], qb[m + 1 :]])
            )
    rows.q.put(q, qb)
    rows.k.put(k, kb)
    rows.v.put(v, vb)
    weight = site.out.weight.data if type(site.out).__name__ == "Conv1D" else site.out.weight.data.T
    weight.copy_(w.flatten(0, 1))


# Which numbers of a head turn together, and which are free: known of the family, not found by
# looking.
SHAPES: dict[str, Any] = {
    "LlamaAttention": lambda e: ([(i, i + e // 2) for i in range(e // 2)], []),
    "CohereAttention": lambda e: ([(2 * i, 2 * i + 1) for i in range(e // 2)], []),
    "GPTNeoXAttention": lambda e: (
        [(i, i + e // 4) for i in range(e // 4)],
        list(range(e // 2, e)),
    ),
    "GPT2Attention": lambda e: ([], list(range(e))),
}
TURNING = ("llama", "cohere", "gpt_neox", "gpt2")


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(**batch).logits for batch in BATCHES])


def one(site: Site, model: Any, n: int = 2, **options: Any) -> SharedHeads:
    with run_layerwise(model, [Batch(b) for b in BATCHES], [site]) as runner:
        return fit_shared_heads(site, n, lambda: runner.capture(site), SharingOptions(**options))


@pytest.mark.parametrize("name", TURNING)
def test_what_turns_together_is_found_by_looking(name: str) -> None:
    model = make(name)
    site = find_sites(model)[1]
    shape = key_basis_of(held_at(model, site))
    pairs, free = SHAPES[type(site.module).__name__](site.head_dim)
    assert [tuple(p) for p in shape.pairs.tolist()] == pairs and shape.free.tolist() == free


def test_keys_behind_a_norm_allow_no_change_of_basis() -> None:
    model = make("qwen3")
    site = find_sites(model)[0]
    assert key_basis_of(held_at(model, site)).is_fixed
    found = one(site, model, method="svd")  # keys are pooled then, values are not
    assert found.error < one(site, model, method="mean", refit=False).error


@pytest.mark.parametrize("name", TURNING)
@torch.no_grad()
def test_changes_of_basis_leave_the_output_as_it_is(name: str) -> None:
    model = make(name)
    site = find_sites(model)[0]
    before = outputs(model)
    held = held_at(model, site)
    shape, rows = key_basis_of(held), site.slices()
    w_out = site.out_weight()[0].double().view(site.num_heads, site.head_dim, -1)
    parts = [
        align_heads(moment.sum(0), 4).transpose(0, 1)
        for moment, _ in key_moments(held.calls, shape, range(4), range(4), w_out)
    ]
    turns = shape.to_matrix(parts, site.head_dim)
    assert (turns - torch.eye(site.head_dim)).abs().max() > 0.1
    back = torch.linalg.inv(turns)
    for r, maps in ((rows.k, turns), (rows.q, back.mT)):
        bias = r.bias()
        r.put(
            maps.mT @ r.weight().double(),
            None if bias is None else (bias.double()[:, None] @ maps)[:, 0],
        )
    torch.testing.assert_close(outputs(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TURNING)
@pytest.mark.parametrize("turn", [False, True])
def test_copies_of_one_head_share_without_loss(name: str, turn: bool) -> None:
    """Equal heads under every method; turned and scaled ones under those that align, and not under
    pooling.
    """
    model = make(name)
    site = find_sites(model)[0]
    copies(site, [0, 1, 0, 1], turn)
    before = outputs(model)
    for method in METHODS:
        found = one(site, model, method=method, refit=False)
        assert found.groups == ((0, 2), (1, 3)) and found.order == (0, 2, 1, 3)
        if turn and method not in ("svd", "aligned"):
            assert found.error > 0.05
            continue
        assert found.error < 1e-6, method
        changed = copy.deepcopy(model)
        write_shared_heads(find_sites(changed)[0], found)
        torch.testing.assert_close(outputs(changed), before, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", TURNING)
def test_aligned_is_no_worse_than_pooled_and_principal_no_worse_than_aligned(name: str) -> None:
    model = make(name, seed=3)
    site = find_sites(model)[1]
    methods = ("mean", "aligned", "svd")
    error = {
        (m, refit): one(site, model, method=m, refit=refit).error
        for m in methods
        for refit in (False, True)
    }
    assert error["svd", False] < error["aligned", False] < error["mean", False]
    assert error["svd", True] < error["mean", True]
    assert all(error[m, True] < error[m, False] for m in methods)


def test_neighbours_stand_together_and_similar_heads_find_each_other() -> None:
    model = make("llama")
    site = find_sites(model)[0]
    copies(site, [0, 0, 2, 0], True)
    assert one(site, model, choice="neighbours").groups == ((0, 1), (2, 3))
    model = make("llama")
    site = find_sites(model)[0]
    copies(site, [0, 1, 1, 0], True)
    assert one(site, model).groups == ((0, 3), (1, 2))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_moments_are_covariances_of_keys_within_rows(name: str) -> None:
    """Row by row, from the definition: weights half as the row reads, half even over the keys that
    it may read.
    """
    model = make(name)
    site = find_sites(model)[0]
    held = held_at(model, site)
    call, shape = held.calls[0], key_basis_of(held)
    w_out = site.out_weight()[0].double().view(4, site.head_dim, -1).detach()
    moment, query = key_moments([call], shape, [0, 2], [2], w_out[[2]])[0]
    q, k = (
        shape.to_blocks(call.q[0, 2])[0],
        shape.to_blocks(call.k[0, [0, 2]])[0],
    )  # [L, blocks, e], [2, S, blocks, e]
    scores = (call.q[0, 2] @ call.k[0, 2].T * call.scale).double()
    wanted, queries = torch.zeros_like(moment[0]), torch.zeros_like(query[0])
    for i in range(len(q)):
        p = 0.5 * scores[i, : i + 1].softmax(-1) + 0.5 / (i + 1)
        values = call.v[0, 2, : i + 1].double() @ w_out[2]
        spread = (p[:, None] * (values - p @ values).square()).sum()
        for block in range(q.shape[1]):
            keys = k[:, : i + 1, block].transpose(0, 1).flatten(1).to(moment.dtype)
            keys = keys - (p[:, None] * keys).sum(0)
            size = q[i, block].abs().square().sum() if query.is_complex() else 1.0
            wanted[block] += size * spread * (keys.mH @ (p[:, None] * keys))
            queries[block] += spread * q[i, block][:, None].conj() @ q[i, block][None]
    torch.testing.assert_close(moment[0], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    if not query.is_complex():
        torch.testing.assert_close(
            query[0], queries, rtol=1e-4, atol=1e-4 * float(queries.abs().max())
        )


@pytest.mark.parametrize("size", [2, 3])
def test_heads_that_are_many_are_grouped_as_well_as_by_trying_all(size: int) -> None:
    label = torch.arange(12) % (12 // size)
    noise = torch.rand(12, 12, generator=torch.Generator().manual_seed(2)) * 0.3
    apart = (label[:, None] != label).double() + noise + noise.T
    apart.fill_diagonal_(0)
    wanted = tuple(tuple((label == i).nonzero().flatten().tolist()) for i in range(12 // size))
    assert _best_partition(apart, size) == wanted
    assert _grown_partition(apart, size) == wanted


@pytest.mark.parametrize("bias", [False, True])
def test_repeated_heads_compute_what_a_grouped_model_does(bias: bool) -> None:
    torch.manual_seed(1)
    options: Any = dict(**SMALL, head_dim=8, attention_bias=bias)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**options, num_key_value_heads=4)).eval()
    for p in model.parameters():
        p.data = p.data * 8 if p.ndim == 2 else p.data + 0.1 * torch.randn_like(p)
    grouped = tf.LlamaForCausalLM(tf.LlamaConfig(**options, num_key_value_heads=2)).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = share_weights(model, 2, BATCHES)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [f.label for f in found] == ["L0", "L1"] and found[0].reads == (0, 0, 1, 1)
    grouped.load_state_dict({k: v for k, v in before.items() if "self_attn" not in k}, strict=False)
    for site, small, f in zip(find_sites(model), find_sites(grouped), found, strict=True):
        write_shared_heads(site, f)
        rows = small.slices()
        rows.q.put(f.q, f.q_bias)
        rows.k.put(f.k, f.k_bias)
        rows.v.put(f.v, f.v_bias)
        small.out.weight.data.copy_(f.out.flatten(0, 1).T)
        if bias:
            small.out.bias.data.copy_(f.out_bias)
    torch.testing.assert_close(outputs(grouped), outputs(model), rtol=1e-4, atol=1e-4)
    assert float((outputs(model) - outputs(grouped)).abs().max()) < 1e-3


def test_the_error_told_is_that_of_the_site() -> None:
    model = make("gpt2")
    site = find_sites(model)[0]
    found = one(site, model)

    def updates() -> torch.Tensor:
        kept: list[torch.Tensor] = []
        handle = site.out.register_forward_hook(lambda m, a, y: kept.append(y))
        outputs(model)
        handle.remove()
        return torch.cat(kept) - bias

    bias = site.out_weight()[1]
    before = updates()
    write_shared_heads(site, found)
    rest = float((updates() - before).square().sum() / before.square().sum())
    assert rest == pytest.approx(found.error, rel=0.01)


def test_blocks_run_one_by_one_are_the_model() -> None:
    model = make("llama")
    sites = find_sites(model)
    with run_layerwise(model, [Batch(b) for b in BATCHES], sites) as runner:
        assert len(runner.blocks) == 2
        stepped = [runner.capture(site) for site in sites]
        plain = LayerwiseRunner(model, [Batch(b) for b in BATCHES], sites[1:])
        assert not plain.blocks
        whole = plain.capture(sites[1])
    for x, y in zip(stepped[1].entered, whole.entered, strict=True):
        torch.testing.assert_close(x, y)


def test_later_layers_are_calibrated_on_what_earlier_ones_give() -> None:
    model = make("llama")
    first, second = share_weights(model, 1, BATCHES)
    alone = share_weights(model, 1, BATCHES, layers=[1])[0]
    assert not torch.allclose(alone.v, second.v)
    write_shared_heads(find_sites(model)[0], first)
    torch.testing.assert_close(
        share_weights(model, 1, BATCHES, layers=[1])[0].v, second.v, rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    "family",
    [f for f in FAMILIES if f.name in ("bert", "llama", "phi3", "t5")],
    ids=lambda f: f.name,
)
def test_families(family: Any) -> None:
    """Fused, grouped already, encoders, cross-attention: every site can go to one key/value head,
    and the model still runs.
    """
    model = copy.deepcopy(model_of(family))
    batches = [dict(b) for b in BATCHES[:2]]
    if family.inputs == "both":
        batches = [b | {"decoder_input_ids": b["input_ids"][:, :9]} for b in batches]
    found = share_weights(model, 1, batches)
    pooled = share_weights(model, 1, batches, method="mean", refit=False)
    assert len(found) == len(find_sites(model))
    assert found[0].error < pooled[0].error
    for site, f in zip(find_sites(model), found, strict=True):
        write_shared_heads(site, f)
        assert f.k.shape[0] == 1 and 0 <= f.error < 1.2


def test_plain_sums_may_have_other_weights() -> None:
    """A baseline that keeps one head of each group is a sum with one weight of 1."""
    model = make("llama")
    site = find_sites(model)[0]
    first = one(
        site,
        model,
        method="mean",
        choice="neighbours",
        refit=False,
        pool=lambda n: torch.eye(n, dtype=torch.float64)[0],
    )
    torch.testing.assert_close(first.k, site.slices().k.weight().double()[[0, 2]])
    torch.testing.assert_close(first.v, site.slices().v.weight().double()[[0, 2]])


@pytest.mark.parametrize(
    ("num_kv_heads", "options", "words"),
    [
        (
            3,
            {},
            "num_kv_heads=3: model.layers.0.self_attn has 4 key/value heads.*expected one of 1, 2,"
            " 4",
        ),
        (0, {}, "num_kv_heads=0"),
        (2, {"method": "best"}, "method='best': expected one of svd, aligned, mean"),
        (2, {"method": "first"}, "method='first': expected one of svd, aligned, mean"),
        (2, {"choice": "near"}, "choice='near': expected one of similar, neighbours"),
        (2, {"layers": [7]}, "layers: 7 names no layer; expected labels, .* of L0 to L1"),
    ],
)
def test_bad_input(num_kv_heads: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(MultiheadError, match=words):
        share_weights(make("llama"), num_kv_heads, BATCHES, **options)


@pytest.mark.parametrize(
    ("texts", "tokenizer", "words"),
    [
        ([], small_tokenizer(), r"texts=\[\] is empty: expected at least one text"),
        ("it was", None, "tokenizer=None: this model came without one, so it can't read text"),
        ("a b c", small_tokenizer(), "texts holds 5 tokens, too few to fit anything on"),
    ],
)
def test_bad_texts(texts: Any, tokenizer: Any, words: str) -> None:
    with pytest.raises(MultiheadError, match=words):
        share(make("llama"), texts, tokenizer=tokenizer, num_kv_heads=2)


def test_latent_keys_are_refused() -> None:
    family = next(f for f in FAMILIES if f.name == "deepseek_v3")
    with pytest.raises(ValueError, match="latent vector that all heads share already"):
        share_weights(copy.deepcopy(model_of(family)), 1, BATCHES)
