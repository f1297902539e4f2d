"""`to_attention`: a transformers attention module as a `MultiHeadAttention`, proved equal to it.

What a layer needs is read from the module's children and from the arguments of its attention
function (`Reader`). What can't be read is tried: orders of a fused projection, kinds of rotary
positions, scales. A combination counts if the layer made of the twin's parameters computes the
twin's output, and the layer that is returned is made of the module's in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.masks import causal
from .norms import norms_of
from .positions import alibi, rotaries, t5_bias
from .projections import (
    GATE,
    KV,
    OUT,
    QKV,
    K,
    Part,
    Q,
    V,
    agrees,
    find,
    halves,
    part,
    query_key_value,
)
from .reader import Reader
from .recipe import Recipe
from .trial import Trial, distance, trial_of
from .twin import Call, refuse

HEADS = "num_heads num_attention_heads n_heads n_head"
SCALES = ("scaling", "scale", "softmax_scale", "inv_norm_factor")


def to_attention(cls: Any, module: nn.Module, **known: bool | None) -> Any:
    """`cls.from_transformers(module)`; see there."""
    reader = Reader(module, **known)
    reader.locate(*_parts_of_wrapper(module))
    return _Conversion(reader).convert(cls)


def _projects(module: nn.Module | None) -> bool:
    """Whether a module has projections of queries, keys and values."""
    if module is None:
        return False
    fused = find(module, QKV)
    if fused is not None and not module.get_submodule(fused)._modules:
        return True
    return bool(find(module, Q) and (find(module, K) or find(module, KV)))


def _parts_of_wrapper(module: nn.Module) -> tuple[str, str | None]:
    """The path of the module that has the projections, and that of an output projection outside
    it, as in BERT.
    """
    if find(module, "kv_a_proj_with_mqa"):
        raise refuse(
            module,
            "its keys and values come from a latent",
            "use LatentAttention.from_transformers",
        )
    if isinstance(module, nn.MultiheadAttention):
        raise refuse(module, "a module of torch", "use multihead.layers.from_torch")
    if _projects(module):
        has_norm = find(module, "LayerNorm") and find(module, "dense")  # ALBERT's, after the sum
        return "", "dense" if has_norm else None
    found = [name for name, child in module._modules.items() if _projects(child)]
    if len(found) != 1:
        held = [*module._modules, *(n for n, x in module._parameters.items() if x is not None)]
        raise refuse(
            module,
            "no projections of queries, keys and values are found among its parts"
            f" ({', '.join(held) or 'none'})",
            "give the attention module itself",
        )
    output = module._modules.get("output")
    if output is not None and isinstance(getattr(output, "dense", None), nn.Module):
        return found[0], "output.dense"
    others = [
        name
        for name, child in module._modules.items()
        if name != found[0] and child is not None and any(True for _ in child.parameters())
    ]
    if others:
        raise refuse(
            module,
            f"{', '.join(others)} next to {found[0]} isn't part of attention",
            f"give its {found[0]}",
        )
    return found[0], None


class _Conversion:
    """The search for a layer that computes what the module computes."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.module, self.twin = reader.module, reader.twin
        self.inner, self.inner_twin = reader.inner, reader.inner_twin
        self.path = reader.path

    def convert(self, cls: Any) -> Any:
        reader = self.reader
        widths = self._widths()
        rule = None if reader.cross else reader.mask({})
        trial = trial_of(self.module, self.inner, *widths, rule, reader.cross)
        reader.settle(trial)
        want, call = reader.observe(trial)
        if call is not None and not reader.cross:
            trial.rule = rule = reader.mask(call.options)
            want, call = reader.observe(trial)
        heads, head_dim = self._sizes(call)
        options = reader.options(call, trial) | {"mask": rule}
        error, found = self._search(cls, call, trial, want, (heads, head_dim), options)
        if not reader.accepts(error) and reader.masks_itself(call):
            options["mask"] = trial.rule = causal() if rule is None else None
            error, found = self._search(cls, call, trial, want, (heads, head_dim), options)
        if not reader.accepts(error):
            raise reader.differs(error)
        recipe, positions, scale = found
        self._check_parameters(recipe, positions)
        layer = recipe.build(cls, self.module, self.twin)
        layer.scale = scale
        layer.positions = t5_bias(self.inner, heads) if hasattr(positions, "weight") else positions
        return layer

    def _search(
        self,
        cls: Any,
        call: Call | None,
        trial: Trial,
        want: Tensor,
        sizes: tuple[int, int],
        options: dict[str, Any],
    ) -> tuple[float, Any]:
        """The first combination that the twin equals, else the nearest, and its difference."""
        best: tuple[float, Any] = (float("inf"), None)
        for recipe in self._recipes(call, trial, *sizes, options):
            layer = recipe.build(cls, self.twin, self.twin)
            for positions, ids in self._positions(layer, trial):
                for scale in self._scales(call, sizes[1]):
                    layer.positions, layer.scale = positions, scale
                    error = distance(layer, trial, ids, want)
                    if error < best[0]:
                        best = error, (recipe, positions, scale)
                    if self.reader.accepts(error):
                        return best
        return best

    def _widths(self) -> tuple[int, int]:
        """Widths of the inputs of queries and of keys."""
        q = find(self.inner_twin, Q) or find(self.inner_twin, QKV)
        k = find(self.inner_twin, K) or find(self.inner_twin, KV) or q
        if q is None or k is None or not (find(self.inner_twin, QKV) or self._has_values(k)):
            raise refuse(
                self.module, f"projections are missing among {', '.join(self.inner._modules)}"
            )
        widths = [part(self.module, self.inner_twin, x).weight().shape[1] for x in (q, k)]
        return widths[0], widths[1]

    def _has_values(self, k: str) -> bool:
        return find(self.inner_twin, V) is not None or k in KV.split()

    def _sizes(self, call: Call | None) -> tuple[int, int]:
        """The number and the width of query heads."""
        if call is not None:
            if call.q.ndim != 4 or call.v.shape[-1] != call.q.shape[-1]:
                raise refuse(
                    self.module,
                    f"its heads have queries of width {call.q.shape[-1]} and values of width"
                    f" {call.v.shape[-1]}",
                )
            return call.q.shape[1], call.q.shape[-1]
        owners = (self.inner, self.reader.config)
        values = [getattr(x, name, None) for x in owners for name in HEADS.split()]
        heads = next((x for x in values if isinstance(x, int)), None)
        if heads is None:
            raise refuse(self.module, f"none of {', '.join(HEADS.split())} gives its heads")
        head_dim = getattr(self.inner, "head_dim", None)
        if not isinstance(head_dim, int):
            name = find(self.inner_twin, Q)
            rows = self._widths()[0]
            if name is not None:
                rows = part(self.module, self.inner_twin, name).weight().shape[0]
            head_dim = rows // heads
        return heads, head_dim

    # ---- Candidates

    def _recipes(
        self, call: Call | None, trial: Trial, heads: int, head_dim: int, options: dict[str, Any]
    ) -> Iterator[Recipe]:
        keys = trial.hidden if trial.memory is None else trial.memory
        prefix = f"{self.path}." if self.path else ""
        for q, k, v in query_key_value(self.module, self.inner_twin, heads, head_dim):
            gate = None
            if q.weight().shape[0] == 2 * heads * head_dim:
                q, gate = halves(q, heads, head_dim)
            elif name := find(self.inner_twin, GATE):
                gate = part(self.module, self.inner_twin, name)
            if call is not None and "clip_qkv" not in options and not agrees(v, keys, call.v):
                continue
            groups = k.weight().shape[0] // head_dim
            if q.weight().shape[0] != heads * head_dim or heads % max(groups, 1):
                continue
            yield Recipe(
                heads,
                groups,
                head_dim,
                q.below(prefix),
                k.below(prefix),
                v.below(prefix),
                self._out(),
                self.path,
                options,
                norms=norms_of(self.inner_twin),
                sinks=self._sinks(call, heads),
                gate=None if gate is None else gate.below(prefix),
            )

    def _out(self) -> Part | None:
        """The output projection, None for a module whose output is that of its heads."""
        if self.reader.out_path is not None:
            return part(self.module, self.twin, self.reader.out_path)
        name = find(self.inner_twin, OUT)
        if name is None:
            return None
        if isinstance(self.inner_twin.get_submodule(name), nn.Sequential | nn.ModuleList):
            name = f"{name}.0"
        return part(self.module, self.twin, f"{self.path}.{name}".lstrip("."))

    def _sinks(self, call: Call | None, heads: int) -> str | None:
        """The name of the parameter of the heads' sinks."""
        seen = {} if call is None else call.options
        value = seen.get("s_aux") if seen.get("s_aux") is not None else seen.get("sinks")
        if value is None:
            return None
        for name, held in self.inner_twin._parameters.items():
            fits = held is not None and held.numel() == heads == value.numel()
            if held is not None and fits and torch.equal(held.flatten(), value.flatten()):
                return name
        raise refuse(self.module, f"its sinks {list(value.shape)} aren't a parameter of each head")

    def _positions(self, layer: Any, trial: Trial) -> list[tuple[nn.Module | None, Tensor | None]]:
        """Position encodings to try, each with the position ids of its call."""
        if trial.memory is not None:
            return [(None, None)]
        table = t5_bias(self.inner_twin, layer.num_heads)
        if table is not None:
            return [(table, None)]
        found: list[tuple[nn.Module | None, Tensor | None]] = [
            (x, trial.ids) for x in rotaries(self.inner_twin, layer.head_dim, trial.tables)
        ]
        slopes = alibi(self.inner_twin, layer.num_heads)
        return [*found, (None, None), *([(slopes, None)] if slopes is not None else [])]

    def _scales(self, call: Call | None, head_dim: int) -> list[float]:
        """Factors of the scores to try: some modules multiply queries before attention."""
        plain = head_dim**-0.5
        values = [getattr(self.inner, name, None) for name in SCALES]
        own = [x for x in values if isinstance(x, float) and x > 0]
        if call is None:
            return list(dict.fromkeys([plain, *own, 1.0]))
        passed = call.options.get("scaling")
        first = plain if passed is None else float(passed)
        return list(dict.fromkeys([first, *(first * x for x in (*own, plain)), plain]))

    def _check_parameters(self, recipe: Recipe, positions: Any) -> None:
        """Raise unless every parameter is part of the layer; those of the norm after the residual
        connection, next to an output projection outside, belong to the block.
        """
        prefix = f"{self.path}." if self.path else ""
        owned = {x.name for x in recipe.parts()}
        owned |= {f"{prefix}{name}" for name in recipe.norms or ()}
        if recipe.sinks is not None:
            owned.add(f"{prefix}{recipe.sinks}")
        if hasattr(positions, "weight"):
            owned.add(f"{prefix}relative_attention_bias")
        if self.reader.out_path is not None:
            owned.add(self.reader.out_path.rpartition(".")[0] or "LayerNorm")
        self.reader.check_parameters(owned)
