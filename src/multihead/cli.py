"""The command line: one function a verb, no logic of its own, and nothing heavy imported before it is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .reader.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Multi-head attention: see what each head of a model does.")


@app.callback()
def verbs() -> None:
    """Multi-head attention: see what each head of a model does."""


@app.command()
def read(
    model: Annotated[str | None, typer.Argument(
        help="A directory with a transformers checkpoint, a GGUF file or a hub name; nothing: the built-in model.")] = None,
    text: Annotated[str | None, typer.Option(help="A text file, or - for standard input.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page (one HTML file) here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the table here, so that it can be loaded again.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table's values here.")] = None,
    all_heads: Annotated[bool, typer.Option("--all", help="Print every head.")] = False,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, or auto: as stored.")] = "float32",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")] = False,
) -> None:
    """Show what each head of a model does on a text."""
    for option, path in (("--out", out), ("--json", json), ("--csv", csv)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{option} {path}: the folder {path.absolute().parent} doesn't exist; make it first, or give a "
                             "path in one that does")
        if path is not None and path.is_dir():
            raise ValueError(f"{option} {path}: is a folder; give the name of a file in it")
    for option, path, suffix in (("--json", json, ".json"), ("--csv", csv, ".csv")):
        if path is not None and path.suffix != suffix:
            raise ValueError(f"{option} {path}: expected a name that ends in {suffix}")
    written = [str(path.absolute()) for path in (out, json, csv) if path is not None]
    if len(set(written)) < len(written):
        raise ValueError(f"--out, --json and --csv: {written[0]} is given twice, and one would write over the other")
    from .models.loading import DTYPES, load

    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    from .models.texts import builtin_text, read_text

    words = builtin_text() if text is None and prompt is None else read_text(text, prompt=prompt)
    name = "prompt" if prompt is not None else "standard input" if text == "-" else text or "built-in text"
    opening = " ".join(words[:200].split())
    name += f": {opening[:60]}…" if len(opening) > 60 else f": {opening}"

    from .reader.read import read as read_heads

    with _progress("loading the model"):
        loaded = load(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    if loaded.tokenizer is None:
        raise ValueError(f"MODEL {model}: has no tokenizer (tokenizer.json and tokenizer_config.json), so it can't be given "
                         "text; put the files there, or read it from Python with ready-made inputs")
    with _progress("reading") as step:
        table = read_heads(loaded.model, words, tokenizer=loaded.tokenizer, progress=step)
    table.meta |= {"model": loaded.name, "text": name}
    for path in (json, csv):  # written before anything is printed: the reader of a pipe may be gone by then
        if path is not None:
            table.save(path)
    if out is not None:
        from .report.chosen import chosen_maps
        from .report.page import write_page

        with _progress("drawing the page"):
            found, note = chosen_maps(loaded.model, words, table, loaded.tokenizer)
            table.meta["notes"] = [*table.meta["notes"], *note]
            write_page(out, table, found)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    _show(table, all_heads)
    for path in (json, csv):
        if path is not None:
            print(f"wrote {path}")
    if out is not None:
        print(f"wrote {out.absolute()}: open it in a browser")


def _show(table: Table, all_heads: bool) -> None:
    from .reader.console import print_table

    print_table(table, all_heads=all_heads)


def _progress(what: str) -> Any:
    from .report.progress import progress

    return progress(what)


def main() -> None:
    """The entry point: what a user got wrong is one line on standard error and exit code 2."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        print(f"multihead: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("multihead: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
