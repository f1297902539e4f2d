"""What the commands `prune` and `share` do, in order: open, keep texts apart, change, judge,
write.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.documents import Documents
from ..errors import MultiheadError
from ..io import Progress, require_new_folder
from ..models.loading import load_with_tokenizer
from ..models.transformers import evaluation
from .checkpoint import who_loads
from .curve import measure_curve, require_curve, save_curve
from .evaluate import Difference, Losses, difference, different, evaluate, function
from .gqa import CHOICES, METHODS, Shared, share
from .pieces import documents_of, loss_kind
from .plan import Plan
from .prune import Pruned, prune
from .pruner import Pruner
from .similarity import Similarity, embed, load_pairs
from .tune import changed_sites, tune

__all__ = ["Done", "Job", "Judge", "Judgement"]


@dataclass(frozen=True)
class Judgement:
    """A measure before and after, and their paired difference."""

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
    """Measures a model on an evaluation text, by a similarity task or by a function of the user's
    own; or not at all.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        texts: list[str] | None = None,
        pairs: str | Path | None = None,
        measure: str | None = None,
        tokens: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        given = [
            name
            for name, value in (("evaluate", texts), ("similarity", pairs), ("measure", measure))
            if value is not None
        ]
        if len(given) > 1:
            raise MultiheadError(f"--{given[0]} and --{given[1]}: give one way to judge the result")
        self.tokenizer, self.texts, self.tokens, self.progress = tokenizer, texts, tokens, progress
        self.task: Similarity | None = None if pairs is None else load_pairs(pairs)
        self.function = None if measure is None else function(measure)

    def __bool__(self) -> bool:
        return self.texts is not None or self.task is not None or self.function is not None

    def check(self, model: nn.Module) -> None:
        """That the model can be judged so, before any work: by its first words."""
        if self.task is not None:
            embed(model, self.tokenizer, self.task.documents[:1])
        if self.texts is not None:
            with evaluation(model), torch.no_grad():
                loss_kind(
                    model,
                    self.tokenizer,
                    documents_of(model, self.texts, self.tokenizer, 1, None, 1),
                )

    def of(self, model: nn.Module) -> Any:
        """What `between` compares: losses, or embeddings."""
        if self.task is not None:
            return embed(model, self.tokenizer, self.task.documents)
        if self.function is not None:
            return self.function(model, self.tokenizer)
        assert self.texts is not None
        return evaluate(
            model, self.texts, self.tokenizer, tokens=self.tokens, progress=self.progress
        )

    def between(self, before: Any, after: Any) -> Judgement:
        if self.task is not None:
            a, b = (self.task.agreement(found).pearson for found in (before, after))
            return Judgement(
                "agreement with the similarities (Pearson)",
                a,
                b,
                self.task.compare(before, after),
                True,
            )
        assert isinstance(before, Losses) and isinstance(after, Losses)
        both = before.perplexity, after.perplexity
        return Judgement(
            before.name,
            before.mean,
            after.mean,
            difference(before, after),
            before.higher_is_better,
            None if both[0] is None or both[1] is None else (both[0], both[1]),
        )


@dataclass
class Done:
    """What a command did: what to print of it, and all of it as JSON."""

    result: Pruned | Shared
    judged: Judgement | None
    tuned: Judgement | None
    steps: int
    loads: str
    out: Path | None
    report: dict[str, Any]


class Job:
    """A model, texts that are apart, and how the result is judged: all that can be wrong with them
    is said before any work.
    """

    def __init__(
        self,
        model: str | None,
        calibrate: list[str],
        evaluate: list[str],
        similarity: str | Path | None = None,
        measure: str | None = None,
        *,
        tokens: int | None = None,
        seed: int = 0,
        out: Path | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        trust_remote_code: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if out is not None:
            require_new_folder(out)
        self.texts, judged = texts_of(calibrate, evaluate)
        self.progress = progress or (lambda done, total, stage: None)
        self.loaded = load_with_tokenizer(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code
        )
        self.tokenizer = self.loaded.tokenizer
        if self.tokenizer is None:
            raise MultiheadError(
                f"MODEL {model}: has no tokenizer (tokenizer.json and tokenizer_config.json), so it"
                " can't be given text; put the files there"
            )
        self.judge = Judge(
            self.tokenizer,
            texts=judged,
            pairs=similarity,
            measure=measure,
            tokens=tokens,
            progress=progress,
        )
        self.judge.check(self.loaded.model)
        if self.judge.task is not None:
            try:
                different(self.texts, self.judge.task.documents)
            except ValueError as error:
                raise MultiheadError(f"--similarity {similarity}: {error}") from None
        self.tokens, self.seed, self.out = tokens, seed, out

    def prune(
        self,
        *,
        heads: str | None = None,
        keep: str | None = None,
        plan: Path | None = None,
        kind: str = "any",
        layers: list[str] | None = None,
        criterion: str | None = None,
        compensate: str | None = None,
        steps: int = 1,
        tune: int = 0,
        curve: Path | None = None,
    ) -> Done:
        if curve is not None and not (self.judge and self.judge.task is None):
            raise MultiheadError(
                f"--curve {curve}: needs --evaluate or --measure, whose loss it draws"
            )
        if curve is not None:
            require_curve(curve, self.loaded.model)
        _not_negative(tune)
        given = None if plan is None else Plan.load(plan)
        model = self.loaded.model
        if given is not None and heads is not None:
            raise MultiheadError(f"--heads {heads} and --plan {plan}: give one of them")
        pruned = prune(
            model,
            self.texts,
            tokenizer=self.tokenizer,
            remove=heads if given is None else given,
            keep=keep,
            kind=kind,
            layers=layers,
            criterion=criterion,
            compensate=compensate,
            steps=steps,
            tokens=self.tokens,
            seed=self.seed,
            progress=self.progress,
        )
        done = self._end(pruned, tune)
        if curve is not None:
            pruner = Pruner(
                model,
                self.texts,
                tokenizer=self.tokenizer,
                layers=layers,
                tokens=self.tokens,
                seed=self.seed,
                progress=self.progress,
            )
            name = "fisher" if pruned.criterion == "given" else pruned.criterion
            points = measure_curve(
                pruner,
                kind,
                name,
                pruned.compensate,
                lambda model: float(self.judge.of(model).mean),
            )
            save_curve(points, curve)
            done.report["curve"] = [asdict(point) for point in points]
        return done

    def share(
        self,
        kv_heads: int,
        *,
        method: str = METHODS[0],
        choice: str = CHOICES[0],
        layers: list[str] | None = None,
        refit: bool = True,
        tune: int = 0,
    ) -> Done:
        _not_negative(tune)
        merged = share(
            self.loaded.model,
            self.texts,
            tokenizer=self.tokenizer,
            num_kv_heads=kv_heads,
            method=method,
            choice=choice,
            layers=layers,
            refit=refit,
            tokens=self.tokens,
            progress=self.progress,
        )
        return self._end(merged, tune)

    def _end(self, result: Pruned | Shared, steps: int) -> Done:
        """Judged, tuned, judged again, and written."""
        before = self.judge.of(self.loaded.model) if self.judge else None
        judged = None if before is None else self.judge.between(before, self.judge.of(result.model))
        report = result.to_json() | {"model": self.loaded.name}
        tuned = None
        if steps:
            self._tune(result.model, steps)
            tuned = (
                None if before is None else self.judge.between(before, self.judge.of(result.model))
            )
        for name, judgement in (
            ("evaluation", judged),
            (f"evaluation after {steps} steps of tuning", tuned),
        ):
            if judgement is not None:
                report[name] = judgement.to_json()
        if self.out is not None:
            result.save(self.out, report)
            self._progress_file.unlink(missing_ok=True)
        return Done(
            result, judged, tuned, steps, who_loads(result.loads_in_transformers), self.out, report
        )

    @property
    def _progress_file(self) -> Path:
        assert self.out is not None
        return Path(f"{self.out}.tuning")

    def _tune(self, model: nn.Module, steps: int) -> None:
        if not changed_sites(model, self.loaded.model):
            raise MultiheadError(
                f"--tune {steps}: no heads are left in the layers that were changed, so there is"
                " nothing to train; leave it out"
            )
        tune(
            model,
            self.loaded.model,
            self.texts,
            tokenizer=self.tokenizer,
            steps=steps,
            seed=self.seed,
            resume=None if self.out is None else self._progress_file,
            progress=self.progress,
        )


def _not_negative(tune: int) -> None:
    if tune < 0:
        raise MultiheadError(f"--tune {tune}: expected a number of steps, 0 for none")


def texts_of(calibrate: list[str], evaluate: list[str]) -> tuple[list[str], list[str] | None]:
    """The calibration and the evaluation texts, refused where they aren't apart."""
    if "-" in calibrate and "-" in evaluate:
        raise MultiheadError(
            "--calibrate - and --evaluate -: standard input is one text; give a file for one of"
            " them"
        )
    scored = Documents(calibrate)
    texts = list(scored)
    if not texts:
        raise MultiheadError(
            f"--calibrate {' '.join(calibrate)}: holds no text, only empty files or lines"
        )
    if not evaluate:
        return texts, None
    judged = Documents(evaluate)
    held = list(judged)
    different(texts if "-" in calibrate else scored, held if "-" in evaluate else judged)
    if not held:
        raise MultiheadError(
            f"--evaluate {' '.join(evaluate)}: holds no text, only empty files or lines"
        )
    return texts, held
