"""Readings nest with everything that instruments a model: other readings, ablation, maps, pruning,
sharing, cost; and after each, also after an exception, the model is bit for bit as it came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import multihead
from small import IDS, llama
from untouched import assert_untouched, snapshot

BATCH = {"input_ids": IDS}
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 8


class Stop(Exception):
    pass


@pytest.fixture
def model() -> Iterator[Any]:
    found = llama()
    before = snapshot(found)
    yield found
    assert_untouched(found, before)


def assert_equal(a: multihead.Table, b: multihead.Table) -> None:
    assert a.columns == b.columns
    for column in a.columns:
        np.testing.assert_allclose(
            a.value(column), b.value(column), rtol=1e-5, atol=1e-8, err_msg=column
        )
    assert a.meta["documents"] == b.meta["documents"] and a.meta["tokens"] == b.meta["tokens"]


def read_here(model: Any, context: AbstractContextManager[Any] | None = None) -> multihead.Table:
    with torch.no_grad(), context or nullcontext(), multihead.reading(model) as reading:
        model(**BATCH)
    return reading.table()


# ---- readings


def test_a_reading_in_a_reading(model: Any) -> None:
    """Both give what each gives alone; the passes that the inner one makes to verify itself count
    in neither."""
    alone = read_here(model)
    with torch.no_grad(), multihead.reading(model) as outer:
        with multihead.reading(model) as inner:
            model(**BATCH)
        assert_equal(inner.table(), alone)
        assert_equal(outer.table(), alone)
        model(input_ids=IDS[:, :7])
    assert inner.table().meta["documents"] == 2 and outer.table().meta["documents"] == 4


def test_read_within_a_reading(model: Any) -> None:
    alone = multihead.read(model, [BATCH], statistics=["importance", "effect", "copying"])
    with torch.no_grad(), multihead.reading(model) as outer:
        within = multihead.read(model, [BATCH], statistics=["importance", "effect", "copying"])
        documents = outer.table().meta["documents"]
    assert_equal(within, alone)
    assert documents == 2 + 4  # the text and the probe, but none of the passes for `effect`


def test_two_readings_of_two_models_in_two_threads() -> None:
    models = [llama(), llama(attention_bias=True)]
    for model in models:
        for weight in model.parameters():
            weight.data += 0.01
    before = [snapshot(model) for model in models]
    alone = [read_here(model) for model in models]
    barrier = threading.Barrier(2)
    tables: dict[int, multihead.Table] = {}
    errors: list[BaseException] = []

    def run(n: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(3):
                    barrier.wait(20)
                    with multihead.reading(models[n]) as reading:
                        barrier.wait(20)
                        models[n](**BATCH)
                    tables[n] = reading.table()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    for n, model in enumerate(models):
        assert_equal(tables[n], alone[n])
        assert_untouched(model, before[n])


# ---- ablation


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_ablation_outside_and_inside_a_reading(model: Any, mode: str) -> None:
    """The reading sees the model as ablated, whichever is opened first."""
    over = [BATCH] if mode == "mean" else None
    outside = read_here(model, multihead.ablate_heads(model, "L0.H1", mode=mode, over=over))
    with torch.no_grad(), multihead.reading(model) as inside:
        with multihead.ablate_heads(model, "L0.H1", mode=mode, over=over):
            model(**BATCH)
        table = inside.table()
        model(**BATCH)
    assert_equal(table, outside)
    assert (table.value("norm")[1] == 0) == (mode == "zero")
    assert table.rows()[1]["contribution:self"] is None
    assert inside.table().meta["documents"] == 4
    plain = read_here(model)
    assert plain.value("norm")[1] > 0 and plain.rows()[1]["contribution:self"] is not None


def test_the_means_of_ablated_heads_are_not_read(model: Any) -> None:
    with torch.no_grad(), multihead.reading(model) as reading:
        with multihead.ablate_heads(model, "L0.H1", mode="mean", over=[BATCH]):
            pass
        assert reading.table().meta["documents"] == 0


def test_ablations_nest(model: Any) -> None:
    with torch.no_grad():
        with multihead.ablate_heads(model, ["L0.H1", "L1.H0"]):
            want = model(**BATCH).logits
        with multihead.ablate_heads(model, "L0.H1"), multihead.ablate_heads(model, "L1.H0"):
            got = model(**BATCH).logits
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# ---- verbs on a model that is being read


def draw_maps(model: Any) -> Any:
    found = multihead.read_maps(model, BATCH | {"input_ids": IDS[:1]}, "L1.H2")
    return found.weights.ravel().tolist()


def compute_cost(model: Any) -> Any:
    return multihead.cost(model).to_dict()


def prune(model: Any) -> Any:
    found = multihead.prune(model, TEXT, tokenizer=builtin()[1], remove="1", tokens=256)
    return sizes_and_hooks(found.model)


def share(model: Any) -> Any:
    found = multihead.share(model, TEXT, num_kv_heads=1, tokenizer=builtin()[1], tokens=256)
    return sizes_and_hooks(found.model)


def sizes_and_hooks(model: Any) -> Any:
    sizes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    return sizes, [name for name, m in model.named_modules() if m._forward_pre_hooks]


VERBS: dict[str, Callable[[Any], Any]] = {
    "maps": draw_maps,
    "cost": compute_cost,
    "prune": prune,
    "share": share,
}


def builtin() -> Any:
    return multihead.load_builtin()


def model_for(verb: str) -> Any:
    return builtin()[0] if verb in ("prune", "share") else llama()


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_on_a_model_that_is_being_read(verb: str) -> None:
    """It gives what it gives elsewhere, the reading goes on, and a smaller model is free of hooks."""
    model = model_for(verb)
    before = snapshot(model)
    alone = VERBS[verb](model)
    assert_untouched(model, before)
    with torch.no_grad(), multihead.reading(model) as reading:
        model(**BATCH)
        table = reading.table()
        within = VERBS[verb](model)
        assert within == pytest.approx(alone, abs=1e-5) if verb == "maps" else within == alone
        documents = reading.table().meta["documents"]
        model(**BATCH)
    assert_untouched(model, before)
    assert table.meta["documents"] == 2
    assert documents == 2 + (
        verb == "maps"
    )  # of maps it is the text; other verbs' passes are theirs
    assert reading.table().meta["documents"] == documents + 2


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "cost"])
def test_an_exception_in_the_middle_of_a_verb(verb: str) -> None:
    model = model_for(verb)
    before = snapshot(model)
    want = read_here(model)
    calls = 0

    def stop(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Stop

    with torch.no_grad(), multihead.reading(model) as reading:
        hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            VERBS[verb](model)
        hook.remove()
        documents = reading.table().meta["documents"]
        model(**BATCH)
    assert reading.table().meta["documents"] == documents + 2
    assert_untouched(model, before)
    assert_equal(read_here(model), want)


@pytest.mark.parametrize("inner", ["reading", "ablation"])
def test_an_exception_in_the_middle_of_nested_passes(model: Any, inner: str) -> None:
    want = read_here(model)

    def within() -> AbstractContextManager[Any]:
        if inner == "reading":
            return multihead.reading(model)
        return multihead.ablate_heads(model, "L0.H0")

    def stop(*_: Any) -> None:
        raise Stop

    with torch.no_grad(), multihead.reading(model) as reading:
        hook = model.model.layers[1].mlp.register_forward_hook(stop)
        with pytest.raises(Stop), within():
            model(**BATCH)
        hook.remove()
        with pytest.raises(Stop), within():
            raise Stop
        model(**BATCH)
    table = reading.table()
    assert table.meta["documents"] == 2
    np.testing.assert_allclose(table.value("entropy")[3:], want.value("entropy")[3:], rtol=1e-6)
