"""The commands `prune`, `share`, `tune`, `curve` and `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MultiheadError
from .options import (
    BatchSizeOption,
    CalibrateOption,
    CompensateOption,
    CriterionOption,
    EvaluateOption,
    JsonOption,
    KindOption,
    LayersOption,
    MeasureOption,
    ModelArgument,
    PairsOption,
    Runtime,
    SaveOption,
    SeedOption,
    SimilarityOption,
    TokensOption,
    WindowOption,
    check_outputs,
    print_text,
    print_written,
    progress_bar,
    require_texts,
)

if TYPE_CHECKING:
    from ..pruning.job import Job, Outcome

TOKENS = 16384


def prune_command(
    model: ModelArgument = None,
    remove: Annotated[
        str | None, typer.Option(help="Heads to remove: a share (20%, 0.2) or a number.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Heads to keep instead: a share (80%, 0.8) or a number.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='Heads to remove, by name: JSON {"remove": ["L0.H3", "L4"]}.'
        ),
    ] = None,
    kind: KindOption = "any",
    layers: LayersOption = None,
    calibrate: CalibrateOption = None,
    pairs: PairsOption = None,
    evaluate: EvaluateOption = None,
    criterion: CriterionOption = None,
    compensate: CompensateOption = None,
    rounds: Annotated[
        int, typer.Option(help="Remove heads in this many rounds, and score again after each.")
    ] = 1,
    context: WindowOption = None,
    tokens: TokensOption = TOKENS,
    seed: SeedOption = 0,
    save: SaveOption = None,
    json: JsonOption = None,
    runtime: Runtime = Runtime(),  # noqa: B008  (frozen)
) -> None:
    """Remove heads from a model, measure the loss, and write a checkpoint that loads."""
    check_outputs(json=(json, ".json"))
    if rounds < 1:
        raise MultiheadError(f"--rounds {rounds}: expected a number from 1 on")
    if rounds > 1 and plan is not None:
        raise MultiheadError(
            f"--rounds {rounds} with --plan {plan}: the plan names the heads; leave --rounds out"
        )
    sources = _calibration(calibrate, pairs, "to score heads on, and to --evaluate another")
    with progress_bar() as progress:
        texts = (sources, evaluate or [])
        options = {
            "context": context,
            "tokens": tokens,
            "seed": seed,
            "save": save,
            "progress": progress,
        }
        job = _open_job(runtime, model, texts, options)
        outcome = job.prune(
            remove=remove,
            keep=keep,
            plan=plan,
            kind=kind,
            layers=layers,
            criterion=criterion,
            compensate=compensate,
            steps=rounds,
        )
    _print_outcome(outcome, json)


def share_command(
    model: ModelArgument = None,
    num_kv_heads: Annotated[
        int | None, typer.Option(help="Number of key/value heads in each layer afterwards.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="How heads are merged: svd, aligned or mean (Ainslie et al. 2023).")
    ] = "svd",
    choice: Annotated[
        str, typer.Option(help="Which heads share: similar or neighbours.")
    ] = "similar",
    refit: Annotated[
        bool, typer.Option(help="Refit the output projection by least squares.")
    ] = True,
    layers: LayersOption = None,
    calibrate: CalibrateOption = None,
    pairs: PairsOption = None,
    evaluate: EvaluateOption = None,
    context: WindowOption = None,
    tokens: TokensOption = TOKENS,
    save: SaveOption = None,
    json: JsonOption = None,
    runtime: Runtime = Runtime(),  # noqa: B008  (frozen)
) -> None:
    """Let heads share keys and values: grouped-query or multi-query attention from multi-head."""
    check_outputs(json=(json, ".json"))
    if num_kv_heads is None or num_kv_heads < 1:
        value = "is missing" if num_kv_heads is None else num_kv_heads
        raise MultiheadError(
            f"--num-kv-heads {value}: expected a number from 1 on that divides the layer's heads"
        )
    sources = _calibration(calibrate, pairs, "to calibrate on, and to --evaluate another")
    with progress_bar() as progress:
        texts = (sources, evaluate or [])
        options = {"context": context, "tokens": tokens, "save": save, "progress": progress}
        job = _open_job(runtime, model, texts, options)
        outcome = job.share(num_kv_heads, method=method, choice=choice, layers=layers, refit=refit)
    _print_outcome(outcome, json)


def tune_command(
    model: Annotated[
        str, typer.Argument(help="Folder that 'multihead prune' or 'multihead share' wrote.")
    ],
    teacher: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model before; the built-in model unless given."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of training steps.")] = 100,
    batch_size: BatchSizeOption = 4,
    calibrate: CalibrateOption = None,
    pairs: PairsOption = None,
    evaluate: EvaluateOption = None,
    context: WindowOption = None,
    tokens: TokensOption = TOKENS,
    seed: SeedOption = 0,
    save: SaveOption = None,
    json: JsonOption = None,
    runtime: Runtime = Runtime(),  # noqa: B008  (frozen)
) -> None:
    """Train the layers that pruning or sharing changed, by distillation from the model before.

    With --save DIR progress is kept in DIR.progress: after an interruption the same command
    resumes.
    """
    check_outputs(json=(json, ".json"))
    if steps < 1:
        raise MultiheadError(f"--steps {steps}: expected a number from 1 on")
    sources = _calibration(calibrate, pairs, "to train on, and to --evaluate another")
    with progress_bar() as progress:
        texts = (sources, evaluate or [])
        options = {
            "context": context,
            "tokens": tokens,
            "seed": seed,
            "save": save,
            "progress": progress,
        }
        job = _open_job(runtime, teacher, texts, options)
        outcome = job.tune(runtime.load(model), steps, batch_size=batch_size)
    _print_outcome(outcome, json)


def curve_command(
    model: ModelArgument = None,
    kind: KindOption = "any",
    layers: LayersOption = None,
    calibrate: CalibrateOption = None,
    pairs: PairsOption = None,
    evaluate: EvaluateOption = None,
    measure: MeasureOption = None,
    criterion: CriterionOption = None,
    compensate: CompensateOption = None,
    context: WindowOption = None,
    tokens: TokensOption = TOKENS,
    seed: SeedOption = 0,
    json: JsonOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the curves here: a name in .png or .svg."),
    ] = None,
    runtime: Runtime = Runtime(),  # noqa: B008  (frozen)
) -> None:
    """Measure loss, size, KV cache and latency with 10% to 90% of the heads removed."""
    check_outputs(json=(json, ".json"), plot=(plot, ".png .svg"))
    if json is None and plot is None:
        raise MultiheadError("--json and --plot are missing: give a file for the curve")
    if bool(evaluate) == bool(measure):
        raise MultiheadError(
            "--evaluate and --measure: give one of them, for the loss along the curve"
        )
    sources = _calibration(calibrate, pairs, "to score heads on")
    from ..pruning.curve import require_curve, save_curve

    with progress_bar() as progress:
        texts = (sources, evaluate or [])
        options = {"context": context, "tokens": tokens, "seed": seed, "progress": progress}
        job = _open_job(runtime, model, texts, options, measure)
        for path in filter(None, (json, plot)):
            require_curve(path, job.loaded.model)
        points = job.curve(kind=kind, layers=layers, criterion=criterion, compensate=compensate)
    for path in filter(None, (json, plot)):
        save_curve(points, path)
    print_written(json, plot)


def evaluate_command(
    model: ModelArgument = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Compare with this model, such as the one before pruning."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure the loss on this text: a file, a folder, or - for standard input."
            " Repeatable."
        ),
    ] = None,
    similarity: SimilarityOption = None,
    measure: MeasureOption = None,
    calibrate: CalibrateOption = None,
    context: WindowOption = None,
    tokens: TokensOption = TOKENS,
    json: JsonOption = None,
    runtime: Runtime = Runtime(),  # noqa: B008  (frozen)
) -> None:
    """Measure a model: its loss, its agreement with similarities, or a user-defined measure.

    With --calibrate, the text that heads were scored on, texts that overlap with it are an error.
    """
    check_outputs(json=(json, ".json"))
    if sum(map(bool, (text, similarity, measure))) != 1:
        raise MultiheadError("--text, --similarity, --measure: give one of them")
    from ..pruning.job import Judge, compare_models, read_texts, require_separate
    from ..report.pruned import evaluation_text, save_report

    texts = read_texts(text, "--text")[0] if text else None
    with progress_bar() as progress:
        loaded = runtime.load(model)
        judge = Judge(
            loaded.tokenizer,
            texts=texts,
            pairs=similarity,
            measure=measure,
            context=context,
            tokens=tokens,
            progress=progress,
        )
        if calibrate:
            require_separate(read_texts(calibrate, "--calibrate")[0], judge)
        original = None if against is None else runtime.load(against)
        judge.original = None if original is None else original.model
        judge.require(loaded.model)
        report = compare_models(judge, loaded, original)
    print_text(evaluation_text(report))
    if json is not None:
        save_report(report, json)
    print_written(json)


def _calibration(calibrate: list[str] | None, pairs: Path | None, purpose: str) -> list[str]:
    """The sources of --calibrate or --pairs."""
    if pairs is None:
        return require_texts(calibrate, "--calibrate", purpose)
    if calibrate:
        raise MultiheadError(
            f"--calibrate {calibrate[0]} and --pairs {pairs}: give one of them, a text or pairs of"
            " a source and its target"
        )
    from ..data.sources import require_pairs

    return [str(require_pairs(pairs))]


def _open_job(
    runtime: Runtime,
    model: str | None,
    texts: tuple[list[str], list[str]],
    options: dict[str, Any],
    measure: str | None = None,
) -> Job:
    """Read the calibration and the evaluation texts, open the model, and check all of it."""
    from ..pruning.checkpoint import require_new_checkpoint
    from ..pruning.job import Job, Judge, separate_texts

    if options.get("save") is not None:
        require_new_checkpoint(options["save"], "--save")
    calibration, evaluation = separate_texts(*texts)
    loaded = runtime.load(model)
    judge = None
    if evaluation is not None or measure is not None:
        judge = Judge(
            loaded.tokenizer,
            texts=evaluation,
            measure=measure,
            context=options["context"],
            tokens=options["tokens"],
            progress=options["progress"],
        )
    return Job(loaded, calibration, judge=judge, **options)


def _print_outcome(outcome: Outcome, report: Path | None) -> None:
    from ..report.pruned import outcome_text, save_report

    print_text(outcome_text(outcome))
    if report is not None:
        save_report(outcome.report, report)
    print_written(report)
