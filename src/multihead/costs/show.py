"""A cost as tables for a terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path

from ..errors import MissingDependency
from ..io import atomic_file
from ..terminal import Grid, Part, to_text
from .shape import PAGE, Arithmetic, Shape, format_heads
from .totals import CostTotals

STORAGES = {
    "in theory": "theory",
    "as transformers stores it": "transformers",
    f"as a paged server reserves it ({PAGE} tokens a page)": "paged",
}
MEMORY = {
    "probabilities, if stored": "probabilities",
    "log-sum-exp instead (streamed)": "streamed",
    "activations": "activations",
}


def show(cost: CostTotals) -> str:
    """All tables, in lines of at most 100 columns (but for notes)."""
    modules = len(cost.shapes)
    keeping = f", {len(cost.states)} with a state" if cost.states else ""
    parts: list[Part] = [
        f"{cost.name}: {modules} attention module{'' if modules == 1 else 's'}{keeping}, context"
        f" {cost.context_length:,}, batch {cost.batch_size:,}, {cost.dtype}"
    ]
    grids = [_modules(cost), _parameters(cost), _arithmetic(cost), _memory(cost), _cache(cost)]
    for grid in [*grids, *([_alternatives(cost)] if cost.shapes else [])]:
        parts += ["", *grid]
    parts.append(
        "prefill: pairs that masks allow. MLA: a latent of 4 head widths, and half a head's for the"
        " position"
    )
    return to_text([*parts, *(f"note: {note}" for note in cost.notes)])


def _modules(cost: CostTotals) -> list[Part]:
    rows = []
    for labels, count, shape in cost.kinds():
        parameters = f"{sum(shape.parameters.values()):,}"
        rows.append([_cut(labels), f"{count}", format_heads(shape), _reads(shape), parameters])
    for labels, count, state in cost.state_kinds():
        size = f"a state of {format_bytes(state.cache(cost.dtype))}"
        rows.append([_cut(labels), f"{count}", state.kind, size, f"{state.parameters:,}"])
    names = ["modules", "", "heads", "reads", "parameters each"]
    return [Grid(names, rows, left=range(4))]


def _cut(labels: str) -> str:
    return labels if len(labels) < 28 else f"{labels.split()[0]} ..."


def _reads(shape: Shape) -> str:
    """The keys that a query may read."""
    if shape.cross:
        keys = "source"
    elif shape.window:
        keys = f"{'chunk' if shape.chunked else 'window'} {shape.window:,}"
    else:
        keys = "before" if shape.causal else "all"
    if shape.topk:
        keys = f"{shape.topk:,} of those {keys}"
    return keys if shape.has_keys else f"{keys}, keys of another layer"


def _parameters(cost: CostTotals) -> list[Part]:
    total = sum(cost.parameters.values())
    rows = [[name, f"{n:,}", f"{n / total:.1%}"] for name, n in cost.parameters.items()]
    return [Grid(["parameters", "in all", ""], [*rows, ["all", f"{total:,}", ""]])]


def _arithmetic(cost: CostTotals) -> list[Part]:
    rows = {
        "prefill, every pair (eager)": cost.prefill(full=True),
        "prefill, pairs that masks allow": cost.prefill(),
    }
    if _is_cached(cost):
        rows["one token decoded"] = cost.decode()
        if cost.decode(expanded=True) != cost.decode():
            rows["one token, expanded (as in transformers)"] = cost.decode(expanded=True)
    names = ["arithmetic", *Arithmetic._fields, "total"]
    return [Grid(names, [[k, *map(format_operations, (*v, v.total))] for k, v in rows.items()])]


def _memory(cost: CostTotals) -> list[Part]:
    memory = cost.memory
    rows = [
        [name, format_bytes(memory[key]), format_bytes(memory[f"{key}, all layers"])]
        for name, key in MEMORY.items()
    ]
    return [Grid(["memory of a pass", "largest layer", "all layers"], rows)]


def _cache(cost: CostTotals) -> list[Part]:
    if not _is_cached(cost):
        return ["no cache: every token reads later ones too, or the model takes none"]
    sizes = {name: cost.cache(storage) for name, storage in STORAGES.items()}
    rows = [[name, f"{size:,}", format_bytes(size)] for name, size in sizes.items()]
    windowed = any(s.window for s in cost.shapes if any(s.cache_widths))
    lines: list[Part] = [Grid(["cache", "bytes", ""], rows)]
    if any(any(s.cache_widths) for s in cost.shapes):
        lines.append(
            f"{cost.cache_per_token:,} bytes a token of each sequence"
            + (", until windows are full" if windowed else "")
        )
    if cost.states:
        lines.append(f"{cost.cache_per_sequence:,} bytes a sequence in states, whatever its length")
    return lines


def _alternatives(cost: CostTotals) -> list[Part]:
    rows = []
    for name, other in [("as it is", cost), *cost.alternatives()]:
        cached = ["-"] * 3
        if other.cache_per_token:
            decode = format_operations(other.decode().total)
            cached = [decode, f"{other.cache_per_token:,}", format_bytes(other.cache())]
        parameters = f"{sum(other.parameters.values()):,}"
        prefill = format_operations(other.prefill().total)
        rows.append([name, format_heads(*other.shapes), parameters, prefill, *cached])
    names = ["with other heads", "heads", "parameters", "prefill", "one token", "bytes/token"]
    return [Grid([*names, "cache"], rows, left=range(2))]


def _is_cached(cost: CostTotals) -> bool:
    return bool(cost.states) or any(any(shape.cache_widths) for shape in cost.shapes)


def format_bytes(number: float) -> str:
    """
    >>> format_bytes(36864), format_bytes(6538936320)
    ('36.00 KiB', '6.09 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:,.0f} B" if unit == "B" else f"{number:,.2f} {unit}"


def format_operations(number: float) -> str:
    """
    >>> format_operations(1_234_000_000)
    '1.234 GFLOP'
    """
    for unit in ("", "k", "M", "G", "T", "P"):
        if number < 1000 or unit == "P":
            break
        number /= 1000
    return f"{number:,.4g} {unit}FLOP"


def draw(cost: CostTotals, path: Path) -> None:
    """Draw the cache and the prefill's arithmetic over the context length, on logarithmic axes, as
    it is and with other heads.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency(
            "a plot needs matplotlib; run: pip install 'multihead[plot]'"
        ) from error
    ways = [("as it is", cost), *((n, c) for n, c in cost.alternatives() if "heads" not in n)]
    contexts = sorted({max(1, cost.context_length * 2**n // 64) for n in range(9)})
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    cache, work = figure.subplots(1, 2)
    for name, other in ways:
        style = dict(lw=2.5, ls="--") if name == "as it is" else dict(lw=1.2, ls="-")
        style["label"] = f"{name}, {format_heads(*other.shapes)}"
        lengths = [other.at_length(n) for n in contexts]
        if other.cache_per_token:
            cache.plot(contexts, [one.cache() for one in lengths], **style)
        work.plot(contexts, [one.prefill().total for one in lengths], **style)
    for axes, title, unit in (
        (cache, f"cache, {cost.dtype}, batch {cost.batch_size}", "bytes"),
        (work, "arithmetic of the prefill, pairs that masks allow", "operations"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=unit, title=title)
        axes.axvline(cost.context_length, color="gray", lw=0.8, ls=":")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.suptitle(cost.name)
    with atomic_file(path) as part:
        figure.savefig(part, dpi=120)
