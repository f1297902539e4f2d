"""The command line: one function a verb, no logic of its own, and nothing heavy imported before it
is needed.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import MultiheadError
from .io import require_file_path

if TYPE_CHECKING:
    from .data.documents import Documents
    from .reader.compare import Comparison
    from .reader.table import Table

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Multi-head attention: see what each head of a model does.",
)


# What several commands take.
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help=(
            "A directory with a transformers checkpoint, a GGUF file or a hub name; nothing: the"
            " built-in model."
        )
    ),
]
LayersOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Only in these layers: numbers, ranges (3-10) or labels. May be given many times."
    ),
]
EvaluateOption = Annotated[
    list[str] | None, typer.Option(help="Another text, to judge the result on.")
]
SimilarityOption = Annotated[
    Path | None,
    typer.Option(
        help='Judge an encoder by this: JSON lines {"a": text, "b": text, "score": number}.'
    ),
]
MeasureOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="Judge by a function of your own, called with (model, tokenizer).",
    ),
]
TokensOption = Annotated[int, typer.Option(help="Tokens of each text to use at most.")]
OutOption = Annotated[Path | None, typer.Option(help="Write the smaller model to this new folder.")]
JsonOption = Annotated[Path | None, typer.Option(help="Write what was done and measured here.")]
DeviceOption = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, mps.")]
DtypeOption = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, float64, or auto: as stored.")
]
TrustRemoteCodeOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")
]


@app.callback()
def verbs() -> None:
    """Multi-head attention: see what each head of a model does."""


@app.command()
def read(
    model: ModelArgument = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A text file, a folder of them (.txt, .text, .md, .rst, .jsonl), a .jsonl file with"
                " a text a line, or - for "
                "standard input. May be given many times."
            )
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    field: Annotated[
        str | None,
        typer.Option(
            help="Name of the text in JSON lines, 'text' unless given; given, standard "
            "input is JSON lines too."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Read longer texts in windows of so many tokens, instead of cutting "
            "them at the model's positions."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from one window's beginning to the next's; each token still counts once."
        ),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(help="Also read so many tokens that the model writes behind each text."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts, or windows of them, in one pass.")] = 8,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="NAME=REGEX",
            help=(
                "Also measure the mass on tokens in whose text the regular expression is found, as"
                " class:NAME. May be given many "
                "times."
            ),
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also measure a statistic that costs more than a pass "
            "(multihead statistics lists them). May be given many times.",
        ),
    ] = None,
    relations: Annotated[
        Path | None,
        typer.Option(
            help="A CoNLL-U file: also measure which heads read the words that its "
            "dependency arcs name."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page (one HTML file) here.")] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write the table here, so that it can be loaded again. Until then progress "
            "is kept in FILE.progress: killed, the same command goes on."
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table's values here.")] = None,
    all_heads: Annotated[bool, typer.Option("--all", help="Print every head.")] = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Show what each head of a model does on any amount of text. Under torchrun, processes share
    the texts.
    """
    _check_outputs(out=(out, ""), json=(json, ".json"), csv=(csv, ".csv"))
    from .models.loading import DTYPES, load_with_tokenizer
    from .reader.statistics import resolve_statistics

    resolve_statistics(also or [])
    if dtype not in DTYPES:
        raise MultiheadError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    patterns = _classes(classes or [])
    if relations is not None and not relations.is_file():
        raise MultiheadError(f"--relations {relations}: there is no such file; give a CoNLL-U file")
    from .reader.distributed import join, leave

    rank, size, local = join()
    texts, first, name, documents = _texts(text or [], prompt, field, size)

    from .reader.read import read as read_heads
    from .reader.resume import file_of
    from .report.progress import stoppable

    with _progress("loading the model", rank):
        loaded = load_with_tokenizer(
            model,
            device=f"cuda:{local}" if size > 1 and device == "cuda" else device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    if loaded.tokenizer is None:
        raise MultiheadError(
            f"MODEL {model}: has no tokenizer (tokenizer.json and tokenizer_config.json), so it"
            " can't be given text; put the files there, or read it from Python with ready-made"
            " inputs"
        )
    whole = "effect_mean" in (
        also or []
    )  # needs all texts in one run, so it can't go on from a part
    progress = None if json is None or whole else Path(f"{json}.progress")
    with _progress("reading", rank) as step, stoppable() as stop:
        table = read_heads(
            loaded.model,
            texts,
            tokenizer=loaded.tokenizer,
            batch_size=batch_size,
            context=context,
            stride=stride,
            generate=generate,
            classes=patterns,
            statistics=also or [],
            relations=relations,
            progress=step,
            resume=progress,
            distributed=size > 1,
            stop=stop,
        )
    table.meta |= {"model": loaded.name, "text": name}
    if documents is not None and documents.left_out:
        table.meta["notes"].append(f"{documents.left_out:,} empty texts were left out")
    if not rank:
        _write(
            table, json, csv
        )  # before anything is printed: the reader of a pipe may be gone by then
        if out is not None:
            from .report.chosen import chosen_maps
            from .report.page import write_page

            with _progress("drawing the page"):
                found, note = chosen_maps(loaded.model, first, table, loaded.tokenizer)
                table.meta["notes"] = [*table.meta["notes"], *note]
                write_page(out, table, found)
    if size > 1:
        leave()
    partial = "partial" in table.meta
    if progress is not None and not partial:
        file_of(progress, rank).unlink(missing_ok=True)
    if not rank:
        _show(table, all_heads)
        _wrote(json, csv)
        if out is not None:
            print(f"wrote {out.absolute()}: open it in a browser")
    if partial:
        if progress is not None and progress.exists() and not rank:
            print(f"progress is in {progress}: the same command goes on from there")
        raise typer.Exit(130)


@app.command()
def merge(
    tables: Annotated[
        list[Path], typer.Argument(help="Tables that 'multihead read --json' wrote, of one model.")
    ],
    json: Annotated[Path | None, typer.Option(help="Write their sum here.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write its values here.")] = None,
    all_heads: Annotated[bool, typer.Option("--all", help="Print every head.")] = False,
) -> None:
    """Add tables of one model: of several texts, made anywhere."""
    _check_outputs(json=(json, ".json"), csv=(csv, ".csv"))
    twice = [
        path for path in tables if sum(path.resolve() == other.resolve() for other in tables) > 1
    ]
    if twice:
        raise MultiheadError(
            f"{twice[0]} is given twice, and its texts would count twice; give each table once"
        )
    from .reader.table import load_table

    total, *rest = held = [load_table(path) for path in tables]
    for (path, table), (other, same) in itertools.combinations(zip(tables, held, strict=True), 2):
        if table.has_same_sums(same):
            raise MultiheadError(
                f"{path} and {other} hold the same numbers, so their texts would count twice; give"
                " one of them"
            )
    for path, table in zip(tables[1:], rest, strict=True):
        try:
            total = total + table
        except ValueError as error:
            raise MultiheadError(f"{tables[0]} and {path}: {error}") from error
    total.meta["text"] = f"{len(tables)} tables: " + ", ".join(map(str, tables))
    _write(total, json, csv)
    _show(total, all_heads)
    _wrote(json, csv)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A table that 'multihead read --json' wrote.")],
    b: Annotated[Path, typer.Argument(help="Another: after a training, or on another text.")],
    json: Annotated[Path | None, typer.Option(help="Write all differences here.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write all differences here, a row a head and column.")
    ] = None,
) -> None:
    """Show what changed most from one table to another."""
    _check_outputs(json=(json, ".json"), csv=(csv, ".csv"))
    from .reader.compare import compare as compare_tables
    from .reader.table import load_table

    found = compare_tables(load_table(a), load_table(b))
    _write(found, json, csv)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    print(found)
    _wrote(json, csv)


@app.command()
def prune(
    model: ModelArgument = None,
    heads: Annotated[
        str | None, typer.Option(help="How many heads to take out: 20%, 0.2 or a number.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="How many to keep instead: 80%, 0.8 or a number.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help='Which to take out: JSON, {"remove": ["L0.H3", "L4"]}.')
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help=(
                "any heads; even: as many from each group; groups: whole ones; uniform: the"
                " same in "
                "every layer, what plain transformers loads."
            )
        ),
    ] = "any",
    layers: LayersOption = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to score heads on: files, folders, - for standard input. "
            "May be given many times."
        ),
    ] = None,
    evaluate: EvaluateOption = None,
    similarity: SimilarityOption = None,
    measure: MeasureOption = None,
    criterion: Annotated[
        str | None,
        typer.Option(
            help="taylor, taylor_mean, fisher, flap, share, norm, weights, "
            "ablation or random, and with /layer or /zscore behind it within "
            "its layer; nothing: the best on a held-out part."
        ),
    ] = None,
    compensate: Annotated[
        str | None, typer.Option(help="What stands in for removed heads: refit, mean or none.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Score again after each of so many steps.")] = 1,
    tune: Annotated[
        int, typer.Option(help="Then so many steps of distillation from the whole model.")
    ] = 0,
    curve: Annotated[
        Path | None,
        typer.Option(
            help="Also sweep 10% to 90% and write loss, size, cache and latency: .json, "
            ".png or .svg."
        ),
    ] = None,
    tokens: TokensOption = 16384,
    seed: Annotated[int, typer.Option(help="Of random plans and of tuning.")] = 0,
    out: OutOption = None,
    json: JsonOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Take heads out of a model, with the loss measured, and write a checkpoint that loads."""
    _check_outputs(json=(json, ".json"), curve=(curve, ""))
    if curve is not None and curve.suffix not in (".json", ".png", ".svg"):
        raise MultiheadError(f"--curve {curve}: expected a name that ends in .json, .png or .svg")
    if not calibrate:
        raise MultiheadError(
            "--calibrate is missing: give a text to score heads on, another than the one to"
            " judge on"
        )
    from .pruning.job import Job
    from .report.pruned import tell

    with _progress() as step:
        job = Job(
            model,
            calibrate,
            evaluate or [],
            similarity,
            measure,
            tokens=tokens,
            seed=seed,
            out=out,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            progress=step,
        )
        found = job.prune(
            heads=heads,
            keep=keep,
            plan=plan,
            kind=kind,
            layers=layers,
            criterion=criterion,
            compensate=compensate,
            steps=steps,
            tune=tune,
            curve=curve,
        )
    tell(found, json)


@app.command()
def share(
    model: ModelArgument = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads in each layer afterwards.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="svd, aligned, mean (Ainslie et al. 2023), first or random.")
    ] = "svd",
    choice: Annotated[
        str, typer.Option(help="Which heads share: similar or neighbours.")
    ] = "similar",
    refit: Annotated[
        bool, typer.Option(help="Fit the output projection anew by least squares.")
    ] = True,
    layers: LayersOption = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to calibrate on: files, folders, - for standard input. May "
            "be given many times."
        ),
    ] = None,
    evaluate: EvaluateOption = None,
    similarity: SimilarityOption = None,
    measure: MeasureOption = None,
    tune: Annotated[
        int, typer.Option(help="Then so many steps of distillation from the model as it was.")
    ] = 0,
    tokens: TokensOption = 16384,
    seed: Annotated[int, typer.Option(help="Of the method random, and of tuning.")] = 0,
    out: OutOption = None,
    json: JsonOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Let several heads share keys and values: grouped or multi-query attention out of
    multi-head.
    """
    _check_outputs(json=(json, ".json"))
    if kv_heads is None or kv_heads < 1:
        given = "is missing" if kv_heads is None else kv_heads
        raise MultiheadError(
            f"--kv-heads {given}: expected a number from 1 on that divides the layer's heads"
        )
    if not calibrate:
        raise MultiheadError(
            "--calibrate is missing: give a text to calibrate on, another than the one to judge on"
        )
    from .pruning.job import Job
    from .report.pruned import tell

    with _progress() as step:
        job = Job(
            model,
            calibrate,
            evaluate or [],
            similarity,
            measure,
            tokens=tokens,
            seed=seed,
            out=out,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            progress=step,
        )
        found = job.share(
            kv_heads, method=method, choice=choice, layers=layers, refit=refit, tune=tune
        )
    tell(found, json)


@app.command()
def cost(
    model: Annotated[
        str | None,
        typer.Argument(
            help=(
                "A folder or config.json, a GGUF file or a hub name, of which the weights aren't"
                " needed; nothing: the built-in "
                "model."
            )
        ),
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(help="Instead of a model: attention of this width, causal.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads, with --d-model.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads, as many as query heads unless given.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Width of a head, d_model / heads unless given.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of such numbers, 1 unless given.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a text and in the cache; 4,096 unless given.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Texts at a time.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16, float8, ...; of the cache alone: int8, int4, "
            "int2, q8_0, q5_1, q5_0, q4_1, q4_0. The config's unless given."
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Let causal layers read so many keys at most.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all numbers here, layer by layer.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw cache and arithmetic against context here (PNG).")
    ] = None,
) -> None:
    """Show what a model's attention costs: parameters, arithmetic, memory, cache; and with other
    numbers of heads.
    """
    _check_outputs(json=(json, ".json"), plot=(plot, ".png"))
    from .costs.cost import cost as cost_of

    found = cost_of(
        model,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        context=context,
        batch=batch,
        dtype=dtype,
        window=window,
    )
    if json is not None:
        found.save(json)
    if plot is not None:
        found.plot(plot)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    print(found)
    _wrote(json, plot)


@app.command()
def warm() -> None:
    """Compile the CPU kernels ahead, once a machine, so that no first call waits for them."""
    from .ops.backends import cpu

    print(f"{cpu.warm()} kernels are ready")


@app.command()
def statistics() -> None:
    """List what a reading measures of a head: formula, source, range and cost."""
    from .reader.statistics import statistics_table

    print(statistics_table())


@app.command()
def check(
    where: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:NAME",
            help="A Python file, which is run, and the name in it of a "
            "module, a class or a function: attention you wrote.",
        ),
    ],
    args: Annotated[
        str | None,
        typer.Option(
            metavar="ARGUMENTS",
            help="Of a class, what it's made with; of a function, further "
            "arguments by name: --args '64, num_heads=4'.",
        ),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--not-causal",
            help="Whether it should hide later tokens; found out unless said.",
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Number of query heads, where no attribute says it.")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="What scores are multiplied with, where not meant to be 1/sqrt(E)."),
    ] = None,
) -> None:
    """Judge whether attention that you wrote is right. Exit code 0: all held, 1: something is
    wrong, 2: it couldn't be run.
    """
    from .checks.load import load_target

    target, further = load_target(where, args)
    from .checks.run import check as check_attention

    report = check_attention(target, causal=causal, num_heads=heads, scale=scale, arguments=further)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    print(report)
    if not report.ok:
        raise typer.Exit(1)


def _classes(given: list[str]) -> dict[str, str]:
    """NAME=REGEX, each name once."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, pattern = text.partition("=")
        if not equals or not name or not pattern:
            raise MultiheadError(f"--class {text}: expected NAME=REGEX, as in --class 'digits=\\d'")
        if name in found:
            raise MultiheadError(
                f"--class {text}: there is a class {name} already ({found[name]}); give each a name"
                " of its own"
            )
        found[name] = pattern
    return found


def _check_outputs(**outputs: tuple[Path | None, str]) -> None:
    """Paths to write to, each with the ending that it must have: refused before any work is
    done.
    """
    given = [
        (f"--{option}", path, suffix)
        for option, (path, suffix) in outputs.items()
        if path is not None
    ]
    for option, path, _ in given:
        require_file_path(path, option)
    for option, path, suffix in given:
        if suffix and path.suffix != suffix:
            raise MultiheadError(f"{option} {path}: expected a name that ends in {suffix}")
    written = [str(path.absolute()) for _, path, _ in given]
    if len(set(written)) < len(written):
        raise MultiheadError(
            f"{', '.join(option for option, *_ in given)}: {written[0]} is given twice, and one"
            " would write over the other"
        )


def _texts(
    sources: list[str], prompt: str | None, field: str | None, processes: int
) -> tuple[Iterable[str], str, str, Documents | None]:
    """The texts, the first of them (for the page), what to call them, and where they come from."""
    from .data.documents import Documents, named
    from .data.texts import builtin_text, read_text

    if prompt is not None or not sources:
        if sources:
            read_text(sources[0], prompt=prompt)  # says that only one of them can be
        words = builtin_text() if prompt is None else read_text(prompt=prompt)
        return [words], words, named(["built-in text" if prompt is None else "prompt"], words), None
    if processes > 1 and "-" in sources:
        raise MultiheadError(
            "--text -: standard input reaches one process only; put the text into a file"
        )
    documents = Documents(sources, field=field)
    texts = iter(documents)
    first = next(texts, None)
    if first is None:
        raise MultiheadError(
            f"--text {' '.join(sources)}: holds no text, only empty files or lines"
        )
    return itertools.chain([first], texts), first, named(sources, first), documents


def _write(found: Table | Comparison, *paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            found.save(path)


def _wrote(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            print(f"wrote {path}")


def _show(table: Table, all_heads: bool) -> None:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    from .reader.table import print_table

    print_table(table, all_heads=all_heads)


def _progress(stage: str = "", rank: int = 0) -> Any:
    from .report.progress import show_progress

    return nullcontext(lambda done, total, stage: None) if rank else show_progress(stage)


def main() -> None:
    """The entry point: what a user got wrong is one line on standard error and exit code 2."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        rank = os.environ.get("RANK", "0")  # of the processes that torchrun starts
        print(f"multihead{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("multihead: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
