"""Which keys of a map are the patches of a picture, and the grid that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import multihead
from multihead.reader.pictures import Picture, find_pictures

VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=4
)


def llava(**options: Any) -> Any:
    torch.manual_seed(0)
    text = tf.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
    )
    vision = tf.CLIPVisionConfig(**VISION, image_size=12)
    config = tf.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=7, vision_feature_layer=-1, **options
    )
    return tf.LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize(("strategy", "first"), [("default", 1), ("full", 2)])
def test_the_tokens_of_a_picture_are_its_patches(strategy: str, first: int) -> None:
    """Without the class token of the tower, or after it."""
    model = llava(vision_feature_select_strategy=strategy)
    number = 9 if strategy == "default" else 10
    inputs = {
        "input_ids": torch.tensor([[1, *[7] * number, 3, 4]]),
        "pixel_values": torch.randn(1, 3, 12, 12),
    }
    found, tower = multihead.read_maps(model, inputs, ["L0.H1", "vision_tower.L0.H1"])
    assert found.pictures == [Picture(list(range(first, first + 9)), (3, 3))]
    assert tower.pictures == [Picture(list(range(1, 10)), (3, 3))]
    grid = found.on_picture(-1)
    assert grid[1, 2] == found.weights[-1, first + 5] and grid.shape == (3, 3)
    assert found.contributions is not None
    assert (
        found.on_picture(number + 1, contributions=True)[0, 0]
        == found.contributions[number + 1, first]
    )
    assert multihead.read_maps(model, inputs, "L0.H1", keys=5).pictures == []


def test_two_pictures_in_a_text() -> None:
    model = llava(vision_feature_select_strategy="default")
    for between in ([], [5, 6]):
        inputs = {
            "input_ids": torch.tensor([[1, *[7] * 9, *between, *[7] * 9, 3]]),
            "pixel_values": torch.randn(2, 3, 12, 12),
        }
        found = multihead.read_maps(model, inputs, "L0.H0")
        start = 10 + len(between)
        assert [p.keys for p in found.pictures] == [[*range(1, 10)], [*range(start, start + 9)]]
        assert found.on_picture(-1, 1)[0, 1] == found.weights[-1, start + 1]


@pytest.mark.parametrize("size", [(12, 12), (8, 16)])
def test_a_vision_transformer(size: tuple[int, int]) -> None:
    for model in (
        tf.ViTModel(tf.ViTConfig(**VISION, image_size=size)),
        tf.Dinov2WithRegistersModel(
            tf.Dinov2WithRegistersConfig(**VISION, image_size=12, num_register_tokens=4)
        ),
        tf.SiglipVisionModel(tf.SiglipVisionConfig(**VISION, image_size=12)),
    ):
        is_vit = isinstance(model, tf.ViTModel)
        height, width = size if is_vit else (12, 12)
        inputs = {"pixel_values": torch.randn(1, 3, height, width)}
        label = multihead.read(model, [inputs]).heads[0].head
        found = multihead.read_maps(model.eval(), inputs, label)
        (picture,) = found.pictures
        assert picture.shape == (height // 4, width // 4)
        assert picture.keys[-1] == found.weights.shape[1] - 1
        assert found.on_picture(0)[-1, -1] == found.weights[0, -1]


def test_qwen_merges_patches() -> None:
    ids = torch.tensor([[1, 9, *[7] * 6, 10, 3]])
    sizes = {"image_grid_thw": torch.tensor([[1, 4, 6]])}
    assert find_pictures(nn.Linear(1, 1), sizes, {}, ids.shape[1], list(range(2, 8))) == [
        Picture([2, 3, 4, 5, 6, 7], (2, 3))
    ]
    video = {"video_grid_thw": torch.tensor([[2, 4, 4]])}
    shapes = [p.shape for p in find_pictures(nn.Linear(1, 1), video, {}, 20, list(range(1, 9)))]
    assert shapes == [(2, 2), (2, 2)]


def test_where_no_grid_is_known_there_is_no_picture() -> None:
    class PerceiverResampler(nn.Module):
        pass

    grids = {"embed": (1, 4, 4)}
    assert find_pictures(nn.Linear(1, 1), {}, grids, 9, [1, 2, 3, 4])[0].shape == (2, 2)
    assert find_pictures(PerceiverResampler(), {}, grids, 9, [1, 2, 3, 4]) == []
    assert find_pictures(nn.Linear(1, 1), {}, grids, 9, [1, 2, 3]) == []
    assert find_pictures(nn.Linear(1, 1), {}, grids, 9, []) == []
    assert find_pictures(nn.Linear(1, 1), {}, grids, 60, None) == []
    assert find_pictures(nn.Linear(1, 1), {}, {}, 9, None) == []


def test_errors_and_a_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = tf.ViTModel(tf.ViTConfig(**VISION, image_size=12)).eval()
    inputs = {"pixel_values": torch.randn(1, 3, 12, 12)}
    found = multihead.read_maps(model, inputs, "L0.H1", rows=[0, 4])
    found.save_picture(tmp_path / "map.png", 4, image=np.zeros((12, 12, 3)))
    assert (tmp_path / "map.png").stat().st_size > 1000
    for row, picture, words in ((3, 0, "row=3: expected one"), (4, 1, "picture=1: 1 pictures")):
        with pytest.raises(multihead.MultiheadError, match=words):
            found.on_picture(row, picture)
