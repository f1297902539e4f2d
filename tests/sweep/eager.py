"""What a reading's table should hold: computed from the weights that a model's own eager attention
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from oracles import compare
from oracles.statistics import NAMES, OFFSETS, TOKENS, Call, statistics
from sweep.tiny import FIRST, Batch

Floats = npt.NDArray[np.float64]
SPECIAL = FIRST
WEIGHTS_ONLY = frozenset(
    n for n in NAMES if ":" not in n and n not in ("norm", "share", "cancellation", "reach")
)
UPDATES = frozenset({"norm", "share"})
NO_PLACE = frozenset(
    {"distance", "first", *OFFSETS, *TOKENS}
)  # where a row's place among the keys isn't known
LIMITS = (
    1e-4,
    2e-5,
)  # relative, absolute: these models are float32, and deeper than the tests' families


@dataclass
class Stored:
    """One attention call, as eager computed it, and what then entered the output projection."""

    module: nn.Module
    weights: Tensor  # [B, H, L, S]
    value: Tensor  # [B, G, S, Ev]
    mask: Tensor | None
    out: Tensor  # [B, L, H, Ev]
    entered: Tensor | None = None
    projection: nn.Module | None = None


@contextmanager
def stored_eager(model: nn.Module, *, as_it_came: bool = False) -> Iterator[list[Stored]]:
    """Whatever eager function a module would call, it is called, and its weights are kept.

    as_it_came: with the masks of the implementation that the model came with, said to eager in its
        own way.
    """
    from transformers.modeling_utils import AttentionInterface

    calls: list[Stored] = []
    open_calls: list[Stored] = []

    def get_interface(self: Any, name: Any, default: Callable[..., Any]) -> Callable[..., Any]:
        def attention(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None = None,
            *a: Any,
            **k: Any,
        ) -> Any:
            mask = k.pop("attention_mask", mask)
            if as_it_came:
                causal = k.get("is_causal")
                mask = in_eagers_way(
                    mask,
                    query,
                    key,
                    getattr(module, "is_causal", True) if causal is None else causal,
                )
            out, weights = default(module, query, key, value, mask, *a, **k)
            if weights is not None:
                weights = as_they_act(weights.detach(), value.detach(), out.detach())
                call = Stored(module, weights, value.detach(), mask, out.detach())
                calls.append(call)
                open_calls.append(call)
            return out, weights

        return attention

    def enters(module: nn.Module, args: Any) -> None:
        """The projection is the first that takes what the heads gave; else the last of that width
        within the module.
        """
        if not args or not isinstance(args[0], Tensor) or width_in(module) is None:
            return
        x = args[0].detach()
        for call in list(open_calls):
            width = call.out.shape[-1] * call.out.shape[-2]
            if width_in(module) == width and x.numel() == call.out.numel():
                call.entered, call.projection = x, module
                if torch.equal(x.reshape(-1), call.out.reshape(-1)):
                    open_calls.remove(call)

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        open_calls[:] = [c for c in open_calls if c.module is not module or c.projection is None]

    before = AttentionInterface.get_interface
    handles = [
        nn.modules.module.register_module_forward_pre_hook(enters),
        nn.modules.module.register_module_forward_hook(leaves),
    ]
    AttentionInterface.get_interface = get_interface
    try:
        with nullcontext() if as_it_came else implementation_of(model, "eager"):
            yield calls
    finally:
        AttentionInterface.get_interface = before
        for handle in handles:
            handle.remove()


@contextmanager
def implementation_of(model: nn.Module, name: str) -> Iterator[None]:
    held = [getattr(module, "config", None) for module in model.modules()]
    configs: dict[int, Any] = {
        id(c): c for c in held if hasattr(c, "_attn_implementation_internal")
    }
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def in_eagers_way(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """What sdpa makes of a mask or of none, as numbers to add."""
    rows, keys = query.shape[2], key.shape[2]
    if mask is None and causal and rows > 1:
        mask = torch.ones(rows, keys, dtype=torch.bool).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)


def as_they_act(weights: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """Some eager functions apply their sinks to the output: then a row's weights are what they come
    to with it.
    """
    if weights.shape[1] % value.shape[1] or weights.shape[-1] != value.shape[2]:
        return weights
    came = weights @ value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    out = out.transpose(1, 2)
    if came.shape != out.shape or torch.allclose(came, out, rtol=1e-4, atol=1e-5):
        return weights
    factor = (came * out).sum(-1, keepdim=True) / came.square().sum(-1, keepdim=True).clamp(
        min=1e-30
    )
    return weights * factor if torch.allclose(came * factor, out, rtol=1e-4, atol=1e-5) else weights


def width_in(module: nn.Module) -> int | None:
    width = getattr(module, "in_features", None)
    if width is None and type(module).__name__ == "Conv1D":
        width = module.weight.shape[0]
    return width if isinstance(width, int) else None


def projection_of(module: nn.Module) -> npt.NDArray[Any]:
    if isinstance(module, nn.Linear) and type(module) is nn.Linear:
        return module.weight.detach().double().numpy().T
    width = width_in(module)
    assert width is not None
    unit = torch.eye(width, dtype=next(module.parameters()).dtype)[None]
    return (module(unit) - module(torch.zeros_like(unit)))[0].double().numpy()


# What a table should hold.


def sequence(
    batch: Batch, length: int, texts: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Which positions of a sequence of this length are text, and their ids: texts are told by their
    lengths.
    """
    for prefix in ("", "decoder_"):
        ids = batch.get(f"{prefix}input_ids")
        if ids is not None and ids.shape == (texts, length):
            mask = batch.get(f"{prefix}attention_mask")
            nobody = torch.isin(ids, torch.tensor(batch.get("placeholders", ()), dtype=torch.long))
            own = torch.where(
                nobody, -1000 - torch.arange(length), ids
            )  # a place for a picture is nobody's copy
            return (
                np.ones(ids.shape, bool) if mask is None else mask.numpy().astype(bool)
            ), own.numpy()
    return np.ones((texts, length), bool), None


def calls_of(
    stored: Stored, batch: Batch, kind: str
) -> tuple[list[Call], list[Call], frozenset[str]]:
    """The oracle's view of a call, of what enters W_O alone, and the statistics that it can
    judge.
    """
    weights, value = stored.weights.double().numpy(), stored.value.double().numpy()
    texts, heads, rows, keys = weights.shape
    real, ids = sequence(batch, rows, texts)
    real_keys, _ = sequence(batch, keys, texts)
    names = frozenset(NAMES)
    allowed = np.ones((texts, rows, keys), bool)
    if stored.mask is not None:
        low = (
            -9999
            if stored.mask.ndim == 4 and stored.mask.shape[1] == 1
            else torch.finfo(stored.mask.dtype).min / 2
        )
        may = stored.mask if stored.mask.dtype == torch.bool else stored.mask > low
        may = may.reshape((1,) * (4 - may.ndim) + tuple(may.shape)).expand(-1, -1, rows, -1)[
            ..., :keys
        ]
        if may.shape[0] not in (1, texts) or not bool((may == may[:, :1]).all()):
            names -= {n for n in NAMES if n.startswith("even") or n in ("entropy_ratio", "reach")}
            allowed = weights.max(1) > 0
        else:
            allowed = np.broadcast_to(may[:, 0].numpy(), allowed.shape)
    if kind == "cross" and real_keys.all():
        real_keys = allowed.any(1)
    if kind == "self" and rows != keys:
        names -= {n for n in NAMES if n.rpartition(":")[2] in NO_PLACE}
    if kind == "cross" or rows != keys:
        ids = None
        names -= {n for n in NAMES if n.rpartition(":")[2] == "special"}
    if stored.entered is None or stored.projection is None:
        projection = np.zeros((heads * value.shape[-1], 1))
        names &= WEIGHTS_ONLY
        entered = None
    else:
        projection = projection_of(stored.projection)
        entered = stored.entered.double().reshape(texts, rows, heads, -1).transpose(1, 2)
    whole = Call(
        weights=weights,
        values=value,
        allowed=allowed,
        projection=projection,
        real_queries=real,
        real_keys=real_keys,
        ids=ids,
        special=frozenset({SPECIAL}) if ids is not None else None,
        cross=kind == "cross",
    )
    if entered is None:
        return [whole], [], names
    some = allowed.any(-1)
    unit = np.broadcast_to(np.eye(rows), (texts, heads, rows, rows))
    alone = Call(
        weights=unit,
        values=entered.numpy(),
        allowed=np.eye(rows, dtype=bool)[None] & some[..., None],
        projection=projection,
        real_queries=real,
        real_keys=real,
    )
    out = stored.out.double().transpose(1, 2)
    if not torch.allclose(entered, out, rtol=1e-5, atol=1e-6 * float(out.abs().max())):
        gate = (entered * out).sum(-1) / out.square().sum(-1).clamp(min=1e-30)
        if torch.allclose(
            gate[..., None] * out, entered, rtol=1e-4, atol=1e-5 * float(entered.abs().max())
        ):
            return gated(whole, gate.numpy()), [alone], names
        names &= WEIGHTS_ONLY | UPDATES
    return [whole], [alone], names


def reads_nothing(stored: list[tuple[Stored, Batch]]) -> bool:
    """Whether a row of text may read no key at all: eager then reads all evenly, which no
    definition asks for.
    """
    wholes = [call for one, batch in stored for call in calls_of(one, batch, "self")[0]]
    return any(bool((call.real_queries & ~call.allowed.any(-1)).any()) for call in wholes)


def gated(call: Call, gate: npt.NDArray[Any]) -> list[Call]:
    """A gate `[B, H, L]` scales what a head's values add to a row: each row with values of its
    own.
    """
    heads, rows = gate.shape[1:]
    values = np.repeat(call.values, heads // call.values.shape[1], axis=1)
    found = []
    for row in range(rows):
        only = np.zeros_like(call.real_queries)
        only[:, row] = call.real_queries[:, row]
        found.append(
            Call(
                **vars(call)
                | {"values": values * gate[:, :, row, None, None], "real_queries": only}
            )
        )
    return found


def wrong(
    table: Any,
    stored: list[tuple[Stored, Batch]],
    names_of: dict[nn.Module, str],
    less: frozenset[str] = frozenset(),
) -> list[str]:
    """Every difference between a table and the stored calls; `less`: statistics that this run can't
    judge.
    """
    kinds = {row["site"]: row["kind"] for row in table.rows()}
    found: list[str] = []
    by_site: dict[str, list[tuple[Stored, Batch]]] = {}
    for call, batch in stored:
        by_site.setdefault(names_of.get(call.module, ""), []).append((call, batch))
    for site, calls in by_site.items():
        if site not in kinds:
            found.append(
                f"{site or 'a module outside the model'} ({type(calls[0][0].module).__name__})"
                " isn't among the sites"
            )
            continue
        wholes, alones, names = [], [], frozenset(NAMES)
        for call, batch in calls:
            whole, alone, judged = calls_of(call, batch, kinds[site])
            wholes, alones, names = wholes + whole, alones + alone, names & judged
        names -= {n for n in NAMES if n.rpartition(":")[2] in less}
        found += compare.differences(
            table, {site: statistics(wholes)}, names - UPDATES, limits=LIMITS
        )
        if alones and names & UPDATES:
            found += compare.differences(table, {site: statistics(alones)}, UPDATES, limits=LIMITS)
    return [line for line in found if "only on one side" not in line]
