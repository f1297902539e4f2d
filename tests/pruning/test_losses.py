"""Losses against log-probabilities taken by hand from the whole logits; intervals against what they
promise; refusals' words.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import multihead
from data.test_tokenizing import small_tokenizer
from families import FAMILIES, WORDS, Family, model_of
from multihead.data.batch import IGNORED
from multihead.data.scoring import scored_batch
from multihead.data.windows import Window
from multihead.pruning import losses as module
from multihead.pruning.losses import Losses, compare_losses, evaluate, load_measure
from small import llama

BY_NAME = {family.name: family for family in FAMILIES}
TEXTS = ["a b c a a b", "c", "b a c b a a c c b", "a c b"]


def bert() -> Any:
    sizes = dict(intermediate_size=40, num_hidden_layers=2, max_position_embeddings=32)
    return tf.BertForMaskedLM(
        tf.BertConfig(hidden_size=40, num_attention_heads=5, vocab_size=WORDS, **sizes)
    )


BERT = Family("bertlm", bert, "", "encoder")


class Plain(nn.Module):
    """No transformers model: no stack below a head that could be called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"logits": self.inner(input_ids, attention_mask=attention_mask).logits}


def masking() -> Any:
    tokenizer = small_tokenizer(pad_token="?", cls_token="<s>", sep_token="</s>")
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer


def by_hand(model: nn.Module, ids: list[int], targets: dict[int, int]) -> float:
    """The loss of the tokens that rows should say, of a document alone in its batch."""
    row = torch.tensor([ids])
    with torch.no_grad():
        found = (
            model(input_ids=row, attention_mask=torch.ones_like(row))["logits"][0]
            .double()
            .log_softmax(-1)
        )
    return -sum(float(found[at, target]) for at, target in targets.items())


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gemma2", "granite", "gpt_oss", "phi3", "gpt_neox", "plain"]
)
def test_token_losses_are_the_log_probabilities_of_the_next_tokens(
    name: str, special: bool
) -> None:
    model = Plain() if name == "plain" else model_of(BY_NAME[name])
    tokenizer = small_tokenizer(special=special, pad_token="c")
    found = evaluate(model, TEXTS, tokenizer=tokenizer, batch_size=3)
    assert found.name == "token loss"
    for n, text in enumerate(TEXTS):
        ids = tokenizer(text)["input_ids"]
        end = len(ids) - special  # the token that closes a text isn't text
        assert found.total[n] == pytest.approx(
            by_hand(model, ids, {at - 1: ids[at] for at in range(1, end)}), rel=1e-5
        )
        assert found.count[n] == end - 1
    assert found.mean == pytest.approx(found.total.sum() / found.count.sum())
    assert found.perplexity == pytest.approx(np.exp(found.mean))


def test_a_long_text_is_many_documents_and_each_word_is_scored_once_at_most() -> None:
    model, tokenizer = llama(), small_tokenizer(pad_token="c")
    text = " ".join("abc"[n * n % 5 % 3] for n in range(100))
    found = evaluate(model, text, tokenizer=tokenizer, context=12)
    assert found.count.tolist() == [10.0] * 10  # <s> and ten words, all of which are foretold
    ids = tokenizer(text)["input_ids"]
    window = [0, *ids[21:31], 1]
    assert found.total[2] == pytest.approx(
        by_hand(model, window, {at - 1: window[at] for at in range(1, 11)}), rel=1e-5
    )
    assert evaluate(
        model, text, tokenizer=tokenizer, context=12, tokens=25
    ).total.tolist() == pytest.approx(found.total[:3].tolist())
    assert (
        len(evaluate(model, text * 2, tokenizer=tokenizer).count) == 4
    )  # the model has 64 positions, two of them for the ends


def test_batches_and_their_order_change_nothing() -> None:
    model, tokenizer, seen = llama(), small_tokenizer(pad_token="c"), []
    one = evaluate(
        model,
        TEXTS,
        tokenizer=tokenizer,
        batch_size=1,
        progress=lambda *numbers: seen.append(numbers),
    )
    assert seen == [(n, 4, "evaluating") for n in (1, 2, 3, 4)]
    turned = evaluate(model, iter(TEXTS[::-1]), tokenizer=tokenizer, batch_size=4)
    np.testing.assert_allclose(one.total, turned.total[::-1], rtol=1e-5)
    assert one.count.tolist() == turned.count.tolist()[::-1]


def test_only_some_logits_are_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, sizes = llama(), small_tokenizer(pad_token="c"), []
    whole = evaluate(model, TEXTS * 9, tokenizer=tokenizer)
    monkeypatch.setattr(module, "LOGITS", 50 * 20)
    with torch.no_grad():
        hook = model.lm_head.register_forward_hook(
            lambda *args: sizes.append(args[2].shape[:2].numel())
        )
        parts = evaluate(model, TEXTS * 9, tokenizer=tokenizer)
        hook.remove()
    assert max(sizes) == 20 and len(sizes) > 8
    np.testing.assert_allclose(parts.total, whole.total, rtol=1e-6)


def test_the_model_is_afterwards_as_it_was() -> None:
    model = llama().train()
    evaluate(model, TEXTS, tokenizer=small_tokenizer(pad_token="c"))
    assert model.training and model.model.training and "forward" not in vars(model.model)
    assert all(parameter.grad is None for parameter in model.parameters())


def masked(tokenizer: Any, ids: list[int]) -> tuple[list[int], dict[int, int]]:
    """The ids with some masked, and what they were."""
    batch = scored_batch("masked-token loss", tokenizer, [Window(ids, 0, len(ids))])
    assert batch.targets is not None
    targets = {n: t for n, t in enumerate(batch.targets[0].tolist()) if t != IGNORED}
    return batch.inputs["input_ids"][0].tolist(), targets


def test_masked_losses_are_of_the_tokens_that_were_there() -> None:
    model, tokenizer = model_of(BERT), masking()
    texts = ["a b c a b c a b c a b c a b c a b c a b", *TEXTS]
    found = evaluate(model, texts, tokenizer=tokenizer)
    assert found.name == "masked-token loss" and found.perplexity is not None
    assert found.count.tolist() == [3, 1, 1, 1, 1]  # 15% of 20; one at least
    for n, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"]
        hidden, targets = masked(tokenizer, ids)
        assert [n for n, (a, b) in enumerate(zip(ids, hidden)) if a != b] == list(targets)
        assert {hidden[place] for place in targets} == {tokenizer.mask_token_id}
        assert min(targets) > 0 and max(targets) < len(ids) - 1
        assert [ids[place] for place in targets] == list(targets.values())
        assert found.total[n] == pytest.approx(by_hand(model, hidden, targets), rel=1e-5)


def test_other_documents_don_t_change_which_tokens_are_masked() -> None:
    model, tokenizer = model_of(BERT), masking()
    texts = [" ".join("abc"[n * n * k % 7 % 3] for n in range(20)) for k in range(1, 6)]
    apart = [evaluate(model, text, tokenizer=tokenizer).total[0] for text in texts]
    np.testing.assert_allclose(
        evaluate(model, texts[::-1], tokenizer=tokenizer).total, apart[::-1], rtol=1e-5
    )
    places = {tuple(masked(tokenizer, tokenizer(text)["input_ids"])[1]) for text in texts}
    assert len(places) > 1  # and it isn't one pattern for all


def test_special_tokens_within_a_text_are_never_masked() -> None:
    tokenizer = masking()
    ids = tokenizer("a <s> <s> b <s> <s> <s> <s> </s> c <s> <s>")["input_ids"]
    for n in range(2, 30):
        _, targets = masked(tokenizer, [*ids, n])
        assert len(targets) == 1 and set(targets.values()) <= {2, 3, 4}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            model_of(BY_NAME["bert"]),
            "BertModel has no head that predicts tokens, so it has no loss on a text; load it with",
        ),
        (model_of(BY_NAME["t5"]), "T5Model has no head that predicts tokens"),
        (model_of(BERT), "BertForMaskedLM reads both ways and its tokenizer has no mask token"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_without_such_a_loss(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        evaluate(model, TEXTS, tokenizer=small_tokenizer(pad_token="c"))
    assert words in str(caught.value) and "a user-defined function (FILE.py:NAME)" in str(
        caught.value
    )


def test_bad_arguments() -> None:
    model, tokenizer = llama(), small_tokenizer(pad_token="c")
    for error, words, call in [
        (
            TypeError,
            "model is a str: expected a model",
            lambda: evaluate("m", TEXTS, tokenizer=tokenizer),
        ),  # type: ignore[arg-type]
        (
            TypeError,
            "texts is a int: expected a string",
            lambda: evaluate(model, 3, tokenizer=tokenizer),
        ),  # type: ignore[arg-type]
        (ValueError, "texts=[] is empty", lambda: evaluate(model, [], tokenizer=tokenizer)),
        (
            ValueError,
            "texts[1]=' ' is empty",
            lambda: evaluate(model, ["a", " "], tokenizer=tokenizer),
        ),
        (ValueError, "tokenizer=None", lambda: evaluate(model, TEXTS, tokenizer=None)),
        (
            ValueError,
            "context=65: the model has 64 positions",
            lambda: evaluate(model, TEXTS, tokenizer=tokenizer, context=65),
        ),
        (
            ValueError,
            "tokens=0: expected at least 1",
            lambda: evaluate(model, TEXTS, tokenizer=tokenizer, tokens=0),
        ),
        (
            ValueError,
            "batch_size=0",
            lambda: evaluate(model, TEXTS, tokenizer=tokenizer, batch_size=0),
        ),
        (
            ValueError,
            "hold no token that could be predicted",
            lambda: evaluate(model, ["a", "b"], tokenizer=small_tokenizer(special=False)),
        ),
    ]:
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)


def test_a_model_whose_outputs_are_no_numbers() -> None:
    model, tokenizer = llama(), small_tokenizer(pad_token="?")
    model.model.embed_tokens.weight.data[4] = torch.nan  # "c"
    with pytest.raises(
        ValueError,
        match=r"token loss of document 2 is nan: expected finite numbers.*dtype='float32'",
    ):
        evaluate(model, ["a b a a", "a c b"], tokenizer=tokenizer)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM gives logits that are nan or infinite: expected"
    ):
        evaluate(model, TEXTS, tokenizer=tokenizer)


def test_the_builtin_model_foretells_better_than_with_a_head_s_weights_gone() -> None:
    model, tokenizer = multihead.load_builtin()
    text = multihead.data.builtin_text()
    whole = evaluate(model, text, tokenizer=tokenizer, context=64)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    change = compare_losses(whole, evaluate(model, text, tokenizer=tokenizer, context=64))
    assert 0 < change.low < change.mean < change.high and change.documents == len(whole.count) > 5


# --- differences ---


def test_the_difference_is_between_token_means_and_keeps_its_sign() -> None:
    a = Losses(np.array([10.0, 40.0]), np.array([10.0, 20.0]))
    b = Losses(np.array([13.0, 40.0]), np.array([10.0, 20.0]))
    found = compare_losses(a, b)
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0, 0.3))
    back = compare_losses(b, a)
    assert (back.mean, back.low, back.high) == pytest.approx((-0.1, -0.3, 0))
    assert found == compare_losses(a, b)
    alone = compare_losses(Losses(a.total[:1], a.count[:1]), Losses(b.total[:1], b.count[:1]))
    assert alone.mean == pytest.approx(0.3) and np.isnan([alone.low, alone.high]).all()


def test_long_documents_weigh_more_in_the_interval_too() -> None:
    count = np.array([1.0] * 20 + [500.0] * 20)
    change = np.where(count == 1, 100, 1) * count  # of short ones much a token, of long ones little
    found = compare_losses(Losses(np.zeros(40), count), Losses(change, count))
    assert found.mean == pytest.approx(change.sum() / count.sum())
    assert found.low < found.mean < found.high < 6


def test_ninety_five_of_a_hundred_intervals_hold_the_true_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["multihead.pruning.losses"], "RESAMPLES", 500)
    random, held = np.random.default_rng(5), 0
    for _ in range(400):
        count = random.integers(5, 100, 40).astype(float)
        base = (
            random.normal(3, 1, 40) * count
        )  # documents differ ten times as much as the models do
        found = compare_losses(
            Losses(base, count), Losses(base + random.normal(0.1, 0.3, 40) * count, count)
        )
        held += found.low <= 0.1 <= found.high
        assert found.high - found.low < 0.4
    assert 0.89 < held / 400 < 0.98


def test_what_has_no_difference() -> None:
    a = Losses(np.ones(3), np.array([1.0, 2, 3]))
    for b, words in [
        (Losses(np.ones(2), np.ones(2)), "differ in documents (3 and 2)"),
        (
            Losses(np.ones(3), np.array([1.0, 2, 4])),
            "differ in document 3 (3 and 4 scored tokens): evaluate both",
        ),
        (
            Losses(np.ones(3), a.count, "accuracy"),
            "is measured by its token loss, the other one by its accuracy",
        ),
    ]:
        with pytest.raises(ValueError) as caught:
            compare_losses(a, b)
        assert words in str(caught.value)


# --- a function of one's own ---

MEASURE = """
from __future__ import annotations
from dataclasses import dataclass
import torch

@dataclass
class Thing:
    value: int

def one(model, tokenizer): return 3
def each(model, tokenizer): return torch.tensor([1.0, 2.0], requires_grad=True)
def better(model, tokenizer): return {"values": [1, 2, 3], "higher_is_better": True}
def nothing(model, tokenizer): return None
def odd(model, tokenizer): return {"value": 1}
def nan(model, tokenizer): return [1.0, float("nan")]
def table(model, tokenizer): return [[1.0]]
"""


def test_a_function_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "measure.py"
    file.write_text(MEASURE)
    model = llama()
    one, each, better = (
        load_measure(f"{file}:{name}")(model, None) for name in ("one", "each", "better")
    )
    assert (one.mean, one.name, one.higher_is_better, one.perplexity) == (3, "one", False, None)
    assert each.total.tolist() == [1, 2] and each.count.tolist() == [1, 1]
    assert better.mean == 2 and better.higher_is_better
    for name in ("nothing", "odd", "nan", "table"):
        with pytest.raises(
            ValueError,
            match=r"measure.py:\w+' returned .*: expected a number, one number for each document, or",
        ):
            load_measure(f"{file}:{name}")(model, None)


def test_functions_that_aren_t_there(tmp_path: Path) -> None:
    file, broken = tmp_path / "measure.py", tmp_path / "broken.py"
    file.write_text("def here(model, tokenizer): return 1")
    broken.write_text("1 / 0")
    for where, error, words in [
        ("measure", ValueError, "measure='measure': expected FILE.py:NAME"),
        (str(file), ValueError, "expected FILE.py:NAME"),
        (f"{file}:", ValueError, "expected FILE.py:NAME"),
        (f"{file}x.py:f", FileNotFoundError, "there is no such file"),
        (f"{file}:there", ValueError, "has no 'there'; "),
        (f"{broken}:f", ValueError, "can't be run: line 1: ZeroDivisionError: division by zero"),
    ]:
        with pytest.raises(error) as caught:
            load_measure(where)
        assert words in str(caught.value)


@pytest.mark.parametrize("code", [0, 3])
def test_a_measure_that_ends_the_program_is_an_error(code: int, tmp_path: Path) -> None:
    file = tmp_path / "measure.py"
    file.write_text(f"import sys\ndef end(model, tokenizer):\n    sys.exit({code})\n")
    with pytest.raises(ValueError, match=rf"ends the program \(SystemExit: {code}\)"):
        load_measure(f"{file}:end")(torch.nn.Linear(1, 1), None)
