"""The oracle on cases small enough to be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from oracles.statistics import MASSES, Call, head_updates, statistics

LN2 = np.log(2.0)


def call(**changes: object) -> Call:
    """One text of three tokens (7, 4, 7), one causal head of width 1 whose update is a number."""
    given = dict(
        weights=np.array([[[[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]]]]),
        values=np.array([[[[1.0], [-2.0], [4.0]]]]),
        allowed=np.tril(np.ones((3, 3), bool))[None],
        projection=np.array([[2.0]]),
        real_queries=np.ones((1, 3), bool),
        real_keys=np.ones((1, 3), bool),
        ids=np.array([[7, 4, 7]]),
        special=frozenset({4}),
    )
    return Call(**(given | changes))  # type: ignore[arg-type]


def test_two_heads_worked_example() -> None:
    """Two heads give (8, 18); W_O = [[1, 1], [1, -1]]; the update is (26, -10), the sum of (8, 8)
    and (18, -18).
    """
    one = np.ones((1, 2, 1, 1))
    both = call(
        weights=one,
        values=np.array([8.0, 18.0]).reshape(1, 2, 1, 1),
        allowed=one[:, 0] > 0,
        projection=np.array([[1.0, 1.0], [1.0, -1.0]]),
        real_queries=np.ones((1, 1), bool),
        real_keys=np.ones((1, 1), bool),
        ids=np.array([[7]]),
    )
    updates = head_updates(both)[0, :, 0]
    np.testing.assert_array_equal(updates, [[8, 8], [18, -18]])
    np.testing.assert_array_equal(updates.sum(axis=0), [26, -10])
    found = statistics([both]).values
    np.testing.assert_allclose(found["norm"], [8 * 2**0.5, 18 * 2**0.5])
    np.testing.assert_allclose(found["share"], [(8 * 26 - 8 * 10) / 776, (18 * 26 + 18 * 10) / 776])
    np.testing.assert_allclose(found["cancellation"], [1, 1])


def test_means() -> None:
    found = statistics([call()])
    entropies = [0, -(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), 1.5 * LN2]
    expected = {
        "entropy": np.mean(entropies),
        "entropy_ratio": (entropies[1] / LN2 + entropies[2] / np.log(3)) / 2,
        "confidence": (1 + 0.75 + 0.5) / 3,
        "distance": (0 + 0.25 + (1.0 + 0.25)) / 3,
        "norm": (2 + 2.5 + 2) / 3,  # updates 2, 2 * (0.25 - 1.5), 2 * (0.5 - 0.5 + 1)
        "share": 1,  # the only head
        "cancellation": (1 + 2.5 / 3.5 + 2 / 4) / 3,
        "reach": (2 + 3.5 + 4) / (2 + 3 + 14 / 3),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found.values[name], [value], err_msg=name)
    assert found.counts["entropy"] == [3]
    assert found.counts["entropy_ratio"] == [2]


def test_masses() -> None:
    """Contributions are (2), (0.5, 3), (1, 1, 2); reading evenly they are (2), (1, 2), (2/3, 4/3,
    8/3).
    """
    found = statistics([call()])
    expected = {  # by weight, by contribution, evenly, rows
        "previous": ((0.25 + 0.25) / 2, (0.5 + 1) / 7.5, (1 + 4 / 3) / (3 + 14 / 3), 2),
        "self": ((1 + 0.75 + 0.25) / 3, (2 + 3 + 2) / 9.5, (2 + 2 + 8 / 3) / (5 + 14 / 3), 3),
        "first": ((1 + 0.25 + 0.5) / 3, (2 + 0.5 + 1) / 9.5, (2 + 1 + 2 / 3) / (5 + 14 / 3), 3),
        "special": ((0.75 + 0.25) / 2, (3 + 1) / 7.5, (2 + 4 / 3) / (3 + 14 / 3), 2),
        "duplicate": (0.5, 1 / 4, 1 / 7, 1),  # only the last row has an earlier 7
        "induction": (0.25, 1 / 4, 2 / 7, 1),  # and the key after that
    }
    for name, (weight, contribution, even, rows) in expected.items():
        np.testing.assert_allclose(found.values[name], [weight], err_msg=name)
        np.testing.assert_allclose(
            found.values[f"contribution:{name}"], [contribution], err_msg=name
        )
        np.testing.assert_allclose(found.values[f"even:{name}"], [even], err_msg=name)
        assert found.counts[name] == [rows]
    assert found.values["next"] is None
    assert found.counts["next"] == [0]


def test_received() -> None:
    """Key 0 gets 1 + 0.25 + 0.5 of three readers, key 1 gets 0.75 + 0.25 of two, key 2 0.25 of
    one.
    """
    for readers, part, at, number in (
        (3, 1.75 / 3, 0, 1),
        (2, 1.75 / 3, 0, 2),
        (1, 1.75 / 3, 0, 3),
    ):
        found = statistics([call()], readers)
        np.testing.assert_allclose(
            [found.values["received"], found.values["received_at"]], [[part], [at]]
        )
        assert found.counts["received"] == [number]
    assert statistics([call()], 4).values["received"] is None
    padded = call(
        real_queries=np.array([[False, True, True]]), real_keys=np.array([[False, True, True]])
    )
    found = statistics([padded], 2)  # the first key is padding, the second becomes number 0
    np.testing.assert_allclose(
        [found.values["received"], found.values["received_at"]], [[0.5], [0]]
    )
    np.testing.assert_allclose(
        statistics([call(), padded], 2).values["received"], [(1.75 / 3 + 0.5) / 2]
    )


def test_a_class_a_number_and_squares() -> None:
    found = statistics([call(some=np.array([[False, True, True]]))])
    np.testing.assert_allclose(found.values["class:some"], [(0.75 + 0.5) / 2])
    np.testing.assert_allclose(found.values["contribution:class:some"], [6 / 7.5])
    cos = np.cos(np.arange(3))
    np.testing.assert_allclose(found.values["number"], [([1.75, 1, 0.25] @ cos) / 3])
    np.testing.assert_allclose(
        found.values["squares"], [([0.3125, 0.625, 0.0625] @ cos) / 2]
    )  # not of row 0


def test_left_padding() -> None:
    """The first token is padding with the text's own 7: it is no row, no first key and no
    induction's beginning.
    """
    weights = np.array([[[[1 / 3] * 3, [0, 1, 0], [0, 0.25, 0.75]]]])
    real = np.array([[False, True, True]])
    allowed = np.tril(np.ones((3, 3), bool))[None] & real[:, None]
    found = statistics([call(weights=weights, allowed=allowed, real_queries=real, real_keys=real)])
    np.testing.assert_allclose(found.values["first"], [(1 + 0.25) / 2])
    np.testing.assert_allclose(found.values["previous"], [0.25])
    np.testing.assert_allclose(found.values["distance"], [0.25 / 2])
    assert found.counts["first"] == [2]
    assert found.counts["previous"] == [1]
    assert found.values["duplicate"] is None
    assert found.values["induction"] is None


def test_first_key_beyond_the_window() -> None:
    window = np.array([[[True, False, False], [True, True, False], [False, True, True]]])
    weights = np.array([[[[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]]]])
    found = statistics([call(weights=weights, allowed=window)])
    np.testing.assert_allclose(found.values["first"], [0.75])
    assert found.counts["first"] == [2]
    assert found.values["duplicate"] is None  # the earlier 7 may not be read, the key after it may
    np.testing.assert_allclose(found.values["induction"], [0.5])


def test_sinks_are_not_made_up_for() -> None:
    half = statistics([call(weights=call().weights / 2)])
    whole = statistics([call()])
    for name in MASSES:
        if whole.values[name] is not None:
            np.testing.assert_allclose(half.values[name], whole.values[name] / 2)
            np.testing.assert_allclose(
                half.values[f"contribution:{name}"], whole.values[f"contribution:{name}"]
            )
    np.testing.assert_allclose(half.values["distance"], whole.values["distance"] / 2)
    np.testing.assert_allclose(half.values["entropy"], whole.values["entropy"] / 2 + LN2 / 2)


def test_cross_attention_has_no_offsets() -> None:
    found = statistics(
        [call(cross=True, ids=None, special=None, real_keys=np.array([[False, True, True]]))]
    )
    for name in ("distance", "previous", "self", "next", "duplicate", "induction", "special"):
        assert found.values[name] is None
    np.testing.assert_allclose(found.values["first"], [(0.75 + 0.25) / 2])


def test_pooling_over_calls_weighs_rows_not_calls() -> None:
    short = call(
        weights=call().weights[:, :, :1, :1],
        values=call().values[:, :, :1],
        allowed=np.ones((1, 1, 1), bool),
        real_queries=np.ones((1, 1), bool),
        real_keys=np.ones((1, 1), bool),
        ids=np.array([[7]]),
    )
    found = statistics([call(), short])
    np.testing.assert_allclose(found.values["confidence"], [(1 + 0.75 + 0.5 + 1) / 4])
    np.testing.assert_allclose(found.values["contribution:self"], [(2 + 3 + 2 + 2) / 11.5])


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_value_heads_repeat(groups: int) -> None:
    """Head h reads value head h // (H/G)."""
    heads = 6
    weights = np.ones((1, heads, 1, 1))
    values = np.arange(1.0, groups + 1).reshape(1, groups, 1, 1)
    found = head_updates(
        call(
            weights=weights,
            values=values,
            allowed=np.ones((1, 1, 1), bool),
            projection=np.eye(heads),
        )
    )
    np.testing.assert_array_equal(
        found[0, :, 0].sum(axis=1), np.repeat(np.arange(1.0, groups + 1), heads // groups)
    )
