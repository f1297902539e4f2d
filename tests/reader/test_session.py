"""A reading leaves the model as it was, checks itself, and refuses what it would get wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import multihead
from families import FAMILIES
from multihead.errors import ReadingError
from multihead.reader import verify
from small import IDS, llama


def state(model: nn.Module) -> Any:
    """Everything that a reading touches."""
    hooks = {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    }
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    return hooks, model.config._attn_implementation, model.training, attributes


@pytest.fixture
def model() -> Iterator[Any]:
    found = llama()
    before = state(found)
    yield found
    assert state(found) == before


class Stop(Exception):
    pass


def test_as_it_was_afterwards(model: Any) -> None:
    want = model(IDS).logits
    multihead.read(model, [{"input_ids": IDS}])
    assert torch.equal(model(IDS).logits, want)


def test_as_it_was_after_an_exception(model: Any) -> None:
    with pytest.raises(Stop), multihead.reading(model):  # noqa: PT012
        model(IDS)
        raise Stop
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop), multihead.reading(model):
        model(IDS)
    hook.remove()
    with pytest.raises(Stop):
        multihead.read(model, (_ for _ in _raise()))


def _raise() -> Iterator[Any]:
    raise Stop
    yield


def test_a_model_in_training_is_checked_in_evaluation_and_gives_its_gradients(model: Any) -> None:
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with multihead.reading(model) as reading:
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    table = reading.table()  # the weights are those before dropout
    assert table.value("entropy").tolist()[:3] == pytest.approx(
        multihead.read(model, [{"input_ids": IDS}]).value("entropy").tolist()[:3], rel=1e-5
    )
    model.eval()


def test_gradients_are_those_without_a_reading(model: Any) -> None:
    model(IDS, labels=IDS).loss.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with multihead.reading(model):
        model(IDS, labels=IDS).loss.backward()
    for a, p in zip(want, model.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-5 * float(a.abs().max()))
    model.zero_grad()


def test_a_reading_may_stay_on_through_training(model: Any) -> None:
    """The projection's weights change under the reading, and checkpointing computes each site
    twice: neither is counted in.
    """
    model = copy.deepcopy(model).train()  # transformers leaves a hook of its own behind
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with multihead.reading(model) as reading:
        for _ in range(3):
            model(IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        steps = reading.table()
    assert steps.count("norm").tolist() == [3 * 24] * 6
    assert (
        steps.meta["notes"] == []
    )  # no layer runs twice a pass: the second time is the backward's
    with multihead.reading(model) as reading, torch.no_grad():
        model(IDS)
    now = reading.table()
    with multihead.reading(model) as reading, torch.no_grad():
        model(IDS)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 3
        model(IDS)
    assert reading.table().value("norm")[:3] == pytest.approx(2 * now.value("norm")[:3], rel=1e-5)


def test_goes_on_after_a_pass_that_failed(model: Any) -> None:
    with multihead.reading(model) as reading, torch.no_grad():
        model(IDS)
        hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
            lambda *_: (_ for _ in ()).throw(Stop)
        )
        with pytest.raises(Stop):
            model(IDS)
        hook.remove()
        model(IDS)
    assert reading.table().count("norm")[3:].tolist() == [48] * 3


def test_batches_add_up(model: Any) -> None:
    whole = multihead.read(model, [{"input_ids": IDS}])
    parts = [multihead.read(model, [{"input_ids": IDS[n : n + 1]}]) for n in range(2)]
    added = parts[0] + parts[1]
    assert added.meta["tokens"] == whole.meta["tokens"] and added.meta["documents"] == 2
    for column in whole.columns:
        if "probe" not in column:
            assert added.value(column) == pytest.approx(
                whole.value(column), rel=1e-6, abs=1e-9, nan_ok=True
            )
            assert (added.count(column) == whole.count(column)).all()


@pytest.mark.parametrize(
    ("dtype", "off"), [(torch.float64, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
def test_other_dtypes(dtype: torch.dtype, off: float) -> None:
    """Statistics are computed in float32 or better whatever the model runs in, so they are as near
    as its values are.
    """
    want = multihead.read(llama(), [{"input_ids": IDS}])
    got = multihead.read(llama().to(dtype), [{"input_ids": IDS}])
    assert got.meta["dtype"] == str(dtype).removeprefix("torch.")
    for column in want.columns:
        scale = max(0.1, np.nanmax(np.abs(want.value(column))))
        assert np.nanmax(np.abs(got.value(column) - want.value(column))) <= off * scale, column
    assert np.bincount(np.arange(6) // 3, got.value("share")) == pytest.approx([1, 1], abs=1e-5)


def test_progress_counts_sites(model: Any) -> None:
    seen: list[tuple[int, int]] = []
    multihead.read(
        model,
        [{"input_ids": IDS}] * 2,
        probe=False,
        progress=lambda done, total, stage: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_an_implementation_of_ones_own_stays(model: Any) -> None:
    model.set_attn_implementation("eager")
    multihead.read(model, [{"input_ids": IDS}])
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")


# ---- the checks, each shown to fail


def refusal(model: nn.Module, **inputs: Any) -> str:
    with (
        pytest.raises(multihead.errors.ReadingError) as caught,
        multihead.reading(model),
        torch.no_grad(),
    ):
        model(**({"input_ids": IDS} | inputs))
    return str(caught.value)


def test_a_wrong_attention_is_refused_with_the_first_site(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model as it came is another model than the one under reading: here its second layer
    only.
    """
    from multihead.models import transformers as interface

    true = interface.forward

    def wrong(module: Any, *args: Any, **kwargs: Any) -> Any:
        return true(module, *args, **(kwargs | ({"scaling": 0.1} if module.layer_idx == 1 else {})))

    monkeypatch.setattr(interface, "forward", wrong)
    words = refusal(model)
    assert "model.layers.1.self_attn (LlamaAttention)" in words and "off by" in words


def test_a_lost_mask_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.models import transformers as interface

    monkeypatch.setattr(interface, "mask_function", lambda **_: None)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    assert "model.layers.0.self_attn" in refusal(model, attention_mask=mask)
    monkeypatch.undo()
    with multihead.reading(model), torch.no_grad():
        model(IDS, attention_mask=mask)


def test_a_difference_behind_the_sites_is_refused(model: Any) -> None:
    """Something else in the model depends on the name of its attention."""

    def other(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * (2 if model.config._attn_implementation == "multihead" else 1)

    hook = model.lm_head.register_forward_hook(other)
    assert "LlamaForCausalLM gives another output 'logits'" in refusal(model)
    hook.remove()


def test_shuffled_heads_are_refused(model: Any) -> None:
    """What reaches W_O has the right shape, but heads and numbers are mixed: outputs alone can't
    show that.
    """
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda _, args: (args[0].unflatten(-1, (3, 8)).transpose(-1, -2).flatten(-2),)
    )
    words = refusal(model)
    assert (
        "model.layers.1.self_attn" in words
        and "o_proj" in words
        and "neither the output of its heads" in words
    )
    hook.remove()


def test_a_projection_that_is_not_linear_is_refused(model: Any) -> None:
    hook = model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda _, args, out: out.abs()
    )
    assert "don't add up to what model.layers.0.self_attn.o_proj returned" in refusal(model)
    hook.remove()


def test_attention_past_the_interface_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = model.model.layers[1].self_attn
    monkeypatch.setattr(
        attention, "forward", lambda hidden_states, **_: (attention.o_proj(hidden_states), None)
    )
    words = refusal(model)
    assert (
        "model.layers.1.self_attn" in words and "call scaled_dot_product_attention in it" in words
    )


def test_a_keyword_that_is_not_known_is_refused(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    hook = attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"strange": 1}), with_kwargs=True
    )
    with pytest.raises(ValueError, match=r"LlamaAttention passes strange= to attention"):
        multihead.read(model, [{"input_ids": IDS}])
    hook.remove()


def test_checks_again_for_each_new_kind_of_input(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.config.sliding_window = 10  # only looked at for lengths; the masks stay causal
    passes: list[bool] = []
    true = verify.Verifier.record

    def record(self: Any, inputs: Any) -> Any:
        passes[-1] = True
        return true(self, inputs)

    monkeypatch.setattr(verify.Verifier, "record", record)
    mask = torch.ones_like(IDS)
    mask[0, 0] = 0
    right = mask.flip(1)
    with multihead.reading(model), torch.no_grad():
        for inputs in (
            {},
            {},
            {"attention_mask": mask},
            {"attention_mask": mask},
            {"attention_mask": right},
        ):
            passes.append(False)
            model(input_ids=IDS[:, :9], **{k: v[:, :9] if k else v for k, v in inputs.items()})
        passes.append(False)
        model(input_ids=IDS)  # beyond the window
    assert passes == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]  # right[:, :9] has a mask that hides nothing: a kind of its own


# ---- gates between the heads and W_O


class Gated(nn.Module):
    """Stands in for the gate of a family that has one: multiplies what reaches W_O."""

    def __init__(self, model: Any, numbers: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        gate = torch.randn(3, numbers, generator=g)
        self.gate, self.hooks = (
            gate,
            [
                layer.self_attn.o_proj.register_forward_pre_hook(
                    lambda _, args: ((args[0].unflatten(-1, (3, 8)) * gate).flatten(-2),)
                )
                for layer in model.model.layers
            ],
        )


def test_one_number_a_head_scales_contributions(model: Any) -> None:
    plain = multihead.read(model, [{"input_ids": IDS}], probe=False)
    gated = Gated(model, 1)
    table = multihead.read(model, [{"input_ids": IDS}], probe=False)
    for hook in gated.hooks:
        hook.remove()
    size = gated.gate[:, 0].abs().numpy()
    assert table.value("norm")[:3] == pytest.approx(plain.value("norm")[:3] * size, rel=1e-4)
    for column in (
        "contribution:self",
        "cancellation",
        "reach",
        "entropy",
    ):  # ratios of one head: the gate cancels
        assert table.value(column)[:3] == pytest.approx(plain.value(column)[:3], rel=1e-4)


def test_a_gate_for_each_number_leaves_contributions_empty(model: Any) -> None:
    gated = Gated(model, 8)
    table = multihead.read(model, [{"input_ids": IDS}])
    for hook in gated.hooks:
        hook.remove()
    row = table.rows()[0]
    assert row["self"] is not None and row["norm"] is not None and row["share"] is not None
    assert row["contribution:self"] is None and row["cancellation"] is None and row["reach"] is None
    assert "gate" in table.reasons["contribution:self"]
    assert sum(table.value("share")[:3]) == pytest.approx(1, abs=1e-5)


def test_shared_and_adapted_projections_count_as_they_act(model: Any) -> None:
    """W_O is what the projection does to unit vectors, whatever class it is: here a low-rank
    addition around a Linear.
    """

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.base_layer = base
            self.a, self.b = nn.Linear(24, 2, bias=False), nn.Linear(2, 24, bias=False)
            self.in_features = 24

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.b(self.a(x))

    merged = copy.deepcopy(model)
    for layer, twin in zip(model.model.layers, merged.model.layers, strict=True):
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
        adapted = layer.self_attn.o_proj
        twin.self_attn.o_proj.weight.data += adapted.b.weight.data @ adapted.a.weight.data
    got, want = (multihead.read(m, [{"input_ids": IDS}]) for m in (model, merged))
    for layer in model.model.layers:
        layer.self_attn.o_proj = layer.self_attn.o_proj.base_layer
    for column in want.columns:
        assert got.value(column) == pytest.approx(
            want.value(column), rel=1e-4, abs=1e-6, nan_ok=True
        ), column


def test_a_model_that_gives_no_numbers_is_called_by_its_name(model: Any) -> None:
    odd = llama()
    odd.model.layers[1].self_attn.v_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(
        ReadingError,
        match=r"model\.layers\.1\.self_attn .* the model.s outputs are NaN here.*weights",
    ):
        multihead.read(odd, [{"input_ids": IDS}])


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_never_added_to_a_table(verify: bool, number: float) -> None:
    """Not even of one row among many, which the checks' samples of rows pass by: such a column
    would be empty, and unsaveable.
    """
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
        head_dim=8,
    )
    config = tf.MistralConfig(
        **sizes, num_key_value_heads=1, max_position_embeddings=2000, sliding_window=2
    )
    model = tf.MistralForCausalLM(config).eval()
    ids = torch.randint(8, 50, (1, 1500))
    with torch.no_grad(), multihead.reading(model, verify=verify) as reading:
        model(input_ids=ids)
        before = reading.table()
        model.model.embed_tokens.weight[7] = number
        ids[0, 107] = 7
        wanted = r"model\.layers\.0\.self_attn \(MistralAttention\): .*(NaN|infinite)"
        with pytest.raises(ReadingError, match=wanted):  # noqa: PT012
            model(input_ids=ids)
            model(input_ids=ids)
            reading.table()
    assert before.value("entropy").all()


def test_a_model_that_is_being_read_is_not_copied(model: Any) -> None:
    """Its copy would hold hooks that nobody takes off."""
    with multihead.reading(model) as reading:
        model(IDS)
        with pytest.raises(
            TypeError, match=r"LlamaForCausalLM is being read .* copy or save it before or after"
        ):
            copy.deepcopy(model)
        model(IDS)
    assert reading.table().meta["documents"] == 4
    assert torch.equal(copy.deepcopy(model)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("way", ["in place", "layers", "a part", "the whole"])
def test_what_was_compiled_runs_uncompiled_while_it_is_read(way: str) -> None:
    model = llama()
    want = multihead.read(model, [{"input_ids": IDS}], probe=False)
    run = model
    if way == "in place":
        model.compile(backend="eager")
    elif way == "layers":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    elif way == "a part":
        model.model = torch.compile(model.model, backend="eager")
    else:
        run = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = run(IDS).logits
        with multihead.reading(model) as reading:
            run(IDS)
        assert torch.equal(run(IDS).logits, before)
    got = reading.table()
    assert len(got.heads) == len(want.heads)
    for column in ("entropy", "contribution:previous", "share"):
        assert got.count(column).tolist() == want.count(column).tolist()
        np.testing.assert_allclose(got.value(column), want.value(column), rtol=1e-4, atol=1e-6)


def test_a_model_in_float64_has_all_its_digits(model: Any) -> None:
    """Of two tokens the first row has no entropy and the second may read two keys, so one number
    says the other.
    """
    double = llama().double()
    table = multihead.read(double, [{"input_ids": IDS[:1, :2]}], probe=False)
    np.testing.assert_allclose(
        table.value("entropy_ratio"), 2 * table.value("entropy") / np.log(2), rtol=1e-13
    )


def test_special_ids_may_be_any_whole_numbers(model: Any) -> None:
    tables = [
        multihead.read(model, [{"input_ids": IDS}], special_ids=given, probe=False)
        for given in (
            [5, 6],
            {6, 5},
            np.array([5, 6]),
            torch.tensor([5, 6]),
            iter([5, 6]),
            list(np.array([5, 6])),
        )
    ]
    assert (
        len({tuple(table.value("special")) for table in tables}) == 1
        and tables[0].count("special").all()
    )


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
def test_passes_with_gradients_give_the_same_table(kind: str) -> None:
    """Also where the output projection has a bias, whose gradient isn't the table's."""
    family = next(family for family in FAMILIES if family.name == kind)
    model, ids = family.make().eval(), torch.tensor([[0, 5, 9, 7, 5, 9]])
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "t5" else {})
    with torch.no_grad(), multihead.reading(model) as reading:
        model(**inputs)
    with multihead.reading(model) as other:
        model(**inputs)[0].sum().backward()
    want, got = reading.table(), other.table()
    assert want.columns == got.columns
    for column in want.columns:
        np.testing.assert_allclose(
            got.value(column), want.value(column), rtol=1e-5, atol=1e-7, err_msg=column
        )
