"""Projections of an attention module as weights `[out, in]` of queries, keys, values and output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .twin import refuse

Q = "q_proj query q q_lin q_attn to_q wq linear_q query_proj queries"
K = "k_proj key k k_lin to_k wk linear_k key_proj keys"
V = "v_proj value v v_lin to_v wv linear_v value_proj values"
QKV = "qkv_proj query_key_value c_attn Wqkv qkv in_proj att_proj W_pack"
KV = "c_attn kv_proj kv to_kv"
OUT = "o_proj out_proj c_proj dense o proj out_lin wo Wo to_out projection out linear_out"
GATE = "gate_proj g_proj"


@dataclass
class Part:
    """Rows of the weight and bias of a projection."""

    module: nn.Module
    name: str
    take: Callable[[Tensor], Tensor] = lambda x: x  # rows of [out, ...]

    def weight(self) -> Tensor:
        """`[out, in]`."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return self.take(weight if isinstance(self.module, nn.Linear) else weight.T)

    def bias(self) -> Tensor | None:
        bias = self.module.bias
        return self.take(bias) if isinstance(bias, Tensor) else None

    def of(self, module: nn.Module) -> Part:
        """The same of another module of this structure."""
        return Part(module.get_submodule(self.name), self.name, self.take)

    def below(self, prefix: str) -> Part:
        """The same, named from a module further up."""
        return Part(self.module, prefix + self.name, self.take)

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight(), self.bias())


def is_projection(module: object) -> bool:
    """Whether a module is an `nn.Linear`, or transformers' `Conv1D`, that computes x W + b."""
    if isinstance(module, nn.Linear):
        plain = not module._modules and set(module._parameters) <= {"weight", "bias"}
        return plain and module.weight.is_floating_point() and _is_linear(module)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_linear(module: nn.Linear) -> bool:
    """Whether a module with the parameters of `nn.Linear` computes that; of a subclass with another
    forward, by what it computes.
    """
    if type(module).forward is nn.Linear.forward:
        return True
    x = torch.linspace(-1, 1, module.weight.shape[1], device=module.weight.device)
    x = torch.stack([x, x.flip(0).square()]).to(module.weight.dtype)
    with torch.no_grad():
        try:
            made = module(x)
        except (RuntimeError, TypeError, ValueError):
            return False
        want = nn.functional.linear(x, module.weight, module.bias)
    return made.shape == want.shape and torch.allclose(made, want, atol=1e-3, rtol=1e-3)


def find(module: nn.Module, names: str) -> str | None:
    """The first of these names that is a child."""
    return next((n for n in names.split() if module._modules.get(n) is not None), None)


def part(owner: nn.Module, module: nn.Module, path: str) -> Part:
    """The projection at a path of the module.

    Raises:
        MultiheadError: anything but a plain linear map.
    """
    found = module.get_submodule(path)
    inner = [name for name, child in found._modules.items() if isinstance(child, nn.Linear)]
    if len(inner) == len(found._modules) == 1 and not found._parameters:
        path = f"{path}.{inner[0]}"  # a module that only calls it; the trial shows if it does more
        found = module.get_submodule(path)
    if not is_projection(found):
        raise refuse(
            owner,
            f"{path} is a {type(found).__name__} and not a plain nn.Linear (an adapter, a quantised"
            " or a parametrized projection)",
            "merge the adapter or dequantise the weights first",
        )
    return Part(found, path)


def query_key_value(
    owner: nn.Module, module: nn.Module, num_heads: int, head_dim: int
) -> Iterator[tuple[Part, Part, Part]]:
    """The projections of queries, keys and values; several, where a fused one may be ordered in
    several ways. `owner` is named in errors.
    """
    separate = [find(module, names) for names in (Q, K, V)]
    if all(separate):
        q, k, v = (part(owner, module, str(name)) for name in separate)
        yield q, k, v
        return
    if separate[0] and (name := find(module, KV)):
        q, kv = part(owner, module, separate[0]), part(owner, module, name)
        half = kv.weight().shape[0] // 2
        yield q, _rows(kv, lambda x: x[:half]), _rows(kv, lambda x: x[half:])
        return
    name = str(find(module, QKV))
    fused = part(owner, module, name)
    total = fused.weight().shape[0]
    groups = (total // head_dim - num_heads) // 2
    if groups < 1 or num_heads % groups or (num_heads + 2 * groups) * head_dim != total:
        raise refuse(owner, f"{name} has {total} outputs for {num_heads} heads of {head_dim}")
    width, kv_width = num_heads * head_dim, groups * head_dim
    sizes = [width, kv_width, kv_width]

    def blocks(i: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x.split(sizes)[i]

    def grouped(i: int) -> Callable[[Tensor], Tensor]:
        share = num_heads // groups
        return lambda x: (
            x.unflatten(0, (groups, share + 2, head_dim)).split([share, 1, 1], 1)[i].flatten(0, 2)
        )

    def sharded(i: int) -> Callable[[Tensor], Tensor]:  # CodeGen's, of four ranks: q, v, k
        return lambda x: x.unflatten(0, (4, 3, -1))[:, (0, 2, 1)[i]].flatten(0, 1)

    for of in (blocks, grouped, *([sharded] if groups == num_heads and total % 12 == 0 else [])):
        q, k, v = (_rows(fused, of(i)) for i in range(3))
        yield q, k, v


def _rows(fused: Part, take: Callable[[Tensor], Tensor]) -> Part:
    return Part(fused.module, fused.name, take)


def halves(q: Part, num_heads: int, head_dim: int) -> tuple[Part, Part]:
    """Queries and gates of a projection that gives each head its query and its gate."""

    def half(i: int) -> Part:
        return _rows(q, lambda x: x.unflatten(0, (num_heads, 2, head_dim))[:, i].flatten(0, 1))

    return half(0), half(1)


def split(x: Tensor, head_dim: int) -> Tensor:
    """`[B, L, H*E]` -> `[B, H, L, E]`."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def agrees(part: Part, x: Tensor, heads: Tensor) -> bool:
    """Whether these heads `[B, H or G, L, E]` are what the projection makes of x."""
    made = split(part(x), heads.shape[-1])
    if made.shape[1] != heads.shape[1]:  # repeated for the query heads
        heads = heads[:, :: max(heads.shape[1] // made.shape[1], 1)]
    return made.shape == heads.shape and torch.allclose(made, heads, atol=1e-3, rtol=1e-3)


def place(linear: nn.Linear, part: Part) -> None:
    """Give a layer's projection copies of the weight and bias."""
    weight, bias = part.weight(), part.bias()
    source: Any = part.module
    linear.weight = nn.Parameter(
        weight.detach().clone(memory_format=torch.contiguous_format), source.weight.requires_grad
    )
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), source.bias.requires_grad)
    else:
        linear.bias = None  # type: ignore[assignment]
