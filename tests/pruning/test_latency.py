"""Cache bytes against what the shapes say; times against a clock that is made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from families import FAMILIES, model_of
from multihead.pruning import latency as module
from multihead.pruning.latency import measure_cache, measure_latencies, measure_latency
from small import llama

BY_NAME = {family.name: family for family in FAMILIES}


class Clock:
    """Every call of a model takes as long as it is said to, and nothing else takes any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.order, self.slower = 0.0, [], 1.0
        monkeypatch.setattr(module, "timer", lambda: self.now)

    def model(self, name: str, prefill: float, step: float) -> nn.Module:
        def called(model: Any, args: Any, given: Any) -> None:
            length = given["input_ids"].shape[1]
            self.now += self.slower * (prefill if length > 1 else step)
            if length > 1:
                self.order.append(name)
                self.slower *= (
                    1.5  # than each pass, the next one, as other work comes to the machine
                )

        model = llama()
        model.register_forward_pre_hook(called, with_kwargs=True)
        return model


def test_models_take_turns_and_ratios_are_those_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    models = {"base": clock.model("base", 3, 1), "small": clock.model("small", 1.5, 0.25)}
    found = measure_latencies(models, batch=2, tokens=10, repeats=4)
    assert clock.order == ["small", "base"] + ["base", "small", "small", "base"] * 2
    assert (found["base"].prefill_ratio, found["base"].step_ratio) == (1, 1)
    # each turn's second model meets a machine that is 1.5 times slower: 0.75 and 0.33 in turn
    assert found["small"].prefill_ratio == pytest.approx((0.5 * 1.5 + 0.5 / 1.5) / 2)
    assert found["small"].step_ratio == pytest.approx((0.25 * 1.5 + 0.25 / 1.5) / 2)


def test_medians_are_seconds_of_a_pass_and_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    model = clock.model("one", 3, 1)
    monkeypatch.setattr(clock, "order", [])
    found = measure_latency(model, tokens=10, repeats=3)
    assert found.prefill == pytest.approx(
        3 * 1.5**2
    )  # the untimed pass, three timed ones: the middle one
    assert found.step == pytest.approx(1.5**3)


def test_what_is_timed_is_a_pass_and_steps_from_its_cache() -> None:
    calls: list[tuple[int, int]] = []
    model = llama()

    def called(module: Any, args: Any, given: Any) -> None:
        cache = given.get("cache", given.get("past_key_values"))
        calls.append((given["input_ids"].shape[1], 0 if cache is None else cache.get_seq_length()))

    model.register_forward_pre_hook(called, with_kwargs=True)
    found = measure_latency(model.train(), batch=3, tokens=20, repeats=1)
    assert calls == [(20, 0), *((1, 20 + n) for n in range(8))] * 2
    assert found.prefill > 0 and found.step is not None and found.step > 0 and model.training


def test_an_encoder_has_no_steps_and_no_cache() -> None:
    bert = model_of(BY_NAME["bert"])
    found = measure_latencies({"a": bert, "b": bert}, tokens=10, repeats=1)
    assert (
        found["a"].step is None and found["b"].step_ratio is None and found["b"].prefill_ratio > 0
    )
    with pytest.raises(ValueError, match="BertModel returns no KV cache"):
        measure_cache(bert, 10)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_reads_on_both_sides_and_steps_in_its_decoder(name: str) -> None:
    calls: list[tuple[int, int]] = []
    model = model_of(BY_NAME[name])

    def called(module: Any, args: Any, given: Any) -> None:
        source = given.get("input_ids")
        calls.append(
            (0 if source is None else source.shape[1], given["decoder_input_ids"].shape[1])
        )

    model.register_forward_pre_hook(called, with_kwargs=True)
    found = measure_latency(model, tokens=10, repeats=1)
    assert calls == [(10, 10), *[(0, 1)] * 8] * 2 and found.step is not None


def test_a_classifier_of_bart_ends_its_text_and_has_no_steps() -> None:
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    config = tf.BartConfig(d_model=8, vocab_size=20, eos_token_id=2, **sizes, **heads)
    found = measure_latency(tf.BartForSequenceClassification(config), tokens=6, repeats=1)
    assert found.prefill > 0 and found.step is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_are_keys_and_values(dtype: torch.dtype) -> None:
    model = llama().to(dtype)  # two layers, one key/value head of width 8
    assert measure_cache(model, 20, batch=3) == 2 * 2 * 3 * 20 * 8 * dtype.itemsize
    assert measure_cache(model_of(BY_NAME["gpt2"]), 10) == 2 * 3 * 10 * 48 * 4


def test_a_window_keeps_no_more_than_it_needs() -> None:
    mistral = model_of(
        BY_NAME["mistral"]
    )  # a window of 5 over two layers of three key/value heads of width 10
    assert measure_cache(mistral, 4) == 2 * 2 * 4 * 30 * 4
    assert measure_cache(mistral, 25) == measure_cache(mistral, 12) == 2 * 2 * 4 * 30 * 4


def test_bad_arguments() -> None:
    model = llama()
    for words, call in [
        ("models={} is empty", lambda: measure_latencies({})),
        ("repeats=0: expected at least 1", lambda: measure_latency(model, repeats=0)),
        ("batch=0: expected at least 1", lambda: measure_latency(model, batch=0)),
        ("tokens=0: expected at least 1", lambda: measure_cache(model, 0)),
        (
            "tokens=65 (with those that are decoded): the model has 64 positions",
            lambda: measure_latency(model, tokens=57),
        ),
        (
            "ViTModel can't be timed on random tokens: expected a transformers model that takes",
            lambda: measure_cache(model_of(BY_NAME["vit"]), 3),
        ),
        ("Linear can't be timed", lambda: measure_cache(nn.Linear(2, 2), 3)),
    ]:
        with pytest.raises(ValueError) as caught:
            call()
        assert words in str(caught.value)
    with pytest.raises(TypeError, match="model is a str: expected a model"):
        measure_latency("model")  # type: ignore[arg-type]
