"""`importance` against gates that autograd differentiates, `effect` against the losses that anybody
would compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import multihead
from data.test_tokenizing import small_tokenizer
from families import BOS, FAMILIES, WORDS, Family, batches_of, is_cross, model_of
from multihead.data.windows import cut_windows
from multihead.models.site import find_sites
from multihead.reader.statistics.gradient import run_with_importance
from oracles.statistics import Floats
from small import IDS
from small import llama as small_llama

Batches = list[dict[str, torch.Tensor]]
BY_NAME = {family.name: family for family in FAMILIES}


def t5() -> Any:
    sizes = dict(
        num_layers=2, num_heads=5, d_ff=40, vocab_size=WORDS, relative_attention_num_buckets=8
    )
    return tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=48, d_kv=6, decoder_start_token_id=0, **sizes, **BOS)
    )


def bart() -> Any:
    sizes = dict(
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_position_embeddings=32,
    )
    heads = dict(encoder_attention_heads=6, decoder_attention_heads=4, decoder_start_token_id=0)
    return tf.BartForConditionalGeneration(
        tf.BartConfig(d_model=48, vocab_size=WORDS, **sizes, **heads, **BOS)
    )


def bert() -> Any:
    sizes = dict(intermediate_size=40, num_hidden_layers=2, max_position_embeddings=32)
    return tf.BertForMaskedLM(
        tf.BertConfig(hidden_size=40, num_attention_heads=5, vocab_size=WORDS, **sizes)
    )


T5, BART = Family("t5lm", t5, "o", "both"), Family("bartlm", bart, "out_proj", "both")
BERT = Family("bertlm", bert, "", "encoder")
CASES = [
    (BY_NAME["llama"], "none"),
    (BY_NAME["llama"], "left"),
    (BY_NAME["gpt2"], "right"),
    (BY_NAME["gpt_oss"], "left"),
    (BY_NAME["gemma2"], "none"),
    (T5, "right"),
    (BART, "left"),
    (BERT, "right"),
]


def given(family: Family, padding: str) -> Batches:
    """Batches with labels where no token comes next by itself."""
    batches = batches_of(family, padding)
    if family is not BERT:
        return batches
    labels = [
        batch["input_ids"].masked_fill(torch.arange(batch["input_ids"].shape[1]) % 3 != 1, -100)
        for batch in batches
    ]
    return [
        batch
        | {
            "labels": label.masked_fill(
                batch.get("attention_mask", torch.ones_like(label)) == 0, -100
            )
        }
        for batch, label in zip(batches, labels, strict=True)
    ]


def text(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    prefix = "decoder_" if "decoder_input_ids" in batch else ""
    ids = batch[f"{prefix}input_ids"]
    return ids, batch.get(f"{prefix}attention_mask", torch.ones_like(ids)).bool()


def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The sum of -log p over the tokens, one at a time, and how many they are."""
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.log_softmax(-1)
    ids, real = text(batch)
    total, count = logits.new_zeros(()), 0
    for b in range(ids.shape[0]):
        for i in range(ids.shape[1]):
            if "labels" in batch:
                target = int(batch["labels"][b, i])
            else:
                target = (
                    int(ids[b, i + 1])
                    if i + 1 < ids.shape[1] and real[b, i] and real[b, i + 1]
                    else -100
                )
            if target != -100:
                total, count = total - logits[b, i, target], count + 1
    return total, count


def gates(family: Family, batches: Batches) -> tuple[Any, dict[str, Floats]]:
    """abs(d loss / d gate) of each head and row, the gate being 1; the mean over real rows, in
    float64.
    """
    model = family.make().eval()
    model.load_state_dict(model_of(family).state_dict())
    model = model if family.name == "gpt_oss" else model.double()  # whose experts know no float64
    found: dict[str, Floats] = {}
    for batch in batches:
        made: dict[str, torch.Tensor] = {}
        handles = []
        for site in find_sites(model):

            def hook(module: nn.Module, args: Any, site: Any = site, made: Any = made) -> Any:
                x = args[0].unflatten(-1, (site.num_heads, site.head_dim))
                made[site.name] = torch.ones(*x.shape[:3], 1, dtype=x.dtype, requires_grad=True)
                return ((x * made[site.name]).flatten(-2),)

            handles.append(site.out.register_forward_pre_hook(hook))
        loss(model, batch)[0].backward()
        for handle in handles:
            handle.remove()
        for name, gate in made.items():
            assert gate.grad is not None
            mask = (
                text(batch)[1]
                if "decoder" in name or "decoder_input_ids" not in batch
                else batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            )
            rows = gate.grad[..., 0].abs()[mask].numpy()
            found[name] = np.concatenate([found.get(name, rows[:0]), rows])
    return model, {name: rows.mean(axis=0) for name, rows in found.items()}


def by_site(table: Any, column: str) -> dict[str, Floats]:
    found: dict[str, list[float]] = {}
    for head, value in zip(table.heads, table.value(column), strict=True):
        found.setdefault(head.site, []).append(value)
    return {site: np.array(values) for site, values in found.items()}


@pytest.mark.parametrize(("family", "padding"), CASES, ids=lambda v: getattr(v, "name", v))
def test_importance_is_the_gates_gradient(family: Family, padding: str) -> None:
    """In float32 under frozen parameters, and in float64 with parameters that ask for gradients,
    which stay as they are.
    """
    batches = given(family, padding)
    double, want = gates(family, batches)
    double.zero_grad()
    double.requires_grad_(True)
    for model, exact in (
        (model_of(family), 3e-4),
        (double, 3e-4 if family.name == "gpt_oss" else 1e-6),
    ):
        table = multihead.read(
            model, batches, special_ids=set(), probe=False, statistics=["importance"]
        )
        for site, got in by_site(table, "importance").items():
            np.testing.assert_allclose(got, want[site], rtol=exact, atol=exact * want[site].max())
        assert all(p.grad is None for p in model.parameters())


def test_importance_leaves_gradients_and_what_asks_for_them_alone() -> None:
    model = small_llama()
    model.model.layers[0].requires_grad_(False)
    model(IDS, labels=IDS).loss.backward()
    want = {
        n: (p.requires_grad, None if p.grad is None else p.grad.clone())
        for n, p in model.named_parameters()
    }
    for outside in (torch.enable_grad, torch.no_grad):
        with outside():
            table = multihead.read(
                model, [{"input_ids": IDS}], probe=False, statistics=["importance"]
            )
        assert np.isfinite(table.value("importance")).all()
        for name, parameter in model.named_parameters():
            asks, grad = want[name]
            assert parameter.requires_grad == asks
            assert (grad is None and parameter.grad is None) or torch.equal(parameter.grad, grad)


def test_importance_under_inference_mode() -> None:
    model = small_llama()
    want = multihead.read(
        model, [{"input_ids": IDS}], probe=False, statistics=["importance", "effect"]
    )
    with torch.inference_mode():
        got = multihead.read(
            model, [{"input_ids": IDS.clone()}], probe=False, statistics=["importance", "effect"]
        )
    for column in ("importance", "effect"):
        np.testing.assert_allclose(got.value(column), want.value(column), rtol=1e-6)


def test_importance_of_texts_one_by_one_is_that_of_all() -> None:
    """A sum of losses, not their mean: the number doesn't hang on how texts are put together."""
    model = small_llama()
    whole = multihead.read(model, [{"input_ids": IDS}], probe=False, statistics=["importance"])
    parts = sum(
        multihead.read(
            model, [{"input_ids": IDS[b : b + 1]}], probe=False, statistics=["importance"]
        )
        for b in range(2)
    )
    np.testing.assert_allclose(whole.value("importance"), parts.value("importance"), rtol=1e-5)
    np.testing.assert_array_equal(whole.count("importance"), parts.count("importance"))


@pytest.mark.parametrize("to", ["zero", "mean"])
@pytest.mark.parametrize(
    ("family", "padding"),
    [CASES[1], CASES[2], (T5, "none"), (BERT, "right")],
    ids=lambda v: getattr(v, "name", v),
)
def test_effect_is_the_loss_without(family: Family, padding: str, to: str) -> None:
    batches = given(family, padding)
    model = model_of(family)
    column = "effect" if to == "zero" else "effect_mean"
    table = multihead.read(model, batches, special_ids=set(), probe=False, statistics=column)
    with torch.no_grad():
        base = [loss(model, batch) for batch in batches]
        tokens = sum(count for _, count in base)
        assert set(table.count(column).tolist()) == {tokens}
        bare = [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]
        for number in range(0, len(table.heads), 3):
            with multihead.ablate_heads(model, [table.heads[number].head], mode=to, over=bare):
                without = sum(float(loss(model, batch)[0]) for batch in batches)
            want = (without - sum(float(total) for total, _ in base)) / tokens
            assert table.value(column)[number] == pytest.approx(want, rel=1e-3, abs=2e-5)


def test_labels_say_which_tokens_count() -> None:
    model = small_llama()
    labels = IDS.clone()
    labels[:, :7] = -100
    table = multihead.read(
        model,
        [{"input_ids": IDS, "labels": labels}],
        probe=False,
        statistics=["effect", "importance"],
    )
    assert set(table.count("effect").tolist()) == {10}
    with torch.no_grad():
        want = float(model(IDS, labels=labels).loss)
        with multihead.ablate_heads(model, "L1.H2"):
            assert table.value("effect")[5] == pytest.approx(
                float(model(IDS, labels=labels).loss) - want, rel=1e-3, abs=1e-6
            )
    # of the last layer no row before the first label's matters
    rows = multihead.read(model, [{"input_ids": IDS[:, 6:]}], probe=False, statistics="importance")
    assert not np.allclose(rows.value("importance"), table.value("importance"))
    nothing = multihead.read(
        model,
        [{"input_ids": IDS, "labels": torch.full_like(IDS, -100)}],
        probe=False,
        statistics=["effect", "importance"],
    )
    assert not nothing.count("effect").any()
    assert "tokens with a loss" in nothing.reasons["effect"]
    assert not nothing.value("importance").any()


def test_an_encoder_decoder_may_be_given_labels_alone() -> None:
    model, (batch, _) = model_of(T5), batches_of(T5, "none")
    labels = batch["input_ids"][:, :8].contiguous()
    names = ["importance", "effect", "effect_mean"]
    got = multihead.read(
        model, [{"input_ids": batch["input_ids"], "labels": labels}], probe=False, statistics=names
    )
    ids = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=0)
    want = multihead.read(
        model,
        [{"input_ids": batch["input_ids"], "decoder_input_ids": ids, "labels": labels}],
        probe=False,
        statistics=names,
    )
    assert set(got.count("effect").tolist()) == {labels.numel()}
    for name in names:
        np.testing.assert_allclose(got.value(name), want.value(name), rtol=1e-5, atol=1e-7)


def test_packed_texts_are_no_targets_of_one_another() -> None:
    model = small_llama()
    packed = {
        "input_ids": IDS,
        "position_ids": torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1),
    }
    table = multihead.read(model, [packed], probe=False, statistics=["effect", "importance"])
    apart = sum(
        multihead.read(
            model, [{"input_ids": ids}], probe=False, statistics=["effect", "importance"]
        )
        for ids in (IDS[:, :7], IDS[:, 7:])
    )
    for column in ("effect", "importance", "logit", "entropy"):
        np.testing.assert_array_equal(table.count(column), apart.count(column))
        np.testing.assert_allclose(table.value(column), apart.value(column), rtol=1e-4, atol=1e-6)


def test_heads_that_are_off_or_gated_already() -> None:
    model = small_llama()
    with multihead.ablate_heads(model, ["L0.H1"]):
        table = multihead.read(
            model, [{"input_ids": IDS}], probe=False, statistics=["importance", "effect"]
        )
    assert table.value("importance")[1] == table.value("effect")[1] == 0
    assert (table.value("importance")[[0, 2, 3, 4, 5]] > 0).all()


def bare() -> Any:
    return small_llama().model


def vit() -> Any:
    sizes = dict(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=3,
        image_size=16,
        patch_size=4,
    )
    return tf.ViTForImageClassification(tf.ViTConfig(**sizes))


@pytest.mark.parametrize("names", ["importance", "effect", "effect_mean"])
@pytest.mark.parametrize(
    ("make", "batch", "words"),
    [
        (
            bare,
            {"input_ids": IDS},
            "LlamaModel gives no logits for each token.*AutoModelForCausalLM.*leave out",
        ),
        (
            vit,
            {"pixel_values": torch.zeros(1, 3, 16, 16)},
            "ViTForImageClassification gives no logits for each token",
        ),
        (
            bert,
            {"input_ids": IDS % WORDS},
            "BertForMaskedLM doesn't define which token comes next.*labels",
        ),
        (small_llama, {"input_ids": IDS, "labels": IDS[:, :5]}, r"labels \[2, 5\].*\[2, 12\]"),
        (
            small_llama,
            {"input_ids": IDS, "labels": torch.tensor([1, 0])},
            r"labels \[2\].*\[2, 12\]",
        ),
    ],
)
def test_refused_in_words(names: str, make: Any, batch: Any, words: str) -> None:
    model = make().eval()
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    with pytest.raises(ValueError, match=words):
        multihead.read(model, [batch], probe=False, statistics=[names])
    assert sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()) == hooks
    multihead.read(
        model, [{k: v for k, v in batch.items() if k != "labels"}], probe=False
    )  # and nothing is left behind


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("importance",),
        ("effect",),
        ("effect", "effect_mean"),
        ("copying", "importance", "effect", "effect_mean"),
    ],
)
@pytest.mark.parametrize("probe", [False, True])
def test_progress_ends_at_its_total(names: Any, probe: bool) -> None:
    seen: list[tuple[int, int]] = []
    multihead.read(
        small_llama(),
        [{"input_ids": IDS}, {"input_ids": IDS[:1]}],
        probe=probe,
        statistics=names,
        progress=lambda done, total, stage: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))  # the probe isn't counted
    assert {total for _, total in seen} == {len(seen)}


def test_progress_where_a_site_runs_twice_or_never() -> None:
    sizes = dict(
        intermediate_size=40, num_hidden_layers=3, max_position_embeddings=32, embedding_size=40
    )
    twice = tf.AlbertModel(
        tf.AlbertConfig(hidden_size=40, num_attention_heads=5, vocab_size=WORDS, **sizes)
    ).eval()
    never = tf.BartForCausalLM(bart().config).eval()
    assert any(is_cross(site.name) for site in find_sites(never))
    for model in (twice, never):
        seen: list[tuple[int, int]] = []
        multihead.read(
            model,
            [{"input_ids": IDS % WORDS}],
            probe=False,
            progress=lambda done, total, stage, seen=seen: seen.append((done, total)),
        )
        assert seen[-1] == (len(find_sites(model)),) * 2
        assert all(done <= total for done, total in seen)


def test_an_iterator_of_batches_and_every_request() -> None:
    batches = [{"input_ids": IDS}, {"input_ids": IDS[:1, :5]}]
    names = ["importance", "effect", "effect_mean"]
    model = small_llama()
    want = multihead.read(model, batches, probe=False, statistics=names)
    got = multihead.read(model, iter(batches), probe=False, statistics=names)
    for name in names:
        np.testing.assert_array_equal(got.value(name), want.value(name))


def test_a_pass_that_failed_leaves_no_graph() -> None:
    model = small_llama()
    hook = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with multihead.reading(model) as session:
        with pytest.raises(ZeroDivisionError):
            run_with_importance(session, {"input_ids": IDS}, lambda batch: model(**batch))
        hook.remove()
        model(IDS)
        assert not session._reader._pending


def test_no_weights_are_kept_for_the_way_back() -> None:
    """A graph of the operator's own: nothing of rows x keys is saved, with `importance` or in a
    training step under reading.
    """
    ids = torch.randint(3, 50, (1, 61), generator=torch.Generator().manual_seed(0))
    shapes: list[torch.Size] = []
    model = small_llama()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: shapes.append(x.shape) or x, lambda x: x
    ):
        multihead.read(model, [{"input_ids": ids}], probe=False, statistics="importance")
        with multihead.reading(model, verify=False):
            model(ids, labels=ids).loss.backward()
    assert shapes
    assert not [
        shape for shape in shapes if shape[-3:] == (3, 61, 61)
    ]  # of every head: a mask for all of them may be


def test_sites_that_were_not_reached_have_no_effect_to_tell() -> None:
    never = tf.BartForCausalLM(bart().config).eval()
    table = multihead.read(
        never, [{"input_ids": IDS % WORDS}], probe=False, statistics=["effect", "importance"]
    )
    cross = np.array([is_cross(head.site) for head in table.heads])
    for column in ("effect", "importance"):
        assert not table.count(column)[cross].any()
        assert table.count(column)[~cross].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = small_llama()
    names = ["importance", "effect", "copying"]
    want = multihead.read(model, [{"input_ids": IDS}], probe=False, statistics=names)
    got = multihead.read(model.to(dtype), [{"input_ids": IDS}], probe=False, statistics=names)
    for name in ("importance", "copying", "logit", "received"):
        largest = np.nanmax(np.abs(want.value(name)), initial=0.1)
        np.testing.assert_allclose(got.value(name), want.value(name), atol=0.08 * largest)


def test_one_token() -> None:
    model = small_llama()
    names = ["importance", "effect", "effect_mean", "copying"]
    table = multihead.read(model, [{"input_ids": IDS[:1, :1]}], probe=False, statistics=names)
    assert not table.value("importance").any()  # no token comes next, so no loss
    assert not table.count("effect").any()
    assert all(
        np.isfinite(v).all() or np.isnan(v).all() for v in (table.value(c) for c in table.columns)
    )


@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "none"])
@pytest.mark.parametrize("stride", [None, 2, 1])
def test_in_windows_each_token_of_the_text_has_one_loss_and_no_other_has(
    special: bool, stride: int | None
) -> None:
    """Not the special tokens that close a window in the middle of a text; and the first token of a
    window is one of the text.
    """
    model, tokenizer = small_llama(), small_tokenizer(special=special, pad_token="?")
    text = "a b c a c b a a b c b b a"
    ids = tokenizer(text)["input_ids"]
    before, after = (1, 1) if special else (0, 0)
    found = cut_windows(ids, before, after, 6, stride or 6 - before - after)

    def loss(off: list[str]) -> tuple[float, int]:
        total, number = 0.0, 0
        for row, first, stop, *_ in found:
            with torch.no_grad(), multihead.ablate_heads(model, off):
                logs = model(torch.tensor([row])).logits[0].double().log_softmax(-1)
            for target in range(max(first, 1), stop):
                total, number = total - float(logs[target - 1, row[target]]), number + 1
        return total, number

    asked = dict(context=6, stride=stride, statistics=["effect", "effect_mean"], probe=False)
    read = {
        n: multihead.read(model, text, tokenizer=tokenizer, batch_size=n, **asked) for n in (1, 4)
    }
    base, number = loss([])
    for table in read.values():
        for n, head in enumerate(table.heads):
            assert table.value("effect")[n] == pytest.approx(
                (loss([head.head])[0] - base) / number, rel=1e-3, abs=1e-6
            )
        assert set(table.count("effect")) == set(table.count("effect_mean")) == {number}
    starts = (
        1 if special or stride else len(found)
    )  # without a token before it there is nothing to tell it from
    assert number == len(ids) - starts
