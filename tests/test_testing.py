"""`assert_attention` fails like a test, with the report."""

from __future__ import annotations

import pytest

from checks.samples import Separate
from checks.test_variants import Low
from multihead.testing import assert_attention


def test_the_helper_fails_with_the_report() -> None:
    assert_attention(Separate(), causal=False)
    with pytest.raises(AssertionError, match="missing or wrong scale"):
        assert_attention(Separate(scale=1.0))
    with pytest.raises(AssertionError, match="not judged"):
        assert_attention(Low())
    assert_attention(Low(), partial=True)
    with pytest.raises(TypeError, match="casual"):
        assert_attention(Separate(), casual=True)
