"""Zero patterns of weights have names."""

from __future__ import annotations

import pytest
import torch

from multihead.checks.patterns import name_pattern

AT = torch.arange(6)
DISTANCE = AT[:, None] - AT
START = AT - (AT - 2).clamp_min(0)[:, None]
CENTRE = AT - AT.clamp(1, 4)[:, None]


@pytest.mark.parametrize(
    ("reads", "name", "words"),
    [
        (DISTANCE > -9, "all keys", "all keys"),
        (DISTANCE >= 0, "causal", "the token itself"),
        (DISTANCE > 0, "strictly causal", "row 0 reads nothing"),
        ((DISTANCE > 0) | (AT == 0)[:, None], "strictly causal", "row 0 reads all keys"),
        ((DISTANCE > 0) | ((AT == 0)[:, None] & (AT == 0)), "strictly causal", "reads 1 keys"),
        (DISTANCE != 0, "all but itself", "but the token itself"),
        (DISTANCE >= -1, "ahead", "itself and the next one"),
        (DISTANCE >= -3, "ahead", "3 later ones"),
        ((DISTANCE >= 0) & (DISTANCE < 3), "window", "from token i - 2 to i +0"),
        (DISTANCE.abs() <= 1, "window", "from token i - 1 to i +1"),
        (AT[:, None] // 2 == AT // 2, "blocks", "2 tokens"),
        ((AT[:, None] // 3 == AT // 3) & (DISTANCE >= 0), "blocks", "causal within each"),
        (DISTANCE >= 2, "strictly causal", "at least 2 before the token"),
        ((DISTANCE >= 1) & (DISTANCE < 3), "window", "from token i - 2 to i -1"),
        ((START >= 0) & (START < 3), "shifted window", "counted from its left edge"),
        (CENTRE.abs() <= 1, "window", "shifted at the edges"),
        (DISTANCE % 2 == 0, "unknown", "no name"),
        ((DISTANCE >= 0) & ~((AT == 1) & (AT == 4)[:, None]), "unknown", "query 4 doesn't read"),
        (DISTANCE > 9, "unknown", "no name"),
    ],
)
def test_names(reads: torch.Tensor, name: str, words: str) -> None:
    pattern = name_pattern(reads)
    assert pattern.name == name and words in pattern.description
    assert name != "ahead" or pattern.ahead > 0
