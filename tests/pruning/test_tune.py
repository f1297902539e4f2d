"""Tuning brings a changed model back towards the original, the same way for the same seed, whether
it was stopped or not.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from multihead import load_builtin
from multihead.data.sources import builtin_text
from multihead.io import ResumeFile
from multihead.models.site import find_sites
from multihead.pruning.gqa import share
from multihead.pruning.plan import Plan
from multihead.pruning.prune import prune
from multihead.pruning.tune import changed_sites, tune
from small import llama

BATCHES = [
    {"input_ids": torch.randint(3, 50, (1, 16), generator=torch.Generator().manual_seed(i))}
    for i in range(5)
]


def changed(model: Any) -> Any:
    """A copy whose second layer has lost half of what its values and queries were."""
    student = copy.deepcopy(model)
    attention: Any = find_sites(student)[1].module
    for name in ("q_proj", "v_proj"):
        getattr(attention, name).weight.data[::2] = 0
    return student


def tuned(model: Any, student: Any = None, **options: Any) -> tuple[Any, Any]:
    student = changed(model) if student is None else student
    given = {"steps": 6, "batch_size": 2} | options
    return student, tune(student, model, BATCHES, **given)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def test_only_the_changed_layers_projections_train() -> None:
    model = llama()
    before, start = weights(model), weights(changed(model))
    student, done = tuned(model)
    moved = {k for k, v in student.state_dict().items() if not torch.equal(v, start[k])}
    assert moved == {f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkvo"}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert len(done.losses) == 6 and done.tokens == 6 * 2 * 16
    assert all(p.requires_grad and p.grad is None for p in student.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_the_loss_falls_on_the_built_in_model_after_sharing() -> None:
    model, tokenizer = load_builtin()
    student = share(
        model, builtin_text(), tokenizer=tokenizer, num_kv_heads=2, layers=["1-2"], tokens=256
    ).model
    assert [site.label for site in changed_sites(student, model)] == ["L1", "L2"]
    done = tune(
        student, model, builtin_text() * 2, tokenizer=tokenizer, steps=12, batch_size=2, context=64
    )
    assert sum(done.losses[-3:]) < 0.7 * sum(done.losses[:3])


def test_the_seed_decides() -> None:
    model = llama()
    (one, first), (two, second), (other, third) = tuned(model), tuned(model), tuned(model, seed=1)
    assert same(one, two) and first == second
    assert not same(one, other) and first.losses != third.losses


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_a_tuning_that_was_stopped_goes_on_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    monkeypatch.setattr(ResumeFile, "is_due", lambda self: True)
    model, path = llama(), tmp_path / "progress"
    whole, losses = tuned(model)

    def kill(done: int, total: int, stage: str) -> None:
        if done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(model, resume=path, progress=kill)
    seen: list[int] = []
    resumed, after = tuned(
        model, resume=path, progress=lambda done, total, stage: seen.append(done)
    )
    assert seen == list(range(stop + 1, 7))
    assert same(whole, resumed) and after == losses
    again, more = tuned(model, resume=path)  # which is done
    assert same(whole, again) and more == losses
    assert [p.name for p in tmp_path.iterdir()] == ["progress"]


def test_progress_of_another_tuning_is_refused(tmp_path: Path) -> None:
    model, path = llama(), tmp_path / "progress"
    tuned(model, resume=path)
    with pytest.raises(
        ValueError,
        match=r"was written for another tuning .seed 0, now 3, steps 6, now 7\).*delete that file",
    ):
        tuned(model, resume=path, steps=7, seed=3)
    other = llama()
    other.lm_head.weight.data += 1
    with pytest.raises(ValueError, match=r"another tuning \(teacher "):
        tuned(other, resume=path)
    start = changed(model)  # another plan leaves weights of the same sizes
    find_sites(start)[1].module.q_proj.weight.data.mul_(1.01)
    with pytest.raises(ValueError, match=r"another tuning \(weights at the start "):
        tuned(model, start, resume=path)
    find_sites(again := changed(model))[1].module.q_proj.weight.data.mul_(
        1 + 1e-6
    )  # the same, made again
    tuned(model, again, resume=path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="is damaged or not a progress file"):
        tuned(model, resume=path)
    path.write_bytes(b"once upon a time")
    with pytest.raises(ValueError, match="is damaged or not a progress file"):
        tuned(model, resume=path)
    with pytest.raises(ValueError, match=r"folder .* doesn't exist"):
        tuned(model, resume=tmp_path / "no" / "progress")


def test_an_encoder_is_tuned_by_its_last_hidden_states() -> None:
    torch.manual_seed(0)
    config = tf.BertConfig(
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        vocab_size=50,
    )
    model = tf.BertModel(config).eval()
    student = copy.deepcopy(model)
    find_sites(student)[1].module.value.weight.data[::2] = 0
    start = weights(student)
    done = tune(student, model, BATCHES, steps=10, batch_size=2, learning_rate=5e-3)
    assert done.losses[-1] < done.losses[0]
    moved = {k for k, v in student.state_dict().items() if not torch.equal(v, start[k])}
    assert {k.rsplit("layer.1.attention.", 1)[-1] for k in moved} <= {
        f"{part}.{kind}"
        for part in ("self.query", "self.key", "self.value", "output.dense")
        for kind in ("weight", "bias")
    }


def test_half_precision_weights_move_by_steps_smaller_than_they_can_hold() -> None:
    model = llama().bfloat16()
    student = changed(model)
    start = weights(student)
    _, done = tuned(model, student, learning_rate=1e-5, steps=40)
    moved = (
        student.model.layers[1].self_attn.o_proj.weight
        != start["model.layers.1.self_attn.o_proj.weight"]
    ).sum()
    assert student.dtype == torch.bfloat16 and moved > 0 and len(done.losses) == 40


def test_texts_of_several_lengths_are_padded() -> None:
    model = llama()
    ragged = [{k: v[:, : 9 + i] for k, v in b.items()} for i, b in enumerate(BATCHES)]
    ragged = [b | {"attention_mask": torch.ones_like(b["input_ids"])} for b in ragged]
    student = changed(model)
    done = tune(student, model, ragged, steps=4, batch_size=5)
    alone = []
    for batch in ragged:
        student = changed(model)
        alone += tune(student, model, [batch], steps=1, batch_size=1).losses
    assert min(alone) < done.losses[0] < max(alone)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps=0: expected a whole number from 1 on"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: expected a number above 0"),
        (
            {"learning_rate": 1e30, "steps": 3},
            "loss is .*; tune with a smaller learning_rate than 1e\\+30",
        ),
        ({"layers": [7]}, "layers=7 names no layer"),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tuned(llama(), **options)


def test_the_same_model_leaves_nothing_to_tune() -> None:
    model = llama()
    assert not changed_sites(copy.deepcopy(model), model)
    with pytest.raises(ValueError, match="no layer of the student has attention that differs"):
        tune(copy.deepcopy(model), model, BATCHES, steps=1)
    named = tune(copy.deepcopy(model), model, BATCHES, steps=1, layers=["L1"])
    assert len(named.losses) == 1


def test_the_teacher_is_the_model_before() -> None:
    student, other = changed(llama()), llama()
    other.resize_token_embeddings(90)
    words = r"original model are logits \[32, 90\] .* of the other one logits \[32, 50\], so they"
    with pytest.raises(ValueError, match=words):
        tune(student, other, BATCHES, steps=1, batch_size=2)
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=64))
    with pytest.raises(ValueError, match=r"teacher \(GPT2LMHeadModel\) has none of the student's"):
        tune(student, gpt2, BATCHES, steps=1)


def test_layers_that_an_earlier_pruning_changed_do_not_train() -> None:
    model, tokenizer = load_builtin()
    text = builtin_text()

    def without(model: Any, *heads: str) -> Any:
        options: Any = {"tokenizer": tokenizer, "compensate": "none", "context": 64, "tokens": 256}
        return prune(model, text, remove=Plan(heads), **options).model

    first = without(model, "L0.H1")
    second = without(first, "L2.H1", "L3")  # nothing of L3 is left to train
    assert [site.label for site in changed_sites(second, first)] == ["L2"]
    assert [site.label for site in changed_sites(second, model)] == ["L0", "L2"]
    shared = share(
        first, text, tokenizer=tokenizer, num_kv_heads=1, method="mean", layers=["L1"], tokens=256
    ).model
    assert [site.label for site in changed_sites(shared, first)] == ["L1"]
    start = weights(second)
    tune(second, first, text, tokenizer=tokenizer, steps=2, batch_size=1, context=64)
    moved = {k for k, v in second.state_dict().items() if not torch.equal(v, start[k])}
    assert moved and all(".layers.2.self_attn." in name for name in moved)
    with pytest.raises(ValueError, match="nothing to tune"):
        tune(without(first, "L3"), first, text, tokenizer=tokenizer, steps=1, context=64)
