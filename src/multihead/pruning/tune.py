"""A short distillation of the layers that pruning or sharing changed, from the model as it was."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..io import Progress, ResumeFile
from ..models.introspect import fingerprint, forward_kwargs
from ..models.site import Site
from ..models.transformers import evaluation
from .layerwise import batches_of

__all__ = ["Tuned", "tune"]

LEARNING_RATE, BATCH_SIZE, CONTEXT = 5e-4, 4, 512
WARM_UP = 0.05  # of the steps
SECONDS = 30.0  # between two writes of the progress at least
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
ROWS = 256  # whose logits are turned into probabilities at once


@dataclass(frozen=True)
class Tuned:
    """What a tuning did: the loss of each step, and the tokens that were read, those of a resumed
    part included.
    """

    losses: list[float]
    tokens: int


def tune(
    student: nn.Module,
    teacher: nn.Module,
    texts: str | Sequence[str] | Sequence[Mapping[str, Any]],
    tokenizer: Any = None,
    *,
    sites: Sequence[Site],
    steps: int,
    seed: int = 0,
    learning_rate: float = LEARNING_RATE,
    batch_size: int = BATCH_SIZE,
    context: int = CONTEXT,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Trains W_Q, W_K, W_V and W_O (and their biases) of the changed sites, in place, to give what
    the original model gives.

    The loss of a step is the Kullback-Leibler divergence of what the student says from what the
    teacher says, per token (Hinton et al. 2015); for models without logits the squared difference
    of the last hidden states, in proportion to their squares. (Matching what each changed site adds
    to the stream as well gave no better perplexity.) AdamW without decay, warm-up, cosine.

    Args:
        student: the changed model.
        teacher: the original.
        texts: the calibration text or texts, or ready-made batches of one length each.
        tokenizer: the model's own, for texts.
        sites: the student's sites that may change.
        steps: how many batches of `batch_size` windows of `context` tokens are read; in the order
            that `seed` draws, each text once before any comes twice.
        resume: a file for the progress. If it is there, the tuning goes on from it: it must have
            been begun alike.
        progress: called after each step with the steps done, those of all, and a stage that names
            the loss, "tuning, loss 0.0123".

    Raises:
        ValueError: numbers out of range, no site, a progress file that is damaged or of another
            tuning, a loss that isn't a number.

    >>> import copy, multihead
    >>> from multihead.models.site import find_sites
    >>> model, tokenizer = multihead.load_builtin()
    >>> student = copy.deepcopy(model)
    >>> _ = student.model.layers[0].self_attn.v_proj.weight.data.mul_(0.5)
    >>> done = tune(student, model, "it was the best of times " * 40, tokenizer, sites=find_sites(student)[:1], steps=4,
    ...             context=64)
    >>> done.losses[-1] < done.losses[0]
    True
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise MultiheadError(f"{name}={value!r}: expected a whole number from 1 on")
    if not 0 < learning_rate < math.inf:
        raise MultiheadError(
            f"learning_rate={learning_rate!r}: expected a number above 0, such as {LEARNING_RATE}"
        )
    if not sites:
        raise MultiheadError("sites=[]: nothing was changed, so there is nothing to tune")
    windows = batches_of(student, texts, tokenizer, context=context)
    if (
        len(windows) > 1
        and len(short := [w for w in windows if _length(w) < context]) < len(windows)
        and tokenizer is not None
    ):
        windows = [
            w for w in windows if not any(w is s for s in short)
        ]  # the ends of texts would leave batches ragged
    windows = [
        ({"attention_mask": torch.ones_like(w["input_ids"])} if "input_ids" in w else {}) | w
        for w in windows
    ]
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
        _only(student, trained.values()),
        torch.enable_grad(),
    ):
        _copy(trained, masters)
        for step in range(len(losses), steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * _rate(step, steps)
            batch = _batch(windows, batch_size, step, seed)
            loss = _loss(student, teacher, batch)
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
            tokens += int(batch["input_ids"].numel()) if "input_ids" in batch else 0
            if step + 1 == steps or file.is_due():
                file.save({"losses": losses, "tokens": tokens}, _state_of(masters, optimizer))
            if progress is not None:
                progress(step + 1, steps, f"tuning, loss {losses[-1]:.4f}")
    return Tuned(losses, tokens)


def _parameters(sites: Sequence[Site]) -> dict[str, nn.Parameter]:
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for site in sites:
        rows = site.slices()
        named = [(f"{site.name}.{r.name}", r.module) for r in (rows.q, rows.k, rows.v)] + [
            (site.out_name, rows.out.module)
        ]
        for name, module in named:
            for part, parameter in module.named_parameters():
                found.setdefault(id(parameter), (f"{name}.{part}", parameter))
    return dict(found.values())


@contextmanager
def _only(student: nn.Module, trained: Any) -> Iterator[None]:
    """Gradients for these parameters alone, and afterwards for those that had them."""
    chosen = {id(p) for p in trained}
    before = [(p, p.requires_grad) for p in student.parameters()]
    try:
        for p, _ in before:
            p.requires_grad_(id(p) in chosen)
        yield
    finally:
        for p, had in before:
            p.requires_grad_(had)


@torch.no_grad()
def _copy(trained: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
    for name, p in trained.items():
        if masters[name] is not p:
            p.copy_(masters[name])


def _rate(step: int, steps: int) -> float:
    """Of the learning rate: up in a line, then down as half a cosine."""
    up = max(1, round(WARM_UP * steps))
    return (
        (step + 1) / up
        if step < up
        else 0.5 * (1 + math.cos(math.pi * (step - up) / max(1, steps - up)))
    )


def _length(window: Mapping[str, Tensor]) -> int:
    return int(window["input_ids"].shape[1]) if "input_ids" in window else 0


def _batch(windows: Sequence[dict[str, Tensor]], size: int, step: int, seed: int) -> dict[str, Any]:
    """The windows of a step: they follow from its number alone, so that a resumed tuning reads what
    it would have read.
    """
    chosen = []
    for i in range(step * size, (step + 1) * size):
        turn, at = divmod(i, len(windows))
        order = torch.randperm(
            len(windows), generator=torch.Generator().manual_seed((seed * 1_000_003 + turn) % 2**63)
        )
        chosen.append(windows[int(order[at])])
    longest = max(map(_length, chosen))
    padded = [
        {
            name: torch.nn.functional.pad(x, (0, longest - x.shape[1])) if x.ndim == 2 else x
            for name, x in w.items()
        }
        for w in chosen
    ]
    return {name: torch.cat([w[name] for w in padded]) for name in padded[0]}


# ---- the loss


def _loss(student: nn.Module, teacher: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    place = next(student.parameters()).device
    placed = {k: v.to(place) if isinstance(v, Tensor) else v for k, v in batch.items()}
    inputs = forward_kwargs(student, placed, logits="all")
    with torch.no_grad():
        right = teacher(**inputs)
    found = student(**inputs)
    mask = batch.get("attention_mask")
    mask = None if mask is None else mask.bool().to(place)

    def real(x: Tensor) -> Tensor:
        return x.flatten(0, -2) if mask is None or x.shape[:2] != mask.shape else x[mask]

    logits = found.get("logits") if isinstance(found, dict) else None
    if isinstance(logits, Tensor) and logits.ndim == 3:
        s, t = real(logits), real(right["logits"])
        return _Divergence.apply(s, t) / len(s)
    s, t = real(found[0]).float(), real(right[0]).float()
    return (s - t).square().sum() / t.square().sum().clamp(min=1e-12)


class _Divergence(torch.autograd.Function):
    """sum over rows of KL(softmax(teacher) || softmax(student)), a few rows at a time: no more than
    one gradient of the logits' size is held.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        grad = torch.empty_like(student)
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        for at in range(0, len(student), ROWS):
            q, p = (x[at : at + ROWS].float().log_softmax(-1) for x in (student, teacher))
            total += torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
            grad[at : at + ROWS] = q.exp_().sub_(p.exp_())
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0] * grads[0].to(ctx.saved_tensors[0]), None


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
    """Put a saved state back; the losses and the tokens so far."""
    losses, tokens = [float(loss) for loss in state["losses"]], int(state["tokens"])
    for name, master in masters.items():
        master.copy_(tensors[f"weight {name}"])
        moments = {m: tensors[f"{m} {name}"].to(master) for m in MOMENTS}
        optimizer.state[master] = {"step": torch.tensor(float(len(losses))), **moments}
    return losses, tokens


def _digest(windows: Sequence[Mapping[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for window in windows:
        for name, x in sorted(window.items()):
            found.update(
                f"{name} {tuple(x.shape)}".encode() + x.contiguous().cpu().numpy().tobytes()
            )
    return found.hexdigest()[:16]
