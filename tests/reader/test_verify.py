"""What a reading compares, and with what tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import multihead
from multihead.errors import ReadingError
from multihead.models import PassInputs, Tap, find_sites, instrument
from multihead.reader.tokens import Tokens
from multihead.reader.verify import Verifier, require_elementwise, require_equal, rows_to_compare
from small import IDS, llama
from untouched import assert_untouched, snapshot


def test_rows_are_spread_evenly_without_padding() -> None:
    assert rows_to_compare(None, 2, 3).tolist() == list(range(6))
    rows = rows_to_compare(None, 10, 100)
    assert len(rows) == 64 and rows[0] == 0 and rows[-1] == 999
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert rows_to_compare(mask, 2, 3).tolist() == [1, 2, 3, 4]
    assert rows_to_compare(mask, 2, 2).tolist() == [0, 1, 2]  # of a longer mask the last positions


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        (torch.float64, 9e-7, 2e-6),
        (torch.float32, 9e-5, 2e-4),
        (torch.float16, 9e-3, 2e-2),
        (torch.bfloat16, 5e-2, 9e-2),
    ],
    ids=str,
)
def test_tolerances(dtype: torch.dtype, within: float, beyond: float) -> None:
    """Relative to the largest value, which is 4 here."""
    a = torch.tensor([0.0, 4.0], dtype=dtype)
    require_equal(a, a + torch.tensor([4 * within, 0], dtype=dtype), "a", " differs")
    with pytest.raises(ReadingError, match=r"^a differs: off by .* largest value is 4\."):
        require_equal(a, a + torch.tensor([4 * beyond, 0], dtype=dtype), "a", " differs")
    require_equal(a[:0], a[:0], "a", " differs")


def test_a_score_that_says_never_is_equal_to_itself() -> None:
    a = torch.tensor([1.0, -torch.inf, 2.0])
    require_equal(a, a.clone(), "a", "equal")
    for other in (
        [1.0, 3.0, 2.0],
        [1.0, torch.inf, 2.0],
        [1.0, -torch.inf, 2.1],
        [1.0, torch.nan, 2.0],
    ):
        with pytest.raises(ReadingError):
            require_equal(a, torch.tensor(other), "a", "another")


def test_each_kind_of_input_is_compared_once() -> None:
    model = llama()
    verifier = Verifier(model, Tokens(model, find_sites(model)))
    before = snapshot(model)
    counts = []
    with torch.no_grad(), instrument(model, verifier, attention=True):
        for length in (12, 7, 1):
            model(input_ids=IDS[:, :length])
            counts.append(len(verifier.kinds))
    assert counts == [1, 1, 2]  # a single token needs no mask
    assert_untouched(model, before)


def test_a_tap_that_changes_the_attention_is_found() -> None:
    """Broken once on purpose: outputs that are another's are refused, by the name of the site."""
    model = llama()
    verifier = Verifier(model, Tokens(model, find_sites(model)))

    class Doubled(Tap):
        def attend(self, site: Any, call: Any, compute: Any) -> Any:
            return compute(call._replace(scale=2 * call.scale))

    with (
        torch.no_grad(),
        pytest.raises(ReadingError, match=r"model\.layers\.0\.self_attn .* gives another output"),
        instrument(model, verifier, Doubled()),
    ):
        model(IDS)


@pytest.mark.parametrize("mixes", [False, True])
def test_an_elementwise_operation_before_the_projection(mixes: bool) -> None:
    model = llama()
    site = find_sites(model)[1]

    class Between(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flip(-1) if mixes else torch.tanh(x)

    between = Between()
    hook = site.out.register_forward_pre_hook(lambda _, args: (between(args[0]),))
    before = snapshot(model)
    inputs = PassInputs(model, (IDS,), {})
    if mixes:
        with pytest.raises(ReadingError, match="neither the output of its heads"):
            require_elementwise(model, inputs, [site])
    else:
        require_elementwise(model, inputs, [site])
    assert_untouched(model, before)
    hook.remove()
    with pytest.raises(ReadingError, match="neither the output of its heads"):
        require_elementwise(model, None, [site])  # without inputs nothing is proved


def test_outputs_that_are_not_given_under_reading() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    with (
        torch.no_grad(),
        pytest.raises(ReadingError, match=r"multihead\.read_maps gives those of chosen heads"),
        multihead.reading(model),
    ):
        model(IDS, output_attentions=True)


@pytest.mark.parametrize("kept", [1, 2, torch.tensor([0, 5])], ids=str)
def test_logits_of_a_few_positions_are_compared_where_they_are_of_tokens(kept: Any) -> None:
    """Models give anything at padding, here the last positions of right padding in a chunk of no
    tokens; the last logits are those of the last positions.
    """
    torch.manual_seed(0)
    config = tf.Llama4TextConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        attention_chunk_size=3,
        num_local_experts=2,
        interleave_moe_layer_step=3,
        layer_types=["chunked_attention"],
        attn_implementation="eager",
    )
    model = tf.Llama4ForCausalLM(config).eval()
    real = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    inputs = {"input_ids": IDS[:, :6], "attention_mask": real, "logits_to_keep": kept}
    with multihead.reading(model) as session, torch.no_grad():
        model(**inputs)
    assert session.documents == 2
    model.lm_head.register_forward_hook(change_every_second_call())
    with torch.no_grad(), multihead.reading(model), pytest.raises(ReadingError, match="logits"):
        model(**inputs)


def change_every_second_call() -> Any:
    """A hook under which a model gives another output at its second pass."""
    calls = [0]

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output + calls[0]

    return hook
