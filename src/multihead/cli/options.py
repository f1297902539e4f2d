"""Options that several commands take, each defined once, and the checks of paths to write to."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ..errors import MultiheadError, MultiheadWarning
from ..io import Progress, require_file_path
from ..outside import clean_lines

if TYPE_CHECKING:
    from ..models.loading import LoadedModel

TRIAL = "The head reads."
# A value as messages quote it.
VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^\s,;:)]+"""
DEBUG = "MULTIHEAD_DEBUG"  # environment variable: show the traceback of every error

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Folder with a transformers checkpoint, GGUF file or hub name; the built-in model"
        " unless given."
    ),
]
LayersOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYERS", help="Only these layers: numbers, ranges (3-10) or labels. Repeatable."
    ),
]
CalibrateOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Calibration text: a file, a folder, or - for standard input; of JSON lines the"
        " 'text', with its 'label' for a classifier. Repeatable.",
    ),
]
EvaluateOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Another text, on which the loss before and after is measured. Repeatable.",
    ),
]
KindOption = Annotated[
    str,
    typer.Option(
        help="Which heads may go together: any; even (the same number from each key/value group);"
        " groups (whole groups); uniform (the same number in every layer, which plain transformers"
        " loads)."
    ),
]
CriterionOption = Annotated[
    str | None,
    typer.Option(
        help="Score of a head: taylor, taylor_mean, fisher, flap, share, norm, weights,"
        " ablation or random; /layer or /zscore after it compares heads within their layer. The"
        " best on a held-out part of the calibration text unless given."
    ),
]
CompensateOption = Annotated[
    str | None,
    typer.Option(
        help="Replacement of removed heads: refit (least squares), mean or none. The better of the"
        " first two unless given."
    ),
]
SimilarityOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='Evaluate an encoder on this: JSON lines {"a": text, "b": text, "score": number}.',
    ),
]
MeasureOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="Evaluate with a user-defined function, called with (model, tokenizer).",
    ),
]
TokensOption = Annotated[int, typer.Option(help="Number of tokens to use of each text, at most.")]
SeedOption = Annotated[int, typer.Option(help="Seed of all random choices.")]
BatchSizeOption = Annotated[int, typer.Option(help="Number of sequences in one forward pass.")]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write the checkpoint of the new model to this new folder, or to a new file in .gguf.",
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="Split texts into windows of this many tokens; by default a few hundred, as the model"
        " and the text allow.",
    ),
]
PairsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Calibrate an encoder-decoder on this in place of a text: JSON lines"
        ' {"source": text, "target": text}.',
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        help="Split texts into windows of this many tokens, instead of truncating them at the"
        " model's maximum length."
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all results to this file.")
]
CsvOption = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Write the values to this file.")
]
AllHeadsOption = Annotated[bool, typer.Option("--all", help="Print every head.")]


@dataclass(frozen=True)
class Runtime:
    """How a model is opened: the options that every command with a model has."""

    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1 or mps.")] = "cpu"
    dtype: Annotated[
        str,
        typer.Option(
            help="Number format of the weights: float32, bfloat16, float16, float64, or auto (as"
            " stored)."
        ),
    ] = "float32"
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code in the checkpoint.")
    ] = False

    def load(
        self, model: str | None, *, device: str | None = None, quiet: bool = False
    ) -> LoadedModel:
        """Open a model that is given text, so it needs a tokenizer. Notes on how it was opened
        are printed on standard error, unless `quiet`.
        """
        from ..models.loading import load_with_tokenizer

        with _hold_back_panics():
            loaded = load_with_tokenizer(
                model,
                device=device or self.device,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
            )
        if loaded.tokenizer is None:
            raise MultiheadError(
                f"MODEL {model}: has no tokenizer (tokenizer.json and tokenizer_config.json), so it"
                " can't be given text; put the files there, or use it from Python with tokenized"
                " inputs"
            )
        with _hold_back_panics():
            _try_on_text(loaded)
        if not quiet:
            for note in loaded.notes:
                print_text(f"note: {loaded.name}: {note}", sys.stderr)
        return loaded


@contextmanager
def _hold_back_panics() -> Iterator[None]:
    """Keep from the terminal what native code writes to standard error, such as the backtrace of a
    tokenizer that panics; its exception has the message. What Python writes still appears.
    """
    sys.stderr.flush()
    try:
        is_real = sys.stderr.fileno() == 2
    except (OSError, ValueError):  # replaced by something that is no file
        is_real = False
    before = os.dup(2)
    python = sys.stderr
    if is_real:  # never closed: the thread that draws a progress bar may be writing to it
        python = open(os.dup(before), "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    with tempfile.TemporaryFile() as native, redirect_stderr(python):
        os.dup2(native.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def _try_on_text(loaded: LoadedModel) -> None:
    """Run the tokenizer and the model once on a few words, since a checkpoint can be such that it
    opens and doesn't run.
    """
    import torch

    from ..data.batching import first_batch
    from ..models.guard import blame_checkpoint

    inputs, _ = first_batch(loaded.model, [TRIAL], loaded.tokenizer)
    what = f"model={loaded.name!r}: it opens, but can't run on {TRIAL!r}"
    with torch.no_grad(), blame_checkpoint(what, ". Check its config and its tokenizer"):
        loaded.model(**inputs)


def _show_traceback(value: bool) -> None:
    if value:
        os.environ[DEBUG] = "1"


DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of any error (also MULTIHEAD_DEBUG=1).",
        callback=_show_traceback,
        is_eager=True,
        expose_value=False,
    ),
]


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that all have: `--debug`, and in place of a parameter `runtime`
    those of `Runtime`.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.name != "runtime"]
    has_runtime = len(parameters) < len(signature.parameters)
    hints = inspect.get_annotations(Runtime, eval_str=True)
    names = [field.name for field in fields(Runtime)] if has_runtime else []
    parameters += [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(Runtime)
        if field.name in names
    ]
    parameters.append(
        inspect.Parameter(
            "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption
        )
    )

    options = {p.name: name for p in parameters if (name := _option_of(p))}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        values.pop("debug", None)
        if has_runtime:
            values["runtime"] = Runtime(**{name: values.pop(name) for name in names})
        try:
            with _name_options_in_notes(options):
                command(**values)
        except (MultiheadError, OSError) as error:
            if len(error.args) == 1:  # a message of ours, not the number of a system's error
                error.args = (name_options(str(error), options),)
            raise

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _option_of(parameter: inspect.Parameter) -> str | None:
    """The option that gives a parameter of a command; None for an argument."""
    for info in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(info, typer.models.OptionInfo):
            given = [name for name in info.param_decls or () if name.startswith("--")]
            return given[0] if given else f"--{parameter.name.replace('_', '-')}"
    return None


@contextmanager
def _name_options_in_notes(options: Mapping[str, str]) -> Iterator[None]:
    """Remarks of the library in the words of a command, as its errors are."""
    show = warnings.showwarning

    def show_named(message: Any, category: Any, *place: Any, **more: Any) -> None:
        if issubclass(category, MultiheadWarning):
            message = category(name_options(str(message), options))
        show(message, category, *place, **more)

    warnings.showwarning = show_named
    try:
        yield
    finally:
        warnings.showwarning = show


def name_options(message: str, options: Mapping[str, str]) -> str:
    """A message of the library in the words of a command: its options in place of the arguments
    that they become. Calls of Python, quoted as what to run, and what follows `--args` stay as
    they are.

    Args:
        message: of an error.
        options: by the name of the argument.

    >>> options = {"num_heads": "--num-heads", "statistic": "--statistic", "dtype": "--dtype"}
    >>> name_options("embed=7: give num_heads too, or f(num_heads=8)", options)
    'embed=7: give --num-heads too, or f(num_heads=8)'
    >>> name_options("num_heads=0: give --args '64, num_heads=4'", options)
    "--num-heads 0: give --args '64, num_heads=4'"
    >>> name_options("statistics='x', dtype=None, num_heads=3: give one", options)
    "--statistic 'x', no --dtype, --num-heads 3: give one"
    """
    spelled = {f"{name}{end}": option for name, option in options.items() for end in ("s", "es")}
    spelled |= options
    names = "|".join(sorted(spelled, key=len, reverse=True))
    # alone, such a word is known to be an argument where it is no word of English
    alone = "|".join(sorted((name for name in spelled if "_" in name), key=len, reverse=True))

    def with_value(match: re.Match[str]) -> str:
        option = spelled[match[1]]
        if match[2] in ("None", "False"):
            return f"no {option}"
        return option if match[2] == "True" else f"{option} {match[2]}"

    parts = re.split(r"(\w\([^()]*\)|--args (?:'[^']*'|\S+))", message)
    for n in range(0, len(parts), 2):
        parts[n] = re.sub(rf"(?<![\w.\-])({names})=({VALUE})", with_value, parts[n])
        if alone:
            parts[n] = re.sub(
                rf"(?<![\w.\-/'\"])({alone})(?![\w.\-/'\"=])", lambda m: spelled[m[1]], parts[n]
            )
    return "".join(parts)


def check_outputs(**outputs: tuple[Path | None, str]) -> None:
    """Check files to write, each with its required ending (or several, divided by spaces), before
    any work is done.
    """
    given = [
        (f"--{option}", path, endings.split())
        for option, (path, endings) in outputs.items()
        if path is not None
    ]
    for option, path, endings in given:
        require_file_path(path, option)
        if endings and path.suffix not in endings:
            raise MultiheadError(
                f"{option} {path}: expected a name that ends in {' or '.join(endings)}"
            )
    written = [str(path.absolute()) for _, path, _ in given]
    if len(set(written)) < len(written):
        raise MultiheadError(
            f"{', '.join(option for option, *_ in given)}: {written[0]} is given twice, and one"
            " file would replace the other"
        )


def require_texts(texts: Iterable[str] | None, option: str, purpose: str) -> list[str]:
    """The sources given for a required option."""
    if not texts:
        raise MultiheadError(f"{option} is missing: give a text {purpose}")
    return list(texts)


def print_result(result: object, *written: Path | None) -> None:
    """Print a result and the files written."""
    print_text(result)
    print_written(*written)


def print_written(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            print_text(f"wrote {path}")


def print_text(text: object, file: TextIO | None = None) -> None:
    """Print a text that may quote a checkpoint, a table or the name of a file: everything that a
    command prints, but for tables in colour, goes through here.
    """
    replace_unprintable()
    print(clean_lines(text), file=file)


def replace_unprintable() -> None:
    """Let standard output print "?" for characters that its encoding lacks."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def progress_bar(stage: str = "", rank: int = 0) -> AbstractContextManager[Progress]:
    """A progress bar on standard error; none on the other ranks of a distributed run."""
    from ..report import progress

    return nullcontext(_ignore) if rank else progress.show_progress(stage)


def _ignore(done: int, total: int, stage: str) -> None:
    pass
