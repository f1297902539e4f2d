"""Tune the layers that pruning or sharing changed, by a short distillation from the original
model.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch, concatenate, run_model
from ..data.batching import window_batches
from ..data.documents import Document
from ..errors import MultiheadError
from ..io import Progress, ResumeFile
from ..models.contexts import evaluation
from ..models.introspect import fingerprint, unwrap
from ..models.site import Site, find_sites
from .distillation import distances
from .plan import select_sites

__all__ = ["Tuned", "changed_sites", "tune"]

LEARNING_RATE, BATCH_SIZE, CONTEXT = 5e-4, 4, 512
WARM_UP = 0.05  # of the steps
SECONDS = 30.0  # between two writes of the progress at least
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


@dataclass(frozen=True)
class Tuned:
    """Result of `tune`.

    Attributes:
        losses: the loss of each step, those before a resume included.
        tokens: that were read, those before a resume included.

    >>> Tuned([0.9, 0.4], 4096).losses[-1]
    0.4
    """

    losses: list[float]
    tokens: int


def tune(
    student: nn.Module,
    teacher: nn.Module,
    texts: Document | Iterable[Document] | Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    layers: Iterable[int | str] | None = None,
    steps: int,
    seed: int = 0,
    learning_rate: float = LEARNING_RATE,
    batch_size: int = BATCH_SIZE,
    context: int = CONTEXT,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Train W_Q, W_K, W_V and W_O (and their biases) of the changed layers in place, to give what
    the original model gives.

    The loss of a step is the distance of the student's outputs from the teacher's, as pruning
    measures it: for logits the Kullback-Leibler divergence of the predictions, per token or
    sequence (Hinton et al. 2015); for embeddings and hidden states the squared difference, relative
    to the square. (Matching the update of each changed layer as well gave no better perplexity.)
    AdamW without weight decay, warm-up, cosine schedule.

    Args:
        student: the changed model.
        teacher: the original model.
        texts: calibration texts or conversations, rows with a source and a target (else an
            encoder-decoder's targets are what the teacher generates), or ready-made batches of
            model inputs.
        tokenizer: the model's tokenizer, for texts.
        layers: labels, numbers or ranges of layers to train; by default those whose projections
            differ from the teacher's.
        steps: batches of `batch_size` windows of `context` tokens to train on, in an order drawn
            with `seed`, each window once before any comes twice.
        resume: a file for the progress. If it exists, the tuning continues from it; it must have
            been started with the same arguments.
        progress: called after each step with steps done, steps in all, and a stage that names the
            loss, "tuning, loss 0.0123".

    Raises:
        MultiheadError: numbers out of range, no layer to train, a progress file that is damaged or
            of another tuning, a loss that isn't finite.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> text = "It was the best of times, it was the worst of times. " * 40
    >>> plan = multihead.Plan(("L0.H3", "L1.H2"))
    >>> smaller = multihead.prune(model, text, tokenizer=tokenizer, remove=plan, context=64).model
    >>> done = tune(smaller, model, text, tokenizer=tokenizer, steps=4, context=64)
    >>> len(done.losses), all(loss > 0 for loss in done.losses)
    (4, True)
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise MultiheadError(f"{name}={value!r}: expected a whole number from 1 on")
    if not 0 < learning_rate < math.inf:
        raise MultiheadError(
            f"learning_rate={learning_rate!r}: expected a number above 0, such as {LEARNING_RATE}"
        )
    student, teacher = unwrap(student), unwrap(teacher)
    if layers is None:
        sites = changed_sites(student, teacher)
    else:
        sites = select_sites(find_sites(student), layers)
    if not sites:
        raise MultiheadError(
            "no layer of the student has attention that differs from the teacher's, so there is"
            " nothing to tune (from Python layers=[...] trains some all the same)"
        )
    windows = window_batches(teacher, texts, tokenizer, context=context)
    full = [window for window in windows if _length(window) >= context]
    if full and tokenizer is not None:  # the ends of texts would leave batches ragged
        windows = full
    windows = [_masked(window) for window in windows]
    trained = _parameters(sites)
    masters = {
        name: p if p.dtype == torch.float32 else p.detach().float() for name, p in trained.items()
    }
    optimizer = torch.optim.AdamW(
        list(masters.values()), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    settings = {
        "steps": steps,
        "seed": seed,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "context": context,
        "texts": _digest(windows),
        "teacher": fingerprint(teacher),
        "trained": {name: list(p.shape) for name, p in trained.items()},
        "weights at the start": {
            name: float(p.detach().double().norm()) for name, p in trained.items()
        },
    }
    file = ResumeFile(resume, "tuning", settings, seconds=SECONDS)
    losses, tokens = file.load(partial(_restore, masters, optimizer)) or ([], 0)
    with (
        evaluation(student),
        evaluation(teacher),
        _only_trained(student, trained.values()),
        torch.enable_grad(),
    ):
        _copy(trained, masters)
        for step in range(len(losses), steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * _rate(step, steps)
            batch = _batch(windows, batch_size, step, seed)
            with torch.no_grad():
                target = run_model(teacher, batch.inputs)
            total, count = distances(student, run_model(student, batch.inputs), target, batch)
            loss = total.sum() / count.sum()
            if not bool(torch.isfinite(loss)):
                raise MultiheadError(
                    f"step {step + 1}: the loss is {loss.item()}; tune with a smaller learning_rate"
                    f" than {learning_rate}"
                )
            loss.backward()
            for name, p in trained.items():
                if masters[name] is not p:
                    masters[name].grad = None if p.grad is None else p.grad.float()
            torch.nn.utils.clip_grad_norm_(list(masters.values()), 1.0)
            optimizer.step()
            _copy(trained, masters)
            for tensor in (*trained.values(), *masters.values()):
                tensor.grad = None
            losses.append(loss.item())
            tokens += int(batch.inputs["input_ids"].numel()) if "input_ids" in batch.inputs else 0
            if step + 1 == steps or file.is_due():
                file.save({"losses": losses, "tokens": tokens}, _state_of(masters, optimizer))
            if progress is not None:
                progress(step + 1, steps, f"tuning, loss {losses[-1]:.4f}")
    return Tuned(losses, tokens)


def changed_sites(student: nn.Module, teacher: nn.Module) -> list[Site]:
    """The student's sites whose projections differ from the teacher's, in shape or value."""
    originals = {site.name: site for site in find_sites(teacher)}
    changed = []
    if not any(site.name in originals for site in find_sites(student)):
        raise MultiheadError(
            f"the teacher ({type(teacher).__name__}) has none of the student's"
            f" ({type(student).__name__}) layers; give the model that the student was made from"
        )
    for site in find_sites(student):
        try:
            ours = _parameters([site])
            theirs = _parameters([originals[site.name]])
        except (MultiheadError, KeyError):  # projections that can't be split by heads stay
            continue
        is_same = ours.keys() == theirs.keys() and all(
            p.shape == theirs[name].shape and bool((p == theirs[name].to(p)).all())
            for name, p in ours.items()
        )
        if not is_same:
            changed.append(site)
    return changed


def _parameters(sites: Sequence[Site]) -> dict[str, nn.Parameter]:
    """The parameters of the sites' projections by name, each once."""
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    for site in sites:
        slices = site.slices()
        modules = {f"{site.name}.{r.name}": r.module for r in (slices.q, slices.k, slices.v)}
        for name, module in {**modules, site.out_name: slices.out.module}.items():
            for part, parameter in module.named_parameters():
                parameters.setdefault(id(parameter), (f"{name}.{part}", parameter))
    return dict(parameters.values())


@contextmanager
def _only_trained(student: nn.Module, trained: Iterable[Tensor]) -> Iterator[None]:
    """Gradients for these parameters alone; restored at the end."""
    chosen = {id(p) for p in trained}
    before = [(p, p.requires_grad) for p in student.parameters()]
    try:
        for p, _ in before:
            p.requires_grad_(id(p) in chosen)
        yield
    finally:
        for p, required in before:
            p.requires_grad_(required)


@torch.no_grad()
def _copy(trained: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
    for name, p in trained.items():
        if masters[name] is not p:
            p.copy_(masters[name])


def _rate(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up, then half a cosine down."""
    up = max(1, round(WARM_UP * steps))
    if step < up:
        return (step + 1) / up
    return 0.5 * (1 + math.cos(math.pi * (step - up) / max(1, steps - up)))


def _length(window: Batch) -> int:
    ids = window.inputs.get("input_ids")
    return 0 if ids is None else int(ids.shape[-1])


def _masked(window: Batch) -> Batch:
    """The window with an attention mask, since the windows of a step are padded to one length."""
    ids = window.inputs.get("input_ids")
    if ids is None or "attention_mask" in window.inputs:
        return window
    return Batch({"attention_mask": torch.ones_like(ids)} | window.inputs)


def _batch(windows: Sequence[Batch], size: int, step: int, seed: int) -> Batch:
    """The windows of a step. They depend on its number alone, so that a resumed tuning trains on
    the same ones.
    """
    chosen = []
    for i in range(step * size, (step + 1) * size):
        epoch, position = divmod(i, len(windows))
        draw = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(windows), generator=draw)
        chosen.append(windows[int(order[position])])
    return concatenate(chosen)


# ---- progress


def _state_of(masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The trained weights and AdamW's moments, by name."""
    tensors = {f"weight {name}": master for name, master in masters.items()}
    for name, master in masters.items():
        tensors |= {f"{m} {name}": optimizer.state[master][m] for m in MOMENTS}
    return tensors


@torch.no_grad()
def _restore(
    masters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> tuple[list[float], int]:
    """Restore a saved state; returns the losses and the tokens so far."""
    losses, tokens = [float(loss) for loss in state["losses"]], int(state["tokens"])
    for name, master in masters.items():
        master.copy_(tensors[f"weight {name}"])
        moments = {m: tensors[f"{m} {name}"].to(master) for m in MOMENTS}
        optimizer.state[master] = {
            "step": torch.tensor(float(len(losses)), device="cpu"),
            **moments,
        }
    return losses, tokens


def _digest(windows: Sequence[Batch]) -> str:
    digest = hashlib.sha256()
    for window in windows:
        for name, x in sorted(window.inputs.items()):
            shape = tuple(x.shape) if isinstance(x, Tensor) else x
            digest.update(f"{name} {shape}".encode())
            if isinstance(x, Tensor):
                digest.update(x.contiguous().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:16]
