"""`Products`: see every product with given matrices while code runs, and change what it returns.

Matrices are recognised by their numbers in the operands of torch's products, whichever module,
view, transpose or einsum they come from. So what a projection takes and returns is known for
modules, parameters and arguments alike, and for projections that several modules share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
# Where the two operands are among the arguments.
_OPERANDS = {
    _ATEN.mm.default: 0,
    _ATEN.bmm.default: 0,
    _ATEN.addmm.default: 1,
    _ATEN.baddbmm.default: 1,
}


class Numbers:
    """A matrix `[in, out]` in a form in which its rows and columns are found by their numbers."""

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self.numbers, self.order = weight.detach().double().flatten().sort()

    def match(self, t: Tensor) -> tuple[Tensor, Tensor] | None:
        """The rows and columns that `t [r, c]` has; -1 for columns of others."""
        num_rows, width = self.shape
        if not t.shape[0] or not t.shape[1] or num_rows % t.shape[0]:
            return None
        top = self._find(t[0])
        at = int((top >= 0).int().argmax())
        if top[at] < 0:
            return None
        first = self._find(t[:, at])
        rows, columns = first // width, (top % width).where(top >= 0, -1)
        same = (first >= 0).all() and (first % width == columns[at]).all()
        return (rows, columns) if same and (top // width == rows[0])[top >= 0].all() else None

    def _find(self, numbers: Tensor) -> Tensor:
        numbers = numbers.detach().double().contiguous()
        at = torch.searchsorted(self.numbers, numbers).clamp_max(len(self.numbers) - 1)
        return self.order[at].where(self.numbers[at] == numbers, -1)


@dataclass
class _Watched:
    """A matrix of so many rows, and what it was multiplied with so far, by the first row and column
    of a part.
    """

    height: int
    change: Tensor | None
    taken: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    num_rows: dict[int, int] = field(default_factory=dict)

    def see(self, operand: Tensor, result: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Note a product `operand [R, r] -> result [R, c]`, and change the result."""
        mine = columns >= 0
        columns, first = columns[mine], int(columns[mine][0])
        start = self.num_rows.get(first, 0)
        self.num_rows[first] = start + len(result)
        # Of a sum of products with parts of the rows, the first changes.
        if self.change is not None and start < len(self.change) and not rows.min():
            change = self.change[start : start + len(result), columns]
            result[: len(change), mine] += change.to(result)
        operand = operand.detach().double().clone()
        self.taken.setdefault((int(rows[0]), first), []).append((rows, operand))

    def collect(self) -> Tensor | None:
        """All that the matrix was multiplied with, `[R, in]`; None where its rows don't agree."""
        # Parts with the same rows and other columns take the same.
        parts = {row: some for (row, _), some in reversed(self.taken.items())}
        rows = [torch.cat([operand for _, operand in some]) for some in parts.values()]
        index = torch.cat([some[0][0] for some in parts.values()]) if parts else torch.empty(0)
        is_whole = sorted(index.tolist()) == list(range(self.height))
        if not is_whole or len({len(part) for part in rows}) != 1:
            return None
        return torch.cat(rows, 1)[:, index.argsort()]


# The products with watched matrices among those of a run, by number: of each of a batch, the
# matrix, whether it is the second operand, and its rows and columns that are used.
Plan = dict[int, list[tuple[int, str, bool, Tensor, Tensor]]]


@dataclass
class Products:
    """Watch products with matrices `[in, out]` by name; `changes` `[R, out]` are added to what they
    return, in the order of the rows that pass.

    Attributes:
        plan: which products those are, as an earlier run found out; found if None.
        seen: after the run, all that each matrix was multiplied with, `[R, in]`.

    >>> weight = torch.randn(3, 2)
    >>> products = Products({"w": Numbers(weight)}, {"w": torch.ones(4, 2)})
    >>> x = torch.randn(4, 3)
    >>> with products:
    ...     y = torch.einsum("ld,de->le", x, weight)
    >>> torch.allclose(y, x @ weight + 1), products.seen["w"].shape
    (True, torch.Size([4, 3]))
    """

    matrices: Mapping[str, Numbers]
    changes: Mapping[str, Tensor] = field(default_factory=dict)
    plan: Plan | None = None
    seen: dict[str, Tensor] = field(default_factory=dict)

    def __enter__(self) -> Products:
        self._mode = _Mode(self.matrices, self.changes, self.plan)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        found = {name: watched.collect() for name, watched in self._mode.watched.items()}
        self.seen = {name: taken for name, taken in found.items() if taken is not None}
        self.plan = self._mode.plan


class _Mode(TorchDispatchMode):
    def __init__(
        self, matrices: Mapping[str, Numbers], changes: Mapping[str, Tensor], plan: Plan | None
    ) -> None:
        super().__init__()
        self.matrices, self.count = matrices, 0
        self.watched = {n: _Watched(m.shape[0], changes.get(n)) for n, m in matrices.items()}
        self.plan: Plan = {} if plan is None else plan
        self.is_planned = plan is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _OPERANDS:
            first, second = args[_OPERANDS[func] :][:2]
            if first.ndim == 2:
                first, second, result = first[None], second[None], out[None]
            else:
                result = out
            self._see(first, second, result)
        elif func is _ATEN.convolution.default and args[1].shape[2:].numel() == 1:
            x, kernel = args[0].flatten(2), args[1].flatten(1).mT
            self._see(x.mT, kernel[None].expand(len(x), -1, -1), out.flatten(2).mT)
        return out

    def _see(self, first: Tensor, second: Tensor, out: Tensor) -> None:
        """A product of `[N, R, c]` and `[N, c, R']`."""
        if not self.is_planned:
            found = self._find(first, second)
            if found:
                self.plan[self.count] = found
        for n, name, is_second, rows, columns in self.plan.get(self.count, ()):
            if name in self.watched:
                operand, result = (first[n], out[n]) if is_second else (second[n].mT, out[n].mT)
                self.watched[name].see(operand, result, rows, columns)
        self.count += 1

    def _find(self, first: Tensor, second: Tensor) -> list[tuple[int, str, bool, Tensor, Tensor]]:
        return [
            (n, name, is_second, *match)
            for n in range(len(first))
            for name, numbers in self.matrices.items()
            for is_second, t in ((True, second[n]), (False, first[n].mT))
            if (match := numbers.match(t)) is not None
        ]
