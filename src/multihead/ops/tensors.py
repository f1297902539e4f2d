"""Arguments that may be given as lists or NumPy arrays, and copies of what is kept.

One rule for the operator, masks, layers and caches: positions, lengths and masks may be tensors,
lists, tuples or NumPy arrays. What a gradient may flow to (queries, keys, values, biases, sinks)
must be a tensor; anything else is a TypeError with the conversion to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import MultiheadError

__all__ = [
    "TensorLike",
    "as_plain_int",
    "copied",
    "require_tensor",
    "to_count",
    "to_integers",
    "to_tensor",
]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LARGEST = 1 << 62  # of integers, so that sums of two fit into int64

# A tensor, or nested lists, tuples or a NumPy array of numbers or booleans.
TensorLike = Tensor | Sequence[Any] | np.ndarray


def to_tensor(
    name: str,
    x: object,
    expected: str,
    *,
    device: torch.device | str = "cpu",
    empty: torch.dtype = torch.int64,
) -> Tensor:
    """The argument `name` as a tensor: a tensor as it is, lists and NumPy arrays as a copy on
    `device`.

    Args:
        name: of the argument, for the message.
        x: what was given.
        expected: for the message, such as "integers of shape [B]".
        device: where the copy of a list or an array lies.
        empty: dtype of a list without elements, which has none.

    Raises:
        TypeError: anything else, also lists of unequal lengths.

    >>> to_tensor("lengths", [3, 2], "integers of shape [B]")
    tensor([3, 2])
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, np.ndarray | np.generic) or hasattr(x, "__array__"):
        array = np.array(x, order="C")
    elif isinstance(x, Sequence) and not isinstance(x, str | bytes):
        try:
            found = torch.tensor(_without_arrays(x), device=device)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(_refusal(name, x, expected)) from error
        return found if found.numel() else found.to(empty)
    else:
        raise TypeError(_refusal(name, x, expected))
    try:
        return torch.tensor(array, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(_refusal(name, array, expected)) from error


def to_integers(name: str, x: object, shapes: str, ndims: tuple[int, ...]) -> Tensor:
    """A copy of the argument `name`, integers of `shapes`, whose numbers of axes are `ndims`.

    Raises:
        TypeError: anything else.

    >>> to_integers("rows", (1, 0), "[B]", (1,))
    tensor([1, 0])
    """
    expected = f"integers of shape {shapes}"
    found = to_tensor(name, x, expected)
    is_integer = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if not is_integer or found.ndim not in ndims:
        raise TypeError(f"{name} is {found.dtype} {list(found.shape)}: expected {expected}")
    return copied(found)


def _without_arrays(x: Any) -> Any:
    """Nested lists without NumPy arrays inside, which torch would read number by number."""
    if isinstance(x, np.ndarray | np.generic):
        return x.tolist()
    if isinstance(x, Tensor):
        return x.tolist()
    if isinstance(x, Sequence) and not isinstance(x, str | bytes):
        return [_without_arrays(part) for part in x]
    return x


def _refusal(name: str, x: object, expected: str) -> str:
    if isinstance(x, np.ndarray):
        kind = f"a NumPy array of {x.dtype}"
    elif isinstance(x, Sequence) and not isinstance(x, str | bytes):
        kind = f"a {type(x).__name__} that isn't a rectangle of numbers"
    else:
        kind = f"a {type(x).__name__}"
    return f"{name} is {kind}: expected {expected}, as a tensor, a list or a NumPy array"


def require_tensor(name: str, x: object, expected: str = "a torch tensor") -> None:
    """Raise a TypeError, with the conversion to write, unless the argument `name` is a tensor.

    >>> require_tensor("bias", torch.zeros(3))
    """
    if isinstance(x, Tensor):
        return
    hint = ""
    if isinstance(x, np.ndarray):
        hint = f"; pass torch.from_numpy({name})"
    elif isinstance(x, Sequence) and not isinstance(x, str | bytes):
        hint = f"; pass torch.tensor({name})"
    raise TypeError(f"{name} is a {type(x).__name__}: expected {expected}{hint}")


def copied(x: Tensor) -> Tensor:
    """A copy that later in-place changes of x don't reach, and that can be saved for a backward
    pass even if it is made in inference mode.
    """
    outside = nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)
    with outside:
        return x.detach().clone()


def as_plain_int(x: object) -> object:
    """NumPy integers as int; anything else as it is.

    >>> as_plain_int(np.int64(3))
    3
    """
    return int(x) if isinstance(x, np.integer) else x


def to_count(name: str, value: object, least: int = 0) -> Any:
    """The argument `name` as an int; integers that torch traces (symbols, tensors) as they are.

    Raises:
        TypeError: what isn't an integer.
        MultiheadError: one below `least`, or beyond int64.

    >>> to_count("keys", np.int64(3))
    3
    """
    number = as_plain_int(value)
    if isinstance(number, torch.SymInt):
        return number
    if isinstance(number, Tensor) and number.ndim == 0 and number.dtype in INTEGERS:
        return number
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name}={value!r}: expected an integer, at least {least}")
    if not least <= number < LARGEST:
        raise MultiheadError(f"{name}={value}: expected an integer of {least} to 2**62")
    return number
