"""A cost for a terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MissingDependency
from ..terminal import Grid, to_text
from .cost import heads_of
from .shape import PAGE, Arithmetic, Shape

if TYPE_CHECKING:
    from .cost import Cost


def text(found: Cost) -> str:
    """The whole cost in lines of at most 100 columns."""
    cached = [s for s in found.shapes if s.row]
    total = sum(found.parameters.values())
    many = (
        "1 attention module" if len(found.shapes) == 1 else f"{len(found.shapes)} attention modules"
    )
    lines = [
        f"{found.name}: {many}, context {found.context:,}, batch {found.batch:,}, {found.dtype}",
        "",
    ]
    lines += [
        *_table(
            [["modules", "", "heads", "reads", "parameters each"], *map(_kind, found.kinds())],
            left=4,
        ),
        "",
    ]
    lines += [
        *_table(
            [
                ["parameters", "in all", ""],
                *(
                    [part, f"{number:,}", f"{number / total:.1%}"]
                    for part, number in found.parameters.items()
                ),
                ["all", f"{total:,}", ""],
            ]
        ),
        "",
    ]
    rows = [
        ["arithmetic", "projections", "scores", "mixing", "total"],
        _operations("prefill, every pair (eager)", found.prefill(full=True)),
        _operations("prefill, pairs that masks allow", found.prefill()),
    ]
    if cached:
        rows.append(_operations("one token decoded", found.decode()))
        if found.decode(expanded=True) != found.decode():
            rows.append(
                _operations("one token, as transformers decodes", found.decode(expanded=True))
            )
    lines += [*_table(rows), ""]
    memory = found.memory
    lines += [
        *_table(
            [
                ["memory of a pass", "largest layer", "all layers"],
                *(
                    [name, human(memory[key]), human(memory[f"{key}, all layers"])]
                    for name, key in (
                        ("probabilities, if stored", "probabilities"),
                        ("streamed instead (log-sum-exp)", "streamed"),
                        ("activations", "activations"),
                    )
                ),
            ]
        ),
        "",
    ]
    if cached:
        lines += [
            *_table(
                [
                    ["cache", "bytes", ""],
                    *(
                        [name, f"{found.cache(kept):,}", human(found.cache(kept))]
                        for name, kept in (
                            ("in theory", "theory"),
                            ("as transformers keeps it", "transformers"),
                            (f"as a paged server reserves it ({PAGE} tokens a page)", "paged"),
                        )
                    ),
                ]
            ),
            f"{found.cache_per_token:,} bytes a token of each text"
            + (", until windows are full" if any(s.window for s in cached) else ""),
            "",
        ]
    else:
        lines += ["no cache: every token reads those behind it too, or the model takes none", ""]
    lines += _table(
        [
            [
                "with other heads",
                "heads",
                "parameters",
                "prefill",
                "one token",
                "bytes/token",
                "cache",
            ],
            *(
                _alternative(name, one)
                for name, one in [("as it is", found), *found.alternatives()]
            ),
        ],
        left=2,
    )
    lines += [
        "prefill: pairs that masks allow. MLA: a latent of 4 head widths, and half a head's for the"
        " position"
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def human(number: float) -> str:
    """
    >>> human(36864), human(6538936320)
    ('36.00 KiB', '6.09 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:,.0f} B" if unit == "B" else f"{number:,.2f} {unit}"


def operations(number: float) -> str:
    """
    >>> operations(1_234_000_000)
    '1.234 GFLOP'
    """
    for unit in ("", "k", "M", "G", "T", "P"):
        if number < 1000 or unit == "P":
            break
        number /= 1000
    return f"{number:,.4g} {unit}FLOP"


def _kind(kind: tuple[str, int, Shape]) -> list[str]:
    labels, count, shape = kind
    labels = labels if len(labels) < 28 else f"{labels.split()[0]} ..."
    window = f"{'chunk' if shape.chunked else 'window'} {shape.window:,}" if shape.window else ""
    reads = "source" if shape.cross else window or ("before" if shape.causal else "all")
    return [
        labels,
        str(count),
        heads_of(shape),
        reads + ("" if shape.own_keys else ", another's keys"),
        f"{sum(shape.parameters.values()):,}",
    ]


def _operations(name: str, found: Arithmetic) -> list[str]:
    return [name, *(operations(number) for number in (*found, found.total))]


def _alternative(name: str, found: Cost) -> list[str]:
    total = sum(found.parameters.values())
    cached = found.cache_per_token > 0
    return [
        name,
        heads_of(*found.shapes),
        f"{total:,}",
        operations(found.prefill().total),
        operations(found.decode().total) if cached else "-",
        f"{found.cache_per_token:,}" if cached else "-",
        human(found.cache()) if cached else "-",
    ]


def _table(rows: list[list[str]], left: int = 1) -> list[str]:
    """A header and rows in columns, the first `left` of them aligned left."""
    return to_text([Grid(rows[0], rows[1:], left=range(left))]).splitlines()


def plot(found: Cost, path: Path) -> None:
    """Cache and arithmetic against context, on logarithmic axes."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency(
            "a plot needs matplotlib; run: pip install 'multihead[plot]'"
        ) from error
    ways = [("as it is", found), *((n, c) for n, c in found.alternatives() if "heads" not in n)]
    contexts = sorted({max(1, found.context * 2**n // 64) for n in range(9)})
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    cache, work = figure.subplots(1, 2)
    for name, one in ways:
        thick = 2.5 if name == "as it is" else 1.2
        line = "--" if name == "as it is" else "-"
        label = f"{name}, {heads_of(*one.shapes)}"
        if one.cache_per_token:
            cache.plot(contexts, [one.at(n).cache() for n in contexts], line, lw=thick, label=label)
        work.plot(
            contexts, [one.at(n).prefill().total for n in contexts], line, lw=thick, label=label
        )
    for axes, title, unit in (
        (cache, f"cache, {found.dtype}, batch {found.batch}", "bytes"),
        (work, "arithmetic of the prefill, pairs that masks allow", "operations"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=unit, title=title)
        axes.axvline(found.context, color="gray", lw=0.8, ls=":")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.suptitle(found.name)
    figure.savefig(path, dpi=120)
