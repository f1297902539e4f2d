"""The oracle's formula is eager attention, and leaving any part of it out would be noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from families import FAMILIES, Family, batches_of, call_of, model_of, stored_calls, twin
from oracles.eager import Stored, formula
from oracles.statistics import Call, Flags, Floats, statistics

RELATIVE, ABSOLUTE = 1e-5, 1e-6  # how closely a reading must agree with the stored probabilities
TELLING = ("entropy", "confidence", "norm", "cancellation", "contribution:first")
FEATURES = [(family, feature) for family in FAMILIES for feature in family.features]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_formula_is_eager_attention(family: Family) -> None:
    for padding in family.paddings():
        for stored, batch in stored_calls(model_of(family), batches_of(family, padding)):
            rows = call_of(family, model_of(family), stored, batch).real_queries[:, None, :, None]
            np.testing.assert_allclose(formula(stored) * rows, stored.weights * rows, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_attention_is_neither_even_nor_saturated(family: Family) -> None:
    for found in twin(family, model_of(family), batches_of(family, "none")).values():
        ratio = found.values["entropy_ratio"]
        assert ratio is not None
        assert ((ratio > 0.1) & (ratio < 0.95)).all()


@pytest.mark.parametrize(
    ("family", "feature"), FEATURES, ids=lambda value: getattr(value, "name", value)
)
def test_leaving_a_feature_out_is_noticed(family: Family, feature: str) -> None:
    """At every head of every site that has the feature: two of the telling statistics move by 100
    tolerances.
    """
    padding = {"padding": family.paddings()[-1]}.get(feature, "none")
    sites: dict[str, tuple[list[Call], list[Call]]] = {}
    for stored, call, changed in changed_calls(family, feature, padding):
        pair = sites.setdefault(stored.site, ([], []))
        pair[0].append(call)
        pair[1].append(changed)
    concerned = {
        site: pair
        for site, pair in sites.items()
        if any(a is not b for a, b in zip(*pair, strict=True))
    }
    assert concerned
    for site, (calls, changed_site) in concerned.items():
        right, wrong = statistics(calls).values, statistics(changed_site).values
        moved = np.stack([moves(right[name], wrong[name]) for name in TELLING])
        if feature == "groups":
            moved = moved[
                :, 1:-1
            ]  # the first and the last head read the same key/value head either way
        assert (np.sort(moved, axis=0)[-2] > 100).all(), (site, moved.round())


def moves(right: Floats | None, wrong: Floats | None) -> Floats:
    """By how many tolerances each head's number moves."""
    assert right is not None
    assert wrong is not None
    return np.abs(right - wrong) / np.maximum(RELATIVE * np.abs(right), ABSOLUTE)


def changed_calls(
    family: Family, feature: str, padding: str
) -> Iterator[tuple[Stored, Call, Call]]:
    """Every call as it is and as it would be without the feature (the same object where the site
    lacks it).
    """
    model = model_of(family)
    batches = batches_of(family, padding)
    bare = [
        {name: value for name, value in batch.items() if "attention_mask" not in name}
        for batch in batches
    ]
    pairs = zip(stored_calls(model, batches), stored_calls(model, bare), strict=True)
    for (stored, batch), (unpadded, _) in pairs:
        call = call_of(family, model, stored, batch)
        rows, keys = stored.allowed.shape[1:]
        real = np.broadcast_to(call.real_keys[:, None, :], stored.allowed.shape)
        earlier: Flags = real & (np.arange(keys) <= np.arange(rows)[:, None])
        changed: Call | None = None
        if feature in ("softcap", "bias", "sinks") and getattr(stored, feature) is not None:
            if np.any(getattr(stored, feature)):
                changed = replace(call, weights=formula(stored, without=frozenset({feature})))
        elif feature == "scale" and not np.isclose(stored.scale, stored.query.shape[-1] ** -0.5):
            changed = replace(call, weights=formula(stored, scale=stored.query.shape[-1] ** -0.5))
        elif feature == "groups":
            repeats = stored.query.shape[1] // stored.value.shape[1]
            changed = replace(
                call,
                weights=formula(stored, tiled=True),
                values=np.tile(stored.value, (1, repeats, 1, 1)),
            )
        elif feature in ("window", "causal", "padding"):
            allowed = {"window": earlier, "causal": real, "padding": unpadded.allowed}[feature]
            windowed = (stored.allowed & earlier == stored.allowed).all() and not call.cross
            if (allowed != stored.allowed).any() and (windowed or feature == "padding"):
                changed = replace(call, weights=formula(stored, allowed=allowed), allowed=allowed)
        yield stored, call, call if changed is None else changed
