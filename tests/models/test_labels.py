"""Labels of attention modules, the stack they lie in, and whether they read another sequence."""

from __future__ import annotations

import pytest
from torch import nn

from multihead.models.labels import is_cross, label_paths, stack_of


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["model.layers.0.self_attn", "model.layers.11.self_attn"], ["L0", "L11"]),
        (["transformer.h.3.attn", "transformer.h.3.crossattention"], ["L3", "L3.cross"]),
        (
            [
                "model.encoder.layers.0.self_attn",
                "model.decoder.layers.0.self_attn",
                "model.decoder.layers.0.encoder_attn",
            ],
            ["encoder.L0", "decoder.L0", "decoder.L0.cross"],
        ),
        (
            ["encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.1.EncDecAttention"],
            ["encoder.L0", "decoder.L0.cross"],
        ),
        (
            ["vision_model.encoder.layers.1.self_attn", "text_model.encoder.layers.1.self_attn"],
            ["vision_model.L1", "text_model.L1"],
        ),
        (["attn"], ["L0"]),
        (["blocks.0.local", "blocks.0.wide"], ["L0.local", "L0.wide"]),
        (["a.0.attn", "b.0.attn"], ["a.0.attn", "b.0.attn"]),
        (["0.model.layer.0.self", "0.model.layer.1.self"], ["L0", "L1"]),  # within an nn.Sequential
        (["1.attn", "2.attn"], ["L1", "L2"]),
        (["1.attn"], ["L1"]),
        (
            ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "head.attention"],
            ["L0", "L1", "head.attention"],
        ),
    ],
)
def test_labels_are_short_and_unique(paths: list[str], labels: list[str]) -> None:
    assert label_paths(paths) == labels


@pytest.mark.parametrize(
    ("path", "stack"),
    [
        ("model.decoder.layers.0.encoder_attn", "decoder"),
        ("model.encoder.layers.3.self_attn", "encoder"),
        ("decoder.bert.encoder.layer.0.attention.self", "decoder"),
        ("text_decoder.bert.encoder.layer.0.attention.self", "decoder"),
        ("text_encoder.layers.0.self_attn", "encoder"),
        ("vision_model.layers.1.self_attn", "vision_model"),
        ("audio_tower.blocks.1.attn", "audio_tower"),
        ("model.layers.12.self_attn", ""),
        ("encoder_attn", ""),
        ("", ""),
    ],
)
def test_the_stack_is_read_from_the_path_before_the_layer(path: str, stack: str) -> None:
    assert stack_of(path) == stack


def test_cross_attention_is_known_by_attribute_class_and_path() -> None:
    class EncDecAttention(nn.Module):
        pass

    flagged = nn.Module()
    flagged.is_cross_attention = True
    assert is_cross("a.0.attn", flagged) and is_cross("a.0.attn", EncDecAttention())
    assert is_cross("a.0.crossattention.self", nn.Module())
    assert not is_cross("a.0.attn", nn.Module()) and not is_cross("cross.0.attn.self", nn.Module())
