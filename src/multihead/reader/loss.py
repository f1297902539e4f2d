"""What a model loses on a text, and what its heads have to do with it: `importance` by one backward
pass, `effect` by removal.

The loss is the sum over tokens of -log p(token), in nats, so that neither number hangs on the
length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..models.instrument import HeadIntervention, instrument
from ..models.introspect import forward_kwargs

if TYPE_CHECKING:
    from .session import Reading

Step = Callable[[], None]


def losses(
    model: nn.Module,
    batch: Mapping[str, Any],
    output: Any,
    *,
    causal: bool | None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each document and the number of its tokens, `[B]` both.

    The target of a row is its label where the batch has `labels` (-100: none), else the token that
    comes next. Tokens that aren't among those that `counts` `[B, L]` names have no loss; in an
    encoder-decoder they are what its rows should say.
    """
    logits = output.get("logits") if isinstance(output, dict) else None
    named = type(model).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise MultiheadError(
            f"{named} gives no logits for each token, so it has no loss that importance or effect"
            " could be of; leave them out, or load it with its language-modelling head"
            " (AutoModelForCausalLM)"
        )
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    labels, ids = batch.get("labels"), batch.get("decoder_input_ids" if encodes else "input_ids")
    mask = batch.get("decoder_attention_mask" if encodes else "attention_mask")
    positions = batch.get("decoder_position_ids" if encodes else "position_ids")
    if labels is not None and labels.shape != logits.shape[:2]:
        raise MultiheadError(
            f"labels {list(labels.shape)}: importance and effect need one label for each token, "
            f"{list(logits.shape[:2])} (-100 where there is none)"
        )
    if labels is not None:
        target = (
            labels
            if not causal or encodes
            else torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        )
    elif ids is not None and (
        causal is not False or encodes
    ):  # of a text of one token it isn't known, and no matter
        target = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        if mask is not None and mask.ndim == 2:
            real = mask[:, -ids.shape[1] :].bool()
            target = target.masked_fill(
                ~torch.nn.functional.pad(real[:, 1:] & real[:, :-1], (0, 1)), -100
            )
        if (
            positions is not None and positions.ndim == 2 and positions.shape[1] == ids.shape[1]
        ):  # texts packed in one row
            target = target.masked_fill(
                torch.nn.functional.pad(positions.diff(dim=1) != 1, (0, 1)), -100
            )
    else:
        raise MultiheadError(
            f"{named} doesn't say which token comes next, so importance and effect need labels:"
            " give ready-made batches with labels [B, L] (-100 where there is none)"
        )
    if logits.shape[1] != target.shape[1]:
        raise MultiheadError(
            f"logits of {logits.shape[1]} rows and targets of {target.shape[1]}: importance and"
            " effect need one logit vector for each token; give labels of that length, or leave"
            " the pictures out"
        )
    if counts is not None:
        if (
            labels is None and not encodes
        ):  # a token of a text that is read in windows stands a row behind what tells it
            counts = torch.nn.functional.pad(counts[:, 1:], (0, 1))
        target = target.masked_fill(~counts.to(target.device), -100)
    work = torch.promote_types(logits.dtype, torch.float32)
    each = torch.nn.functional.cross_entropy(
        logits.to(work).transpose(1, 2), target, ignore_index=-100, reduction="none"
    )
    return each.sum(1), (target != -100).sum(1)


def weigh(session: Reading, batch: Mapping[str, Any]) -> None:
    """One pass under reading and back, adding `importance`: abs(O_h,i . dL/dO_h,i) of every real
    row of every head.

    To first order that is what the loss changes by if the head's update at that row goes.
    Parameters' own gradients are left alone.
    """
    model = session.model
    if any(p.is_inference() for p in model.parameters()):
        raise MultiheadError(
            "importance needs gradients, and the model was loaded under torch.inference_mode():"
            " load it outside, or leave importance out"
        )
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        batch = {
            k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v
            for k, v in batch.items()
        }
        for observer in session.observers:
            stack.callback(observer.site.out.register_forward_pre_hook(_leaf).remove)
        session.entered = []
        try:
            output = model(**whole_of(model, batch))
            total, _ = losses(model, batch, output, causal=session.causal, counts=session.select)
            entered, session.entered = session.entered, None
            grads = torch.autograd.grad(total.sum(), [x for _, x, _ in entered], allow_unused=True)
        finally:
            session.entered = None
    for (observer, x, real), grad in zip(entered, grads):
        if grad is None:
            session.why[f"{observer.site.name} importance"] = "the loss doesn't hang on it"
            continue
        shape = (*real.shape, observer.site.num_heads, observer.site.head_dim)
        values = (x.detach() * grad).reshape(shape).double().sum(-1).abs()  # [B, L, H]
        rows = real.sum(-1, keepdim=True).double().expand(-1, shape[2])
        observer.add("importance", torch.where(real[..., None], values, 0).sum(1), rows, rows)


def _leaf(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Frozen parameters give a graph without a beginning: the first site becomes one."""
    return args if args[0].requires_grad else (args[0].detach().requires_grad_(), *args[1:])


def remove(session: Reading, batch: Mapping[str, Any], means: Mapping[str, Tensor]) -> None:
    """One pass a head over a batch without it, adding `effect` (its update zero) or, given means,
    `effect_mean`.
    """
    model, causal = session.model, session.causal
    with session.aside(), torch.no_grad():
        whole = whole_of(model, batch)
        base, count = losses(model, batch, model(**whole), causal=causal, counts=session.select)
        for observer in session.observers:
            site, found = observer.site, []
            if not observer.reached:
                continue
            for h in range(site.num_heads):
                mean = {site.name: means[site.name][h]} if means else None
                off = HeadIntervention({site.name: [h]}, constant=mean)
                with instrument(model, off, sites=[site]):
                    output = model(**whole)
                loss, _ = losses(model, batch, output, causal=causal, counts=session.select)
                found.append(loss - base)
                if session.on_site is not None:
                    session.on_site()
            rows = count.double()[:, None].expand(-1, site.num_heads)
            observer.add(
                "effect_mean" if means else "effect", torch.stack(found, 1).double(), rows, rows
            )


def whole_of(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs for a loss of one's own: logits of every row, no cache, and no loss of the
    model's.
    """
    decoder = (
        getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        and "decoder_input_ids" not in batch
    )
    # of an encoder-decoder the decoder's input may be made of the labels
    inputs = {k: v for k, v in batch.items() if k != "labels" or decoder}
    return forward_kwargs(model, inputs, logits="all")
