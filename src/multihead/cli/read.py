"""The commands `read` and `statistics`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MultiheadError
from .options import (
    AllHeadsOption,
    BatchSizeOption,
    ContextOption,
    CsvOption,
    ModelArgument,
    Runtime,
    check_outputs,
    print_text,
    print_written,
    progress_bar,
    replace_unprintable,
)

if TYPE_CHECKING:
    from ..data.documents import Document
    from ..data.sources import Documents
    from ..reader.table import Table


def read_command(
    model: ModelArgument = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to read: a file, a folder (.txt, .text, .md, .rst, .jsonl), a .jsonl file"
            " with one text or conversation per line, or - for standard input. Repeatable."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text given here, instead of --text.")] = None,
    field: Annotated[
        str | None,
        typer.Option(
            help="Key of the text or the messages in JSON lines, 'text' or 'messages' unless given;"
            " when given, standard input is JSON lines too."
        ),
    ] = None,
    context: ContextOption = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from the start of one window to the next; each token counts once."
        ),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(help="Also read this many tokens that the model generates after each text."),
    ] = None,
    batch_size: BatchSizeOption = 8,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="NAME=REGEX",
            help="Also measure the attention to tokens that match a regular expression, as the"
            " statistic class:NAME. Repeatable.",
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            metavar="UNIT",
            help="Unit of classes and of the page's maps: token (default), or word, whose pieces"
            " are merged.",
        ),
    ] = "token",
    statistic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also measure a statistic that needs more than one forward pass (multihead"
            " statistics lists them). Repeatable.",
        ),
    ] = None,
    relations: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CoNLL-U file: also measure which heads follow its dependency arcs.",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page (one HTML file) here.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the table here, so that it can be loaded again. Until then progress is"
            " kept in FILE.progress: after an interruption the same command resumes.",
        ),
    ] = None,
    csv: CsvOption = None,
    all_heads: AllHeadsOption = False,
    runtime: Runtime = Runtime(),  # noqa: B008  (frozen)
) -> None:
    """Measure what each head of a model does on any amount of text.

    Under torchrun, the processes share the texts.
    """
    check_outputs(page=(page, ""), json=(json, ".json"), csv=(csv, ".csv"))
    from ..reader.statistics import resolve_statistics

    resolve_statistics(statistic or [])
    if by not in ("token", "word"):
        raise MultiheadError(f"--by {by}: expected 'token' or 'word'")
    _require_dtype(runtime.dtype)
    patterns = parse_classes(classes or [])
    if relations is not None and not relations.exists():
        raise MultiheadError(f"--relations {relations}: there is no such file; give a CoNLL-U file")
    from ..reader.distributed import join, leave

    rank, size, local = join()
    sources = open_sources(text or [], prompt, field, size)
    from ..reader.read import read
    from ..reader.resume import file_of
    from ..report.progress import stoppable

    with progress_bar("loading the model", rank):
        on_this_rank = f"cuda:{local}" if size > 1 and runtime.device == "cuda" else None
        loaded = runtime.load(model, device=on_this_rank, quiet=bool(rank))
    # effect_mean needs all texts in one run, so it can't resume.
    can_resume = json is not None and "effect_mean" not in (statistic or [])
    progress_file = Path(f"{json}.progress") if can_resume else None
    with progress_bar("reading", rank) as progress, stoppable() as stop:
        table = read(
            loaded.model,
            sources.texts,
            tokenizer=loaded.tokenizer,
            batch_size=batch_size,
            context=context,
            stride=stride,
            generate=generate,
            classes=patterns,
            by=by,
            statistics=statistic or [],
            relations=relations,
            progress=progress,
            resume=progress_file,
            distributed=size > 1,
            stop=stop,
        )
    table.meta |= {"model": loaded.name, "text": sources.name}
    table.meta["notes"] += sources.notes()
    if not rank:
        # Before anything is printed: whoever reads the pipe may be gone by then.
        save_table(table, json, csv)
        if page is not None:
            _write_page(page, table, loaded, sources.first, by)
    if size > 1:
        leave()
    is_partial = "partial" in table.meta
    if progress_file is not None and not is_partial:
        file_of(progress_file, rank).unlink(missing_ok=True)
    if not rank:
        show_table(table, all_heads, json, csv)
        if page is not None:
            print_text(f"wrote {page.absolute()}: open it in a browser")
    if is_partial:
        if progress_file is not None and progress_file.exists() and not rank:
            print_text(f"progress is in {progress_file}: the same command resumes from there")
        raise typer.Exit(130)


def statistics_command() -> None:
    """List the statistics of a head: formula, source, range and cost."""
    from ..reader.statistics import statistics_table

    print_text(statistics_table())


@dataclass
class Sources:
    """Texts to read, and where they come from."""

    texts: Iterable[Document]
    first: Document
    name: str
    documents: Documents | None = None

    def notes(self) -> list[str]:
        left_out = 0 if self.documents is None else self.documents.left_out
        return [f"{left_out:,} empty texts were left out"] if left_out else []


def open_sources(
    sources: list[str], prompt: str | None, field: str | None, processes: int
) -> Sources:
    """The texts of `--text` or `--prompt`, or the built-in text; the first is read at once."""
    from ..data.documents import words_of
    from ..data.sources import Documents, builtin_text, describe_sources, read_text

    if prompt is not None or not sources:
        if sources:
            read_text(sources[0], prompt=prompt)  # raises: only one of them can be given
        words = builtin_text() if prompt is None else read_text(prompt=prompt)
        name = describe_sources(["built-in text" if prompt is None else "prompt"], words)
        return Sources([words], words, name)
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
    name = describe_sources(sources, words_of(first))
    return Sources(itertools.chain([first], texts), first, name, documents)


def parse_classes(entries: list[str]) -> dict[str, str]:
    """The patterns of NAME=REGEX entries by name, each name once."""
    patterns: dict[str, str] = {}
    for entry in entries:
        name, equals, pattern = entry.partition("=")
        if not equals or not name or not pattern:
            raise MultiheadError(
                f"--class {entry}: expected NAME=REGEX, as in --class 'digits=\\d'"
            )
        if name in patterns:
            raise MultiheadError(
                f"--class {entry}: there is a class {name} already ({patterns[name]}); give each"
                " class its own name"
            )
        patterns[name] = pattern
    return patterns


def save_table(table: Any, *paths: Path | None) -> None:
    """Write a table or a comparison to each path that is given."""
    for path in paths:
        if path is not None:
            table.save(path)


def show_table(table: Table, all_heads: bool, *written: Path | None) -> None:
    """Print a table, and the files that were written."""
    from ..reader.table import print_table

    replace_unprintable()
    print_table(table, all_heads=all_heads)
    print_written(*written)


def _require_dtype(dtype: str) -> None:
    from ..models.loading import DTYPES

    if dtype not in DTYPES:
        raise MultiheadError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")


def _write_page(page: Path, table: Table, loaded: Any, first: Document, by: str) -> None:
    from ..report.chosen import chosen_maps
    from ..report.page import write_page

    with progress_bar("drawing the page"):
        maps, notes = chosen_maps(loaded.model, first, table, loaded.tokenizer)
        table.meta["notes"] = [*table.meta["notes"], *notes]
        write_page(page, table, maps, by=by)
