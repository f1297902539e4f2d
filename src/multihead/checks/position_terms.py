"""Biases by position, as they show in the weights: a curve of distances, ALiBi's slopes, the
entries of a learned table.

A softmax leaves a bias up to a constant of each row. A bias of distances f(i - j) is found up to
one constant, since each distance appears in several rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .evidence import Evidence, Judged
from .finding import BugName

TABLES = r"relative|rel_|bias_table|position_bias|pos_bias"
ALIBI = r"alibi"
CLOSE = 1e-3


@dataclass(frozen=True)
class Curve:
    """A bias of distances.

    Attributes:
        distances: i - j, ascending.
        values: `[H, distances]`, 0 at the distance nearest to 0.
    """

    distances: tuple[int, ...]
    values: Tensor

    @property
    def slopes(self) -> Tensor | None:
        """The factor of minus the distance, `[H]`, where the bias is linear in it, whatever its
        sign; None where it isn't.
        """
        d = torch.tensor(self.distances, dtype=torch.float64).abs()
        if len(d) < 3:
            return None
        slopes = -(self.values @ d) / d.square().sum()
        error = (self.values + slopes[:, None] * d).abs().max()
        return slopes if error <= CLOSE * self.values.abs().max() else None

    def describe(self) -> str:
        if (slopes := self.slopes) is not None:
            return f"ALiBi slopes {', '.join(f'{s:.4g}' for s in slopes.tolist())}"
        heads = []
        for h, values in enumerate(self.values.tolist()):
            pairs = zip(self.distances, values, strict=True)
            heads.append(f"head {h} " + ", ".join(f"{d:+d}: {v:.3g}" for d, v in pairs))
        return f"a bias by i - j ({'; '.join(heads)})"


def find_curve(bias: Tensor) -> Curve | None:
    """The bias `[H, L, S]`, each row up to a constant and NaN where unknown, as a curve of
    distances; None where it isn't one.

    >>> at = torch.arange(4)
    >>> find_curve(-0.5 * (at[:, None] - at).abs()[None].double()).describe()
    'ALiBi slopes 0.5'
    """
    length, size = bias.shape[1:]
    known = bias.isfinite().all(0)
    distance = torch.arange(length)[:, None] - torch.arange(size)
    distances = tuple(sorted(set(distance[known].tolist())))
    rows, keys = known.nonzero(as_tuple=True)
    column = torch.tensor([distances.index(d) for d in distance[known].tolist()])
    design = torch.zeros(len(rows), len(distances) + length, dtype=torch.float64)
    design[torch.arange(len(rows)), column] = 1.0
    design[torch.arange(len(rows)), len(distances) + rows] = 1.0
    y = bias[:, rows, keys].T
    # Of several solutions the smallest, by the pseudoinverse.
    solution = torch.linalg.pinv(design) @ y
    scale = y.abs().max().clamp_min(1e-9)
    if not (design @ solution - y).abs().max() <= CLOSE * scale:
        return None
    values = solution[: len(distances)].T
    nearest = min(range(len(distances)), key=lambda n: abs(distances[n]))
    return Curve(distances, values - values[:, nearest : nearest + 1])


def describe_bias(judged: Judged, evidence: Evidence, bias: Tensor) -> str:
    """The bias as a part of a sentence; judge where it comes from."""
    curve = find_curve(bias)
    source = None if evidence.module is None else _find_source(evidence.module, bias, curve)
    if curve is None:
        tables = [] if evidence.module is None else list(_tables(evidence.module, len(bias)))
        if source is None and tables and _find_absolute(judged, evidence, bias, tables[0][0]):
            return ", with a bias by position"
        if source is None:
            judged.unjudged.append(
                "a bias by position: it is no function of the distance i - j, and no parameter or"
                " buffer of such values was found"
            )
        return f", with a bias by position ({source})" if source else ", with a bias by position"
    slopes = curve.slopes
    if slopes is not None and slopes.min() < 0 and evidence.declared(ALIBI):
        h = int(slopes.argmin())
        judged.find(
            BugName.BIAS,
            f"In head {h} the bias grows by {-slopes[h]:.4g} with each token of distance, instead"
            " of falling: distant keys weigh more than near ones.",
            evidence.example,
            "ALiBi subtracts slope * (i - j) from the scores.",
        )
    if (
        slopes is not None
        and len(slopes) > 1
        and slopes.max() - slopes.min() < 1e-6 * slopes.abs().max()
        and evidence.declared(ALIBI)
    ):
        judged.unjudged.append(
            f"the slopes of ALiBi: all heads have the same, {slopes[0]:.4g}; in the paper each head"
            " has one of its own"
        )
    tables = [] if evidence.module is None else list(_tables(evidence.module, len(bias)))
    if source is None and tables:
        judged.unjudged.append(
            f"the bias by position: its values aren't entries of {tables[0][0]}, each distance one"
        )
    return f", with {curve.describe()}" + (f", {source}" if source else "")


def _find_absolute(judged: Judged, evidence: Evidence, bias: Tensor, table: str) -> bool:
    """A table of relative positions whose entries aren't read by how far tokens are apart: in a
    row, or in a grid of two or three axes, also with a first token by itself.
    """
    length, size = bias.shape[1:]
    if length != size or length < 4 or not re.search("rel", table):
        return False
    for first in (0, 1):
        for grid in _grids(length - first):
            at = torch.cartesian_prod(*(torch.arange(n) for n in grid)).reshape(-1, len(grid))
            offsets = (at[:, None] - at).tolist()
            keys = {
                tuple(o): n for n, o in enumerate(sorted({tuple(o) for r in offsets for o in r}))
            }
            classes = torch.arange(length * length).view(length, length) + len(keys)
            classes[first:, first:] = torch.tensor([[keys[tuple(o)] for o in r] for r in offsets])
            if _fits_classes(bias, classes):
                return False
    step = bias.diff(dim=-1)
    change = (step[:, 1:, 1:] - step[:, :-1, :-1]).nan_to_num(0.0)
    h, i, j = (change.abs() == change.abs().max()).nonzero()[0].tolist()
    judged.find(
        BugName.BIAS,
        f"{table} is one of relative positions, but its bias isn't a function of them. In head {h}"
        f" it grows by {step[h, i, j]:.4g} from key {j} to key {j + 1} for query {i}, and by"
        f" {step[h, i + 1, j + 1]:.4g} from key {j + 1} to key {j + 2} for query {i + 1}.",
        evidence.example,
        "The index of the table: the position of the key minus that of the query.",
    )
    return True


def _grids(length: int) -> Iterator[tuple[int, ...]]:
    """The sides of grids of so many places, of up to three axes."""
    yield (length,)
    for a in range(2, length):
        if length % a == 0:
            yield (a, length // a)
            yield from ((a, b, length // a // b) for b in range(2, length) if length // a % b == 0)


def _fits_classes(bias: Tensor, classes: Tensor) -> bool:
    """Whether a bias is, up to a constant of each row, a number for each class of places."""
    known = bias.isfinite().all(0)
    rows, _ = known.nonzero(as_tuple=True)
    names, column = classes[known].unique(return_inverse=True)
    design = torch.zeros(len(rows), len(names) + len(classes), dtype=torch.float64)
    design[torch.arange(len(rows)), column] = 1.0
    design[torch.arange(len(rows)), len(names) + rows] = 1.0
    y = bias[:, known].T
    error = (design @ (torch.linalg.pinv(design) @ y) - y).abs().max()
    return bool(error <= CLOSE * y.abs().max().clamp_min(1e-9))


def _tables(module: nn.Module, heads: int) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a number for each entry and head, as `[entries, H]`."""
    for name, p in module.named_parameters():
        if not re.search(TABLES, name) or p.ndim < 2:
            continue
        t = p.detach().double()
        if t.shape[-1] == heads:
            yield name, t.reshape(-1, heads)
        elif t.shape[0] == heads:
            yield name, t.reshape(heads, -1).T
        elif t.shape[1] == heads and t.shape[0] == 1:
            yield name, t[0].reshape(heads, -1).T


def _find_source(module: nn.Module, bias: Tensor, curve: Curve | None) -> str | None:
    """The parameters that give these values."""
    heads, length, size = bias.shape
    known = bias.isfinite()

    def is_bias(t: Tensor) -> bool:
        difference = (t - bias).where(known, torch.nan)
        spread = difference - difference.nanmean(-1, keepdim=True)
        return bool(spread.abs().nan_to_num(0.0).max() <= CLOSE * bias.abs().nan_to_num().max())

    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    indices = {n: t for n, t in tensors.items() if not t.is_floating_point() and t.ndim == 2}
    for name, table in _tables(module, heads):
        for index_name, index in indices.items():
            part = index[:length, :size].long()
            if part.shape != (length, size) or int(part.max()) >= len(table) or part.min() < 0:
                continue
            if is_bias(table[part].permute(2, 0, 1)):
                return f"of {name} at {index_name}"
        entries = None if curve is None else _find_entries(table, curve)
        if entries is not None and curve is not None:
            words = ", ".join(f"{d:+d} {e}" for d, e in zip(curve.distances, entries, strict=True))
            return f"of {name}; the entry of each distance: {words}"
    for name, t in tensors.items():
        if t.is_floating_point() and t.ndim >= 2 and min(t.shape[-2:]) >= max(length, size):
            part = t.detach().double()[..., :length, :size].reshape(-1, length, size)
            if len(part) in (1, heads) and is_bias(part.expand(heads, -1, -1)):
                return f"of {name}"
    return None


def _find_entries(table: Tensor, curve: Curve) -> list[int] | None:
    """The entry of `table [entries, H]` that each distance reads, up to a constant of each head."""
    values = curve.values.T  # [distances, H]
    largest = values.abs().max()
    for entry in table:
        offset = entry - values[0]
        gaps = (values[:, None] + offset - table).abs().amax(-1)  # [distances, entries]
        if gaps.amin(1).max() <= CLOSE * largest:
            return [int(n) for n in gaps.argmin(1)]
    return None
