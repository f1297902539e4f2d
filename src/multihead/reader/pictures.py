"""The patches of pictures among the keys of a map, and the grid that they make."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import MissingDependency
from ..io import atomic_file
from ..models.instrument import ModuleHook, Tap
from ..models.site import Site

MOST_OTHERS = 16  # class and register tokens before the patches
# Modules that give a fixed number of tokens, none of which is a patch.
RESAMPLERS = ("resampler", "perceiver", "qformer", "abstractor")
SIZES = ("image_grid_thw", "video_grid_thw")  # inputs [N, 3]: frames, rows, columns


@dataclass(frozen=True)
class Picture:
    """Keys that are the patches of one picture, in reading order.

    >>> Picture([1, 2, 3, 4], (2, 2)).shape
    (2, 2)
    """

    keys: list[int]
    shape: tuple[int, int]  # rows and columns; their product is the number of keys


class PatchGrids(Tap):
    """Records the grids in which a model's convolutions divide pictures: batch, rows, columns."""

    def __init__(self) -> None:
        self.grids: dict[str, tuple[int, int, int]] = {}

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> list[ModuleHook]:
        return [
            ModuleHook(module, after=functools.partial(self._record, name))
            for name, module in model.named_modules()
            if isinstance(module, nn.Conv2d)
        ]

    def _record(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if output.ndim == 4:
            self.grids[name] = output.shape[0], output.shape[2], output.shape[3]


def find_pictures(
    model: nn.Module,
    inputs: Mapping[str, Any],
    grids: Mapping[str, tuple[int, int, int]],
    keys: int,
    places: Sequence[int] | None,
) -> list[Picture]:
    """The pictures among the `keys` of a site; none where the grid isn't known.

    Args:
        inputs: the model's inputs; those with the size of each picture are used.
        grids: of the convolutions, by name.
        places: of the keys of a text, those that are a picture's; None where all keys are patches
            (of a vision tower, or of cross-attention to one).

    >>> find_pictures(nn.Linear(2, 2), {}, {"embed": (1, 2, 3)}, 7, None)
    [Picture(keys=[1, 2, 3, 4, 5, 6], shape=(2, 3))]
    """
    if places is None:
        return _of_patches(model, grids, keys)
    if not places:
        return []
    sized = _of_given_sizes(inputs, places)
    if sized is not None:
        return sized
    names = [type(module).__name__.lower() for module in model.modules()]
    if any(word in name for name in names for word in RESAMPLERS):
        return []
    for number, rows, columns in grids.values():
        if len(places) % number:
            continue
        each = len(places) // number
        extra = 1 if each == rows * columns + 1 else 0  # a class token before the patches
        shrink = math.isqrt(rows * columns // (each - extra)) if each > extra else 0
        if not shrink or rows % shrink or columns % shrink:
            continue
        shape = rows // shrink, columns // shrink
        if shape[0] * shape[1] == each - extra:
            return [
                Picture(list(places[n * each + extra : (n + 1) * each]), shape)
                for n in range(number)
            ]
    return []


def _of_patches(
    model: nn.Module, grids: Mapping[str, tuple[int, int, int]], keys: int
) -> list[Picture]:
    """All keys but class and register tokens are the patches of one picture."""
    config: Any = getattr(model, "config", None)
    after = getattr(config, "num_detection_tokens", 0) or 0  # of YOLOS
    fitting = [
        (keys - after - rows * columns, rows, columns)
        for number, rows, columns in grids.values()
        if number == 1 and rows * columns > 1 and 0 <= keys - after - rows * columns <= MOST_OTHERS
    ]
    if not fitting:
        return []
    before, rows, columns = min(fitting)
    return [Picture(list(range(before, before + rows * columns)), (rows, columns))]


def _of_given_sizes(inputs: Mapping[str, Any], places: Sequence[int]) -> list[Picture] | None:
    """Pictures whose patches are given with their grid (Qwen2-VL), of which some are merged into a
    token.
    """
    shapes = []
    for name in SIZES:
        sizes = inputs.get(name)
        if isinstance(sizes, Tensor) and sizes.ndim == 2 and sizes.shape[1] == 3:
            shapes += [(h, w) for t, h, w in sizes.tolist() for _ in range(t)]
    if not shapes:
        return None
    merged = math.isqrt(max(1, sum(h * w for h, w in shapes) // len(places)))
    found, start = [], 0
    for h, w in shapes:
        shape = h // merged, w // merged
        stop = start + shape[0] * shape[1]
        found.append(Picture(list(places[start:stop]), shape))
        start = stop
    return found if start == len(places) else []


def places_of(ids: Tensor | None, valid: Tensor | None, placeholders: Sequence[int]) -> Any:
    """The positions of a text that are a picture's; None where there is no text.

    >>> places_of(torch.tensor([1, 7, 7, 2]), None, [7])
    [1, 2]
    """
    if ids is None:
        return None
    held = torch.isin(ids, torch.tensor(list(placeholders), device=ids.device))
    held = held if valid is None else held & valid
    return held.nonzero().flatten().tolist()


def draw_patches(grid: NDArray[np.float32], path: Path, title: str, image: Any = None) -> None:
    """Draw a grid of values `[rows, columns]` over an image, or alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_patches(np.ones((2, 3), np.float32), Path(folder, "map.png"), "L0.H0")
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency(
            "a plot needs matplotlib; run: pip install 'multihead[plot]'"
        ) from error
    figure = Figure(figsize=(5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    rows, columns = grid.shape
    extent = (0, columns, rows, 0)
    if image is not None:
        axes.imshow(np.asarray(image), extent=extent)
    seen = axes.imshow(
        grid, extent=extent, cmap="viridis", vmin=0, alpha=1 if image is None else 0.6
    )
    axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(seen, ax=axes, shrink=0.8)
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=120)
