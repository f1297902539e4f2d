"""The run of a reading: each document once, progress up to its total, a stop that keeps the rest."""

from __future__ import annotations

import pytest

import multihead
from multihead.models import find_sites

TEXTS = ["the cat sat", "on the mat", "and the dog", "looked at it for a long time", "one"]


def test_progress_ends_at_its_total() -> None:
    model, tokenizer = multihead.load_builtin()
    calls: list[tuple[int, int, str]] = []
    multihead.read(
        model, TEXTS, tokenizer=tokenizer, batch_size=2, progress=lambda *call: calls.append(call)
    )
    done, totals = [call[0] for call in calls], {call[1] for call in calls}
    assert done == sorted(done)
    assert totals == {3 * len(find_sites(model))}
    assert done[-1] == totals.pop()


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_stopped_run_has_read_so_many_batches(passes: int) -> None:
    model, tokenizer = multihead.load_builtin()
    asked = iter(range(10))
    table = multihead.read(
        model,
        TEXTS,
        tokenizer=tokenizer,
        batch_size=2,
        probe=False,
        stop=lambda: next(asked) >= passes,
    )
    assert table.meta["documents"] == 2 * passes
    assert "partial" in table.meta


def test_batches_add_up_to_one_reading() -> None:
    model, tokenizer = multihead.load_builtin()
    tables = [
        multihead.read(model, TEXTS, tokenizer=tokenizer, batch_size=size, probe=False)
        for size in (1, 2, 5)
    ]
    for table in tables[1:]:
        assert table.meta["documents"] == tables[0].meta["documents"] == len(TEXTS)
        for column in ("entropy", "previous", "self", "distance"):
            assert table.count(column).tolist() == tables[0].count(column).tolist(), column
            assert table.value(column) == pytest.approx(
                tables[0].value(column), rel=1e-4, abs=1e-6, nan_ok=True
            ), column


def test_the_probe_is_for_causal_text_models() -> None:
    model = multihead.TransformerBlock(16, 2, hidden_dim=32).eval()
    with pytest.raises(multihead.MultiheadError, match=r"probe=True: TransformerBlock isn't"):
        multihead.read(model, ["text"], probe=True)
