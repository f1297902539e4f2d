"""The active modes and transforms of torch, and the condition for reading a tensor's memory
directly.

`has_plain_memory` is the one condition for every way around torch's dispatcher: calls of the
compiled kernels by address, and of implementations without the registered operator. `hidden` is the
one for decisions that depend on values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _dispatch_keys, _dispatch_tls_local_include_set
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..errors import MultiheadError


def _number(*keys: DispatchKey) -> int:
    found = DispatchKeySet(keys[0])
    for key in keys[1:]:
        found = found | DispatchKeySet(key)
    return int(found.raw_repr())


# Of a dense, strided tensor on a CPU; those of inference mode have fewer. Whatever else a tensor is
# (lazily negated or conjugated, an efficient zero, sparse, quantized, nested, batched by vmap,
# functionalized, fake, a subclass with its own dispatch, on another device) adds or lacks a key.
_DENSE = frozenset(
    (
        _number(
            DispatchKey.CPU,
            DispatchKey.ADInplaceOrView,
            DispatchKey.AutogradCPU,
            DispatchKey.AutocastCPU,
        ),
        _number(DispatchKey.CPU, DispatchKey.AutocastCPU),
    )
)
# Of a thread without modes. torch.jit.trace, dispatch modes, make_fx, transforms of torch.func and
# functionalization add a key.
_QUIET = frozenset(
    (
        _number(DispatchKey.BackendSelect, DispatchKey.ADInplaceOrView),
        _number(DispatchKey.BackendSelect),
    )
)


def has_plain_memory(*tensors: Tensor | None) -> bool:
    """Whether all tensors are dense, strided and resolved in a CPU's memory, and nothing listens to
    torch's operators: no trace, mode, transform, compiler, forward-mode derivative or profiler.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    if _dispatch_tls_local_include_set().raw_repr() not in _QUIET:
        return False
    if torch._C._autograd._profiler_enabled():
        return False
    for x in tensors:
        if x is not None and not (
            (type(x) is Tensor or type(x) is torch.nn.Parameter)
            and _dispatch_keys(x).raw_repr() in _DENSE
        ):
            return False
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is active."""
    level = torch._C._functorch.maybe_current_level()
    return level is not None or forward_ad._current_level >= 0


def hidden(x: Tensor) -> bool:
    """Whether the values of x can't be read: torch.compile, torch.export, make_fx or
    torch.jit.trace is recording, a transform of torch.func is active, or x has no values (fake and
    meta tensors).
    """
    if torch.compiler.is_compiling() or transformed() or torch._C._is_tracing():
        return True
    return x.is_meta or isinstance(x, FakeTensor) or _get_current_dispatch_mode() is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting_onnx() -> bool:
    """Whether one of the exporters of torch.onnx is recording."""
    compiling = torch.compiler.is_compiling()  # where torch.compile can't ask for a trace
    recording = torch.compiler.is_exporting() if compiling else torch._C._is_tracing()
    return recording and torch.onnx.is_in_onnx_export()


def listening() -> bool:
    """Whether a dispatch mode, such as a counter of operations, sees eager operators."""
    return not torch.compiler.is_compiling() and _get_current_dispatch_mode() is not None


def known(condition: Tensor) -> bool | Tensor:
    """Test if a condition holds everywhere: a bool, or a tensor for the graph under tracing."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(condition):
        return condition.all()
    if condition.is_meta or isinstance(condition, FakeTensor):
        return True
    return bool(condition.all())


def require(condition: bool | Tensor, message: str) -> None:
    """Raise `MultiheadError` unless the condition holds; in a traced graph, `RuntimeError` when
    the graph runs.
    """
    if isinstance(condition, Tensor) and torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif isinstance(condition, Tensor):
        raise MultiheadError(
            "vmap hides whether each query's keys are one interval: pass mask.dense(L, S) there"
        )
    elif not condition:
        raise MultiheadError(message)
