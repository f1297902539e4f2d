"""Names that code uses, as evidence of what it does (positions, windows, sinks); never as proof."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

# The first name of a shape that is unpacked, and of an einops pattern.
FIRST_AXIS = re.compile(
    r"^\s*(\w+)\s*,[\w\s,*]*=\s*\w+\.(?:shape|size\(\))|rearrange\(\w+,\s*[\"'](\w+) \w",
    re.MULTILINE,
)
BATCH_NAMES = re.compile(
    "b|bs|bsz|bz|n|(num_?)?batch(es|_?size)?|b_?size|n_?batch(es)?", re.IGNORECASE
)
MAX_DEPTH = 4  # of calls that are followed


def names_in_code(target: Any) -> set[str]:
    """Names in the code of a module or function, of the functions of its file and methods that it
    calls, and of its modules' attributes, parameters and buffers.

    >>> sorted(names_in_code(lambda x: x.softmax(-1)))
    ['softmax', 'x']
    """
    walker = _Walker()
    is_module = isinstance(target, nn.Module)
    function = getattr(type(target), "forward", None) if is_module else target
    owner = target if is_module else getattr(target, "__self__", target)
    if callable(function):
        function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType):
        function = vars(type(target)).get("__call__")
    walker.walk_function(function, owner, 0)
    if isinstance(target, nn.Module):
        for path, module in target.named_modules():
            walker.names |= {*path.split("."), type(module).__name__}
            walker.names |= {name for name in vars(module) if not name.startswith("_")}
            if module is not target:
                walker.walk_function(inspect.unwrap(type(module).forward), module, 2)
        tensors = [*target.named_parameters(), *target.named_buffers()]
        walker.names |= {name.rpartition(".")[2] for name, _ in tensors}
    return walker.names


class _Walker:
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.visited: set[int] = set()

    def walk_function(self, function: Any, owner: Any, depth: int) -> None:
        if isinstance(function, types.FunctionType):
            self.walk(function.__code__, function.__globals__, owner, depth)

    def walk(self, code: types.CodeType, scope: Mapping[str, Any], owner: Any, depth: int) -> None:
        if id(code) in self.visited or depth > MAX_DEPTH:
            return
        self.visited.add(id(code))
        self.names.update(code.co_names, code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.walk(constant, scope, owner, depth)
        for name in code.co_names:
            called = scope[name] if name in scope else getattr(type(owner), name, None)
            if isinstance(called, types.FunctionType):
                self.walk_function(inspect.unwrap(called), owner, depth + 1)


def find_names(target: Any, pattern: str) -> list[str]:
    """The names in the code of `target` that contain `pattern`, without attributes that are None or
    False.
    """
    owners = list(target.modules()) if isinstance(target, nn.Module) else [target]

    def is_off(name: str) -> bool:
        values = [getattr(owner, name) for owner in owners if hasattr(owner, name)]
        return bool(values) and all(value is None or value is False for value in values)

    names = names_in_code(target)
    return sorted(n for n in names if re.search(pattern, n, re.IGNORECASE) and not is_off(n))


def is_called_causal(name: str) -> bool:
    """Whether this name, of a class or function, means that it's causal.

    >>> is_called_causal("CausalSelfAttention"), is_called_causal("NonCausalAttention")
    (True, False)
    """
    return re.search(r"(?<!non)(?<!non_)(?<!not_)causal", name, re.IGNORECASE) is not None


def names_batch_first(target: nn.Module) -> bool:
    """Whether the forward of a module names the first axis of its inputs the batch, where it
    unpacks a shape: `B, L, D = x.shape`.
    """
    try:
        source = inspect.getsource(type(target).forward)
    except (OSError, TypeError):
        return False
    first = FIRST_AXIS.search(source)
    return first is not None and BATCH_NAMES.fullmatch(first[1] or first[2]) is not None
