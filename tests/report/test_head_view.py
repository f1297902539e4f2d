"""Heads as a page shows them: first differences, reasons, windows, and the text of a cell."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from multihead.checks.report import CallWeights
from multihead.report.head_view import MOST, HeadView, view_calls


def weights(heads: int = 2, length: int = 5, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (batch, heads, length, length)
    return torch.randn(size, generator=generator, dtype=torch.float64).softmax(-1)


def view(a: Tensor | None, b: Tensor | None, *whys: str) -> list[HeadView]:
    [call] = view_calls([CallWeights("with its inputs alone", a, b, *whys)])
    return call.heads


def test_the_first_and_the_largest_difference() -> None:
    a, b = weights(), weights()
    b[0, 1, 2, 3] += 1e-3
    b[0, 1, 4, 0] -= 0.25
    b[0, 0] += 1e-9
    same, other = view(a, b)
    assert same.first is None and not same.differs and "equal (to 1e-09)" in same.verdict
    assert other.first == (2, 3) and abs((other.largest or 0) - 0.25) < 1e-12
    read, expected = float(a[0, 1, 2, 3]), float(b[0, 1, 2, 3])
    assert f"query 2, key 3: {read:.4g} was read out, {expected:.4g} is" in other.verdict
    assert "largest difference is 0.25, at query 4, key 0" in other.verdict
    read_table, expected_table, difference = other.tables(1.0, 0.25)
    for table in (read_table, expected_table, difference):
        marked = [
            (i, j)
            for i, row in enumerate(table.rows)
            for j, cell in enumerate(row)
            if "first" in cell.style
        ]
        assert marked == [(2, 3)]
    assert difference.rows[4][0].text == "+0.25" and difference.rows[4][0].style == "a24"
    assert difference.rows[0][0].text == "0" and difference.rows[0][0].style == "none"


def test_a_nan_is_a_difference_unless_both_have_it() -> None:
    a, b = weights(), weights()
    a[0, 0, 1] = torch.nan
    a[0, 1, 1] = b[0, 1, 1] = torch.nan
    other, same = view(a, b)
    assert other.first == (1, 0) and np.isnan(other.largest or 0.0)
    assert "query 1, key 0: NaN was read out" in other.verdict
    assert other.tables(1.0, 1.0)[0].rows[1][2].text == "NaN" and other.pattern == ""
    assert same.first is None
    [call] = view_calls([CallWeights("x", a, b)])
    assert call.scale <= 1 and call.difference == 0


def test_infinities_are_equal_to_themselves_alone() -> None:
    a, b = weights(), weights()
    a[0, :, 1, 1] = torch.inf
    b[0, 0, 1, 1] = torch.inf
    same, other = view(a, b)
    assert not same.differs and other.first == (1, 1) and other.largest == torch.inf
    read, _, difference = (t.rows[1][1].text for t in other.tables(1.0, 1.0))
    assert read == "∞" and difference == "∞" and "inf was read out" in other.verdict


def test_what_is_missing_has_its_reason_in_its_place() -> None:
    for head in view(None, weights(), "it isn't linear in the values"):
        read, expected, difference = head.tables(1.0, 0.0)
        assert not read.rows and read.reason == "Not read out: it isn't linear in the values."
        assert expected.rows and "no A as read out" in difference.reason
    [none] = view(None, None, "no values", "no definition")
    reasons = [table.reason for table in none.tables(1.0, 0.0)]
    assert reasons[:2] == ["Not read out: no values.", "There is none: no definition."]
    assert reasons[2]
    for whys, words in [
        (("no values", "no values"), "Not read out: no values."),
        (("a", "b"), "Not read out: a. A of the definition: b."),
        ((), "Not read out: the check gives no reason."),
    ]:
        [call] = view_calls([CallWeights("x", None, None, *whys)])
        assert call.why_nothing == words
    assert view_calls([CallWeights("x", weights())])[0].why_nothing == ""
    third = view(weights(2), weights(3))[2]
    assert third.weights is None
    assert third.verdict == "Not read out: the code has 2 heads, and 3 were expected."
    third = view(weights(3), weights(2))[2]
    assert third.expected is None and "2 heads, and 3 were read out" in third.why_no_expected
    shapes = view(weights(length=5), weights(length=6))[0]
    assert shapes.largest is None and "[5, 5] was read out, the definition has [6, 6]" in (
        shapes.tables(1.0, 0.0)[2].reason
    )


def test_other_batch_elements_are_compared_too() -> None:
    a, b = weights(batch=3), weights(batch=3)
    b[2, 1, 0, 0] += 0.5
    same, other = view(a, b)
    assert not same.differs and other.differs and other.first is None and other.others == (2,)
    assert "in batch element 0, but not in 2" in other.verdict


def test_a_long_sequence_shows_the_part_with_the_first_difference() -> None:
    a, b = weights(1, 100), weights(1, 100)
    [same] = view(a, b)
    assert same.queries == same.keys == range(MOST)
    b[0, 0, 70, 95] += 0.5
    [other] = view(a, b)
    assert 70 in other.queries and 95 in other.keys and len(other.keys) <= MOST
    table = other.tables(1.0, 1.0)[0]
    row, key = 70 - other.queries.start, 95 - other.keys.start
    assert table.rows[row][key].style.endswith(" first")
    assert len(table.rows) == len(other.queries) and len(table.rows[0]) == len(other.keys)
    shown = other.to_json()
    assert shown["queries"] == other.queries.start
    assert abs(shown["expected"][row][key] - float(b[0, 0, 70, 95])) < 1e-5


def test_cells_show_zero_signs_and_sizes() -> None:
    a = torch.tensor([[0.0, -0.5], [2e3, 0.004]], dtype=torch.float64)[None, None]
    [head] = view(a, None)
    texts = [[cell.text for cell in row] for row in head.tables(2e3, 0.0)[0].rows]
    assert texts == [["0", "−0.50"], ["2e+03", "0.00"]]
    styles = [[cell.style for cell in row] for row in head.tables(1.0, 0.0)[0].rows]
    assert styles == [["none", "b12"], ["c24", "c0"]]


def test_the_zero_pattern_is_named() -> None:
    causal = weights().tril()
    [head, _] = view(causal, weights())
    assert head.pattern == "earlier tokens and the token itself"
    assert head.expected_pattern == "all keys"
    assert view(causal[..., :4], None)[0].pattern == ""
    noise = weights().tril()
    noise[0, 0, 0, 1:] = 3e-8  # as read out of float32
    [head, _] = view(noise, weights().tril())
    assert head.pattern == head.expected_pattern and not head.differs
    assert [c.text for c in head.tables(1.0, 0.0)[0].rows[0][1:]] == ["0"] * 4
