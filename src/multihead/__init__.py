"""Multi-head attention: attend, read, prune, cost and check. Names are imported when they are first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "attention": "ops.functional",
    "backend_for": "ops.functional",
    "from_torch_mask": "ops.convert",
    "from_function": "ops.convert",
    "from_dense": "ops.convert",
    "causal": "ops.masks",
    "window": "ops.masks",
    "padding": "ops.masks",
    "documents": "ops.masks",
    "prefix": "ops.masks",
    "intervals": "ops.masks",
    "IntervalMask": "ops.masks",
    "Slopes": "ops.slopes",
    "split_heads": "ops.heads",
    "merge_heads": "ops.heads",
    "MultiHeadAttention": "layers.attention",
    "TransformerBlock": "layers.block",
    "Cache": "layers.cache",
    "WindowCache": "layers.cache",
    "from_torch": "layers.torch_compat",
    "to_torch": "layers.torch_compat",
    "Rotary": "layers.rotary",
    "ALiBi": "layers.position_bias",
    "T5Bias": "layers.position_bias",
    "RelativeBias": "layers.position_bias",
    "PositionBias": "layers.position_bias",
    "read": "reader.read",
    "reading": "reader.session",
    "ReadingError": "reader.verify",
    "maps": "reader.maps",
    "relations": "reader.relations",
    "nearest": "reader.nearest",
    "compare": "reader.compare",
    "Table": "reader.table",
    "load_table": "reader.table",
    "print_table": "reader.console",
    "statistics": "reader.statistics",
    "add_statistic": "reader.statistics",
    "remove_statistic": "reader.statistics",
    "prune": "pruning.prune",
    "share": "pruning.share",
    "tune": "pruning.tune",
    "Plan": "pruning.plan",
    "load": "models.pruned",
    "cost": "costs.cost",
    "Cost": "costs.cost",
    "check": "checks.run",
    "heads": "models.ablate",
    "register": "models.transformers",
    "builtin": "models.loading",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from .checks.run import check as check
    from .costs.cost import Cost as Cost
    from .costs.cost import cost as cost
    from .layers.attention import MultiHeadAttention as MultiHeadAttention
    from .layers.block import TransformerBlock as TransformerBlock
    from .layers.cache import Cache as Cache
    from .layers.cache import WindowCache as WindowCache
    from .layers.position_bias import ALiBi as ALiBi
    from .layers.position_bias import PositionBias as PositionBias
    from .layers.position_bias import RelativeBias as RelativeBias
    from .layers.position_bias import T5Bias as T5Bias
    from .layers.rotary import Rotary as Rotary
    from .layers.torch_compat import from_torch as from_torch
    from .layers.torch_compat import to_torch as to_torch
    from .models.ablate import heads as heads
    from .models.loading import builtin as builtin
    from .models.pruned import load as load
    from .models.transformers import register as register
    from .ops.convert import from_dense as from_dense
    from .ops.convert import from_function as from_function
    from .ops.convert import from_torch_mask as from_torch_mask
    from .ops.functional import attention as attention
    from .ops.functional import backend_for as backend_for
    from .ops.heads import merge_heads as merge_heads
    from .ops.heads import split_heads as split_heads
    from .ops.masks import IntervalMask as IntervalMask
    from .ops.masks import causal as causal
    from .ops.masks import documents as documents
    from .ops.masks import intervals as intervals
    from .ops.masks import padding as padding
    from .ops.masks import prefix as prefix
    from .ops.masks import window as window
    from .ops.slopes import Slopes as Slopes
    from .pruning.plan import Plan as Plan
    from .pruning.prune import prune as prune
    from .pruning.share import share as share
    from .pruning.tune import tune as tune
    from .reader.compare import compare as compare
    from .reader.console import print_table as print_table
    from .reader.maps import maps as maps
    from .reader.nearest import nearest as nearest
    from .reader.read import read as read
    from .reader.relations import relations as relations
    from .reader.session import reading as reading
    from .reader.statistics import add_statistic as add_statistic
    from .reader.statistics import remove_statistic as remove_statistic
    from .reader.statistics import statistics as statistics
    from .reader.table import Table as Table
    from .reader.table import load_table as load_table
    from .reader.verify import ReadingError as ReadingError


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'multihead' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
