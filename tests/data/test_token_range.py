"""A range of the tokens of a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from multihead.data.token_range import count_tokens, cut_tokens

IDS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ({"input_ids": IDS}, 5),
        ({"inputs_embeds": torch.ones(2, 5, 3), "attention_mask": IDS}, 5),
        ({"input_ids": IDS, "labels": IDS, "use_cache": False, "position_ids": None}, 5),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 6)}, None),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 5, 5)}, None),
        ({"input_ids": IDS, "past_key_values": tf.DynamicCache()}, None),
        ({"input_ids": IDS, "logits_to_keep": torch.tensor([1])}, None),
        ({"input_ids": IDS, "pixel_values": torch.ones(1)}, None),
        ({"attention_mask": IDS}, None),
    ],
)
def test_tokens_that_can_be_cut(inputs: dict[str, Any], tokens: int | None) -> None:
    assert count_tokens(inputs) == tokens


def test_a_part_has_its_own_entries() -> None:
    part = cut_tokens({"input_ids": IDS, "position_ids": IDS + 7, "labels": IDS, "x": None}, 1, 2)
    assert part.keys() == {"input_ids", "position_ids"}
    assert part["input_ids"].tolist() == [[1, 2], [6, 7]]
    assert part["position_ids"].tolist() == [[8, 9], [13, 14]]
