"""The jobs of the commands prune, share, tune, curve and evaluate: texts that don't overlap,
the change, measurements before and after it, and the checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.documents import Document
from ..data.scoring import find_loss, require_loss
from ..data.sources import Documents
from ..data.windows import cut_texts
from ..errors import MultiheadError
from ..io import Progress, parse_json, read_regular_file
from ..models.contexts import evaluation
from ..models.gguf_write import require_gguf_output, require_gguf_plan
from ..models.loading import LoadedModel
from ..models.pruned import finalize_config
from ..models.site import find_sites
from ..models.source import find_source
from .checkpoint import Written, is_gguf, require_new_checkpoint, who_loads
from .checkpoint import save as save_checkpoint
from .compensation import COMPENSATIONS
from .curve import Point, measure_curve
from .gqa import Shared, share
from .losses import Difference, Losses, compare_losses, evaluate, load_measure
from .overlap import require_disjoint
from .plan import Plan, count_to_remove
from .prune import Pruned, prune
from .pruner import CANDIDATES, Pruner
from .similarity import Similarity, embed, load_pairs
from .tune import CONTEXT, Tuned, tune

__all__ = [
    "Job",
    "Judge",
    "Judgement",
    "Outcome",
    "compare_models",
    "read_texts",
    "require_separate",
    "separate_texts",
]

AT = "30%"  # of the heads: where `curve` chooses the criterion unless one is given


@dataclass(frozen=True)
class Judgement:
    """A measure of two models, `before` and `after` a change, and their paired difference."""

    name: str
    before: float
    after: float
    change: Difference
    higher_is_better: bool = False
    perplexities: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "measure": self.name,
            "before": self.before,
            "after": self.after,
            "difference": self.change.mean,
            "interval": [self.change.low, self.change.high],
            "documents": self.change.documents,
            "higher is better": self.higher_is_better,
        }


class Judge:
    """Measures a model by its loss on texts, by a similarity task, or by a user-defined function.

    Args:
        tokenizer: the model's own.
        texts: evaluation texts; or
        pairs: a file of pairs of texts with their similarity; or
        measure: "FILE.py:NAME", a function that is called with (model, tokenizer).
        context: tokens of a window of the texts; see `evaluate`.
        tokens: tokens of the texts to use at most.
        progress: called with (done, total, stage).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        texts: list[Document] | None = None,
        pairs: str | Path | None = None,
        measure: str | None = None,
        context: int | None = None,
        tokens: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if sum(way is not None for way in (texts, pairs, measure)) != 1:
            raise MultiheadError("give one way to evaluate: texts, similarity pairs or a function")
        self.tokenizer, self.texts, self.progress = tokenizer, texts, progress
        self.context, self.tokens = context, tokens
        self.original: nn.Module | None = None  # for what has no loss without it; see `evaluate`
        self.task: Similarity | None = None if pairs is None else load_pairs(pairs)
        self.function = None if measure is None else load_measure(measure)
        self.pairs = pairs

    @property
    def name(self) -> str:
        """Name of the measure, where it is not that of losses."""
        return "agreement with the similarities (Pearson)"

    def require(self, model: nn.Module) -> None:
        """Raise where the model can't be measured so, by trying its first few tokens."""
        if self.task is not None:
            embed(model, self.task.documents[:1], tokenizer=self.tokenizer)
        if self.texts is not None:
            with evaluation(model), torch.no_grad():
                first = cut_texts(model, self.texts, self.tokenizer, tokens=1)
                require_loss(find_loss(model, self.tokenizer, first), model, self.original)

    def measure(self, model: nn.Module) -> Any:
        """Losses, or embeddings: what `compare` takes."""
        if self.task is not None:
            return embed(model, self.task.documents, tokenizer=self.tokenizer)
        if self.function is not None:
            return self.function(model, self.tokenizer)
        assert self.texts is not None
        return evaluate(
            model,
            self.texts,
            tokenizer=self.tokenizer,
            original=self.original,
            context=self.context,
            tokens=self.tokens,
            progress=self.progress,
        )

    def value(self, measured: Any) -> float:
        """One number of what `measure` returned: the mean loss, or Pearson's correlation."""
        if self.task is not None:
            return float(self.task.agreement(measured).pearson)
        return float(measured.mean)

    def compare(self, before: Any, after: Any) -> Judgement:
        """The paired comparison of what `measure` returned for two models."""
        values = self.value(before), self.value(after)
        if self.task is not None:
            return Judgement(self.name, *values, self.task.compare(before, after), True)
        assert isinstance(before, Losses) and isinstance(after, Losses)
        a, b = before.perplexity, after.perplexity
        return Judgement(
            before.name,
            *values,
            compare_losses(before, after),
            before.higher_is_better,
            None if a is None or b is None else (a, b),
        )


@dataclass
class Outcome:
    """Result of a job: what to print of it, and all of it as JSON."""

    result: Pruned | Shared | Tuned
    judgements: dict[str, Judgement]
    loads: str
    saved: Written | None
    report: dict[str, Any]


class Job:
    """A loaded model, its calibration texts, and how the result is measured and written.

    Whatever can be wrong with them is raised here, before any work.

    Args:
        loaded: the model to start from, with its tokenizer.
        texts: calibration texts.
        judge: how the result is measured, if it is.
        context: tokens of a window of the calibration texts; by default that of the job.
        tokens: calibration tokens to use at most.
        seed: of random plans and of the order of batches.
        save: a new folder for the checkpoint.
        progress: called with (done, total, stage).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        texts: list[Document],
        *,
        judge: Judge | None = None,
        context: int | None = None,
        tokens: int | None = None,
        seed: int = 0,
        save: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        if save is not None:
            require_new_checkpoint(save, "save")
        self.loaded, self.texts, self.judge = loaded, texts, judge
        self.context, self.tokens, self.seed, self.save = context, tokens, seed, save
        self.progress = progress or (lambda done, total, stage: None)
        self.to_gguf = save is not None and is_gguf(save)
        if self.to_gguf:
            require_gguf_output(loaded.model, loaded.tokenizer, find_source(loaded.model))
        if judge is not None:
            judge.original = loaded.model
            judge.require(loaded.model)

    def prune(
        self,
        *,
        remove: str | None = None,
        keep: str | None = None,
        plan: Path | None = None,
        kind: str = "any",
        layers: list[str] | None = None,
        criterion: str | None = None,
        compensate: str | None = None,
        steps: int = 1,
    ) -> Outcome:
        """Remove heads; arguments as of `multihead.prune`, and `plan` a file."""
        given = {"--remove": remove, "--keep": keep, "--plan": plan}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            what = " and ".join(f"{name} {value}" for name, value in given.items())
            raise MultiheadError(
                f"{what or '--remove, --keep and --plan are missing'}: give one of them, which"
                " says what to remove"
            )
        _require_whole(self.loaded)
        if self.to_gguf and plan is None:
            require_gguf_plan(self.loaded.model, kind, compensate, self._share_left(remove, keep))
        result = prune(
            self.loaded.model,
            self.texts,
            tokenizer=self.loaded.tokenizer,
            remove=remove if plan is None else Plan.load(plan),
            keep=keep,
            kind=kind,
            layers=layers,
            criterion=criterion,
            compensate=compensate,
            steps=steps,
            context=self.context,
            tokens=self.tokens,
            seed=self.seed,
            progress=self.progress,
        )
        return self._finish(result)

    def _share_left(self, remove: str | None, keep: str | None) -> float | None:
        """The share of the heads that stay; None where `prune` will raise."""
        amount = keep if remove is None else remove
        if amount is None or None not in (remove, keep):
            return None
        total = sum(site.num_heads for site in find_sites(self.loaded.model))
        return 1 - count_to_remove(amount, total, keep=remove is None) / total

    def share(
        self,
        num_kv_heads: int,
        *,
        method: str,
        choice: str,
        layers: list[str] | None = None,
        refit: bool = True,
    ) -> Outcome:
        """Share key/value heads; arguments as of `multihead.share`."""
        _require_whole(self.loaded)
        if self.to_gguf and layers is not None:
            raise MultiheadError(
                f"--save {self.save} with --layers: a GGUF file has one number of key/value heads"
                " for all layers; leave one of them out"
            )
        result = share(
            self.loaded.model,
            self.texts,
            tokenizer=self.loaded.tokenizer,
            num_kv_heads=num_kv_heads,
            method=method,
            choice=choice,
            layers=layers,
            refit=refit,
            context=self.context,
            tokens=self.tokens,
            progress=self.progress,
        )
        return self._finish(result)

    def tune(self, student: LoadedModel, steps: int, *, batch_size: int = 4) -> Outcome:
        """Train the layers in which `student` differs from this job's model, to give its
        outputs.
        """
        model = student.model
        judgements = {}
        measured = None if self.judge is None else self.judge.measure(self.loaded.model)
        if self.judge is not None:
            judgements["evaluation"] = self.judge.compare(measured, self.judge.measure(model))
        progress_file = None if self.save is None else Path(f"{self.save}.progress")
        result = tune(
            model,
            self.loaded.model,
            self.texts,
            tokenizer=student.tokenizer,
            steps=steps,
            context=self.context or CONTEXT,
            batch_size=batch_size,
            seed=self.seed,
            resume=progress_file,
            progress=self.progress,
        )
        report = {"teacher": self.loaded.name, "student": student.name} | asdict(result)
        if self.judge is not None:
            after = f"after {steps} steps of tuning"
            judgements[after] = self.judge.compare(measured, self.judge.measure(model))
        report |= {name: judgement.to_json() for name, judgement in judgements.items()}
        plain, written = finalize_config(model), None
        if self.save is not None:
            files = _reports(student.path) | {"tuning.json": report}
            written = save_checkpoint(
                model,
                student.tokenizer,
                self.save,
                plain=bool(plain),
                extra=files,
                summary=f"The layers that this changed were tuned for {steps} steps.",
            )
            report |= written.to_json()
            assert progress_file is not None
            progress_file.unlink(missing_ok=True)
        loads = who_loads(bool(plain), plain.reason)
        return Outcome(result, judgements, loads, written, report)

    def curve(
        self,
        *,
        kind: str = "any",
        layers: list[str] | None = None,
        criterion: str | None = None,
        compensate: str | None = None,
    ) -> list[Point]:
        """Measure loss, size, cache and time with 10% to 90% of the heads removed; without a
        criterion, by the best one at 30%.
        """
        judge = self.judge
        assert judge is not None
        pruner = Pruner(
            self.loaded.model,
            self.texts,
            tokenizer=self.loaded.tokenizer,
            layers=layers,
            context=self.context,
            tokens=self.tokens,
            seed=self.seed,
            progress=self.progress,
        )
        if criterion is None or compensate is None:
            candidates = pruner.try_criteria(
                count_to_remove(AT, pruner.num_heads),
                kind,
                CANDIDATES if criterion is None else (criterion,),
                COMPENSATIONS[:2] if compensate is None else (compensate,),
            )
            best = next(c for c in candidates if c.criterion != "random" or criterion == "random")
            criterion, compensate = best.criterion, best.compensate
        return measure_curve(
            pruner, kind, criterion, compensate, lambda model: judge.value(judge.measure(model))
        )

    def _finish(self, result: Pruned | Shared) -> Outcome:
        """Measure the result and write it."""
        report = result.to_json() | {"model": self.loaded.name}
        judgements = {}
        if self.judge is not None:
            before, after = map(self.judge.measure, (self.loaded.model, result.model))
            judgements["evaluation"] = self.judge.compare(before, after)
            report["evaluation"] = judgements["evaluation"].to_json()
        if self.save is not None:
            report |= result.save(self.save, report).to_json()
        loads = who_loads(result.loads_in_transformers, result.why_not_plain)
        return Outcome(result, judgements, loads, result.written, report)


def compare_models(
    judge: Judge, model: LoadedModel, original: LoadedModel | None = None
) -> Judgement | dict[str, Any]:
    """The measure of a model, or its comparison with the original one."""
    measured = judge.measure(model.model)
    if original is not None:
        return judge.compare(judge.measure(original.model), measured)
    losses = measured if isinstance(measured, Losses) else None
    return {
        "model": model.name,
        "measure": judge.name if losses is None else losses.name,
        "value": judge.value(measured),
        "perplexity": None if losses is None else losses.perplexity,
    }


def require_separate(calibration: list[Document], judge: Judge) -> None:
    """Raise where the texts that a judge measures on overlap with the calibration texts."""
    judged = judge.texts if judge.task is None else judge.task.documents
    if judged is None:
        return
    try:
        require_disjoint(calibration, judged)
    except MultiheadError as error:
        where = "" if judge.pairs is None else f"--similarity {judge.pairs}: "
        raise MultiheadError(f"{where}{error}") from None


def _require_whole(loaded: LoadedModel) -> None:
    """Raise where the model isn't the one that its checkpoint holds: the smaller one would be saved
    without the rest of it, or with random weights.
    """
    if not loaded.differences:
        return
    advice = (
        'name the class that its weights are for under "architectures" in its config.json, such as'
        f" {type(loaded.model).__name__.removesuffix('Model')}ForSequenceClassification for one"
        " with a classifier"
    )
    if "random" in loaded.differences[0]:
        advice = (
            "prune it from Python without its pooler: AutoModel.from_pretrained(folder,"
            " add_pooling_layer=False)"
        )
    raise MultiheadError(
        f"model={loaded.name!r}: {loaded.differences[0]}; what was opened isn't the model that the"
        f" checkpoint holds, and neither would the smaller one be. To keep all of it, {advice}"
    )


def _reports(folder: Path) -> dict[str, Any]:
    """Report in a folder's checkpoint of how it was pruned or shared."""
    files = (folder / name for name in ("plan.json", "pruning.json", "sharing.json"))
    return {
        file.name: parse_json(read_regular_file(file, str(file)), str(file))
        for file in files
        if file.is_file()
    }


def read_texts(sources: list[str], option: str) -> tuple[list[Document], Documents]:
    """All texts of files, folders or standard input ("-"); raises where there is none."""
    documents = Documents(sources, argument=option.removeprefix("--"))
    texts = list(documents)
    if not texts:
        raise MultiheadError(
            f"{option} {' '.join(sources)}: holds no text, only empty files or lines"
        )
    return texts, documents


def separate_texts(
    calibrate: list[str], evaluate: list[str]
) -> tuple[list[Document], list[Document] | None]:
    """The calibration and the evaluation texts; raises where they overlap."""
    if "-" in calibrate and "-" in evaluate:
        raise MultiheadError(
            "--calibrate - and --evaluate -: standard input is one text; give a file for one of"
            " them"
        )
    texts, scored = read_texts(calibrate, "--calibrate")
    if not evaluate:
        return texts, None
    held_out, judged = read_texts(evaluate, "--evaluate")
    require_disjoint(texts if "-" in calibrate else scored, held_out if "-" in evaluate else judged)
    return texts, held_out
