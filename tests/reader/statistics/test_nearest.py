"""The nearest head is that of the stored probabilities, over the rows that were sampled; pairs add
up and save.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multihead
from families import (
    FAMILIES,
    SPECIAL,
    batches_of,
    call_of,
    is_cross,
    model_of,
    sequences,
    stored_calls,
)
from multihead.models.loading import load_with_tokenizer
from multihead.reader.head_pairs import find_nearest
from multihead.reader.probe import run_probe
from multihead.reader.statistics.nearest import divergences, sample
from multihead.reader.statistics.on_request import Nearest
from multihead.reader.table import Table
from oracles import divergence as oracle
from small import IDS, llama

BY_NAME = {family.name: family for family in FAMILIES}
CASES = [
    (name, BY_NAME[name].paddings()[-1])
    for name in (
        "bert",
        "gpt2",
        "llama",
        "mistral",
        "gemma2",
        "gpt_oss",
        "t5",
        "bart",
        "whisper",
        "clip",
        "vit",
        "llama4",
    )
]


def watched(model: Any, batches: list[Any], **options: Any) -> Table:
    nearest = Nearest(**options)
    with (
        multihead.reading(model, special_ids=set(SPECIAL), statistics=nearest) as session,
        torch.no_grad(),
    ):
        for batch in batches:
            model(**batch)
        return session.table()


@pytest.mark.parametrize(("name", "padding"), CASES, ids=lambda x: x)
def test_divergences_are_those_of_stored_probabilities(name: str, padding: str) -> None:
    family = BY_NAME[name]
    model, batches = model_of(family), batches_of(family, padding)
    table = watched(model, batches)
    place = {(head.site, head.index): n for n, head in enumerate(table.heads)}
    passes: dict[tuple[int, str], dict[str, Any]] = defaultdict(
        dict
    )  # of each pass and sequence, by site
    for stored, batch in stored_calls(model, batches):
        number = next(n for n, given in enumerate(batches) if given is batch)
        if not is_cross(stored.site):
            part = "vision" if "vision" in stored.site else sequences(stored.site, batch)[0]
            passes[number, part][stored.site] = call_of(family, model, stored, batch)
    sums, rows = np.zeros((2, len(place), len(place)))
    for calls in passes.values():
        here = [
            place[site, head]
            for site, call in calls.items()
            for head in range(call.weights.shape[1])
        ]
        assert here == sorted(here)
        weights = np.concatenate([call.weights for call in calls.values()], 1)
        real = np.argwhere(next(iter(calls.values())).real_queries)
        sums[np.ix_(here, here)] += oracle.divergences(weights, real)
        rows[np.ix_(here, here)] += np.triu(np.full((len(here), len(here)), len(real)), 1)
    assert table.pairs is not None and rows.any()
    np.testing.assert_array_equal(table.pairs.rows, rows)
    np.testing.assert_allclose(table.pairs.sum, sums, rtol=1e-5, atol=1e-5 * rows.max())
    mean = np.where(rows > 0, sums / np.maximum(rows, 1), np.inf)
    mean = np.minimum(mean, mean.T)
    for n, (label, apart) in enumerate(find_nearest(table)):
        assert (label is None) == bool(np.isinf(mean[n]).all()) == np.isnan(apart)
        if label is not None:
            assert label == table.heads[int(mean[n].argmin())].head
            assert apart == pytest.approx(mean[n].min(), abs=1e-5)


def test_heads_of_cross_attention_have_none() -> None:
    table = watched(model_of(BY_NAME["bart"]), batches_of(BY_NAME["bart"], "none"))
    for head, (label, apart) in zip(table.heads, find_nearest(table)):
        assert (label is None and np.isnan(apart)) == (head.kind == "cross")
        assert label is None or label.startswith(head.head.partition(".L")[0]), (
            "encoder and decoder have keys of their own"
        )


@pytest.mark.filterwarnings(
    "ignore:.past_key_values. is deprecated"
)  # the name that older transformers know
def test_a_text_in_pieces_has_the_rows_of_the_whole() -> None:
    """With a cache each piece is a pass of its own, whose rows read all keys so far."""
    model, pieces = llama(), []
    with multihead.reading(model, statistics="nearest") as session, torch.no_grad():
        cache = None
        for start, stop in ((0, 5), (5, 6), (6, 12)):
            cache = model(IDS[:, start:stop], past_key_values=cache, use_cache=True).past_key_values
        pieces = session.table().pairs
    whole = watched(model, [{"input_ids": IDS}]).pairs
    np.testing.assert_array_equal(pieces.rows, whole.rows)
    np.testing.assert_allclose(pieces.sum, whole.sum, atol=1e-4)


def test_rows_are_sampled_evenly_and_alike_in_any_batch() -> None:
    real = torch.ones(3, 100, dtype=torch.bool)
    real[1, :30], real[2, 5:] = False, False
    found = sample(real, 8, seed=1)
    rows = {b: found[found[:, 0] == b, 1].tolist() for b in range(3)}
    assert [len(rows[b]) for b in range(3)] == [8, 8, 5] and rows[2] == [0, 1, 2, 3, 4]
    for b, length, start in ((0, 100, 0), (1, 70, 30)):
        assert all(
            start + n * length / 8 - 1 < row < start + (n + 1) * length / 8
            for n, row in enumerate(rows[b])
        )
    assert (
        sample(real[:1], 8, seed=1).tolist()
        == found[:8].tolist()
        != sample(real[:1], 8, seed=2).tolist()
    )
    assert sample(torch.zeros(2, 4, dtype=torch.bool), 8, 0).shape == (0, 2)


@pytest.mark.parametrize("block", [256, 7])
def test_only_sampled_rows_count(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihead.ops.backends.blocks.rows_per_block", lambda *_: block)
    model = llama()
    ids = torch.randint(3, 50, (2, 60), generator=torch.Generator().manual_seed(1))
    table = watched(model, [{"input_ids": ids}], rows=7, seed=3)
    rows = sample(torch.ones(2, 60, dtype=torch.bool), 7, 3).tolist()
    weights = np.concatenate(
        [call.weights for call, _ in stored_calls(model, [{"input_ids": ids}])], 1
    )
    assert table.pairs is not None and set(table.pairs.rows[np.triu_indices(6, 1)]) == {14}
    np.testing.assert_allclose(table.pairs.sum, oracle.divergences(weights, rows), atol=1e-4)
    with pytest.raises(ValueError, match="rows=0: expected 1 or more"):
        watched(model, [], rows=0)


def test_memory_is_bounded_by_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "multihead.reader.statistics.nearest.MOST", 6 * 12 * 5
    )  # heads * keys * 5 rows
    pairs = watched(llama(), [{"input_ids": IDS}]).pairs
    assert pairs is not None and pairs.rows.max() == 5 * len(IDS)


def test_many_heads_and_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.rand(5, 4, 50, generator=torch.Generator().manual_seed(0))
    p[..., 20:30] = 0
    p[3] = p[1]
    p[4] = 0
    p[4, :, 25] = 1
    p = p / p.sum(-1, keepdim=True)
    expected = oracle.divergences(p.double().numpy().swapaxes(0, 1), [(n, 0) for n in range(0)])
    for row in range(4):
        expected += oracle.divergences(p[:, row].double().numpy()[None, :, None], [(0, 0)])
    for size in (1, 1 << 17):
        found = divergences(p, part=size).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert found[1, 3] < 1e-5 and found[0, 4] == pytest.approx(4 * np.log(2), abs=1e-5)


def test_the_probe_and_the_passes_of_others_do_not_count() -> None:
    model = llama()
    plain = watched(model, [{"input_ids": IDS}]).pairs
    with multihead.reading(model, statistics="nearest") as session, torch.no_grad():
        model(IDS)
        run_probe(session)
        with session.passes(counting=False):
            model(IDS)
        table = session.table()
    assert table.pairs is not None and plain is not None
    np.testing.assert_array_equal(table.pairs.sum, plain.sum)
    np.testing.assert_array_equal(table.pairs.rows, plain.rows)


def test_a_pass_that_ends_in_an_error_leaves_nothing() -> None:
    model = llama()
    plain = watched(model, [{"input_ids": IDS}]).pairs
    with multihead.reading(model, verify=False, statistics="nearest") as session, torch.no_grad():
        hook = model.model.layers[1].mlp.register_forward_hook(
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            model(IDS[:, torch.arange(11, -1, -1)])
        hook.remove()
        model(IDS)
        found = session.table().pairs
    assert found is not None and plain is not None
    np.testing.assert_allclose(found.sum, plain.sum, atol=1e-6)


@pytest.mark.models
def test_nearest_heads_of_a_real_model(minilm_dir: Path) -> None:
    """Every head has one, no further away than any other, and far nearer than two heads are on the
    average.
    """
    loaded = load_with_tokenizer(minilm_dir)
    with multihead.reading(loaded.model, statistics="nearest") as session, torch.no_grad():
        loaded.model(
            **loaded.tokenizer(
                "The cat sat on the mat, and the dog sat on the cat.", return_tensors="pt"
            )
        )
    table = session.table()
    assert table.pairs is not None and table.pairs.rows.max() == 17
    found = find_nearest(table)
    assert all(
        label is not None and label != head.head for head, (label, _) in zip(table.heads, found)
    )
    assert np.mean([apart for _, apart in found]) < 0.5 * np.nanmean(table.pairs.mean())
