"""The distance of a model's outputs from those of the original model: the loss of every head that
isn't scored on tokens or labels.

Each output is compared as rows: logits by the Kullback-Leibler divergence of the predictions (over
classes, over positions where an answer begins or ends, or of each label by itself), embeddings and
hidden states by the squared difference relative to the original's square, scores by the squared
difference (Hinton et al. 2015).

At the original model this loss is at its minimum, so its gradient is zero and shows nothing of a
head. Gradients are taken of the loss on outputs that are drawn from the original's distribution
instead: their mean square is the Fisher information, which is the second derivative of the distance
(Kunstner et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..data.batch import Batch, run_model
from ..errors import MultiheadError
from ..models.introspect import config_of, padding_mask

__all__ = ["DistilledBatch", "distances", "distil"]

CLASSES, LABELS, VALUES = "classes", "labels", "values"
POSITIONS = ("start_logits", "end_logits")  # of question answering: a distribution over positions
LEFT_OUT = ("past_key_values", "hidden_states", "attentions", "loss")
HIDDEN = -1e9  # logit of a position that is padding
FEW = 4096  # classes
ROWS = 256  # whose logits are turned into probabilities at once
RowLoss: TypeAlias = Callable[[str, Tensor, Tensor], Tensor]


class _Rows(NamedTuple):
    """An output as rows `[n, C]`, what they are, the sequence `[n]` that each belongs to, and the
    number of sequences.
    """

    kind: str
    rows: Tensor
    sequence: Tensor
    number: int


@dataclass(frozen=True)
class DistilledBatch(Batch):
    """A batch with the original model's outputs on it; the loss is the distance from them.

    Attributes:
        original: the original's outputs as rows `[n, C]`, by name.
        most: numbers of an output that are compared at most: of more, every k-th row.
    """

    original: dict[str, Tensor] = field(default_factory=dict)
    most: int | None = None

    def losses(
        self, model: nn.Module, output: Any = None, *, most_logits: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The distance of each sequence, float64, and the number of rows it is a sum over, 1 for
        outputs of a whole sequence, `[B]` both.
        """
        return _per_sequence(self._compare(model, output, _distance))

    def gradient_loss(self, model: nn.Module) -> Tensor:
        """The loss on outputs drawn from the original's, summed: the same ones in each call."""
        generator = torch.Generator().manual_seed(0)

        def drawn(kind: str, s: Tensor, t: Tensor) -> Tensor:
            return _drawn_loss(kind, s, t, generator)

        return _per_sequence(self._compare(model, None, drawn))[0].sum()

    def _compare(self, model: nn.Module, output: Any, by: RowLoss) -> list[tuple[_Rows, Tensor]]:
        output = run_model(model, self.inputs) if output is None else output
        found = _outputs_as_rows(model, output, self.inputs, self.most)
        _require_same_outputs(found, self.original)
        return [(a, by(a.kind, a.rows, self.original[name])) for name, a in found.items()]


@torch.no_grad()
def distil(original: nn.Module, batch: Batch, most: int | None = None) -> DistilledBatch:
    """The batch, which is on the model's device, with the outputs of the original model.

    Raises:
        MultiheadError: a model that returns nothing to compare.
    """
    output = run_model(original, batch.inputs)
    rows = _outputs_as_rows(original, output, batch.inputs, most)
    kept = {name: one.rows.clone() for name, one in rows.items()}
    return DistilledBatch(batch.inputs, batch.valid, None, batch.document, kept, most)


def distances(model: nn.Module, output: Any, original: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The distance of an output from the original's on a batch: of each sequence, and the number of
    rows that it is a sum over, `[B]` both. Gradients reach `output` alone.
    """
    found, wanted = (_outputs_as_rows(model, x, batch.inputs) for x in (output, original))
    originals = {name: one.rows for name, one in wanted.items()}
    _require_same_outputs(found, originals)
    return _per_sequence(
        [(a, _distance(a.kind, a.rows, originals[name])) for name, a in found.items()]
    )


def _require_same_outputs(found: Mapping[str, _Rows], original: Mapping[str, Tensor]) -> None:
    """Raise where a model doesn't give the outputs of the one that it is compared with."""
    shapes = [{name: tuple(x.shape) for name, x in original.items()}]
    shapes.append({name: tuple(one.rows.shape) for name, one in found.items()})
    if shapes[0] != shapes[1]:
        first, second = (
            ", ".join(f"{name} {list(shape)}" for name, shape in each.items()) for each in shapes
        )
        raise MultiheadError(
            f"the outputs of the original model are {first} (rows, width), those of the other one"
            f" {second}, so they can't be compared; give a model and the one that it was made from"
        )


# ---- outputs as rows


def _outputs_as_rows(
    model: nn.Module, output: Any, inputs: Mapping[str, Any], most: int | None = None
) -> dict[str, _Rows]:
    mask = padding_mask(inputs)
    if "decoder_input_ids" in inputs:  # the outputs are the decoder's
        mask = padding_mask(inputs, "decoder") if "decoder_attention_mask" in inputs else None
    found = {name: _as_rows(model, name, x, mask, most) for name, x in _compared(output)}
    if not found:
        raise MultiheadError(
            f"{type(model).__name__} returns no tensor of logits, embeddings or hidden states, so"
            " its outputs can't be compared with those of the whole model; give labels"
        )
    return found


def _compared(output: Any) -> list[tuple[str, Tensor]]:
    """The outputs that are what the model is for: all logits, else its embeddings, else its hidden
    states.
    """
    named = list(_named_tensors(output))
    for is_wanted in (
        lambda name: "logits" in name,
        lambda name: name == "sentence_embedding",
        lambda name: name.endswith("_embeds"),
        lambda name: name == "last_hidden_state",
        # a pooler may be random, where the checkpoint has none: only if there is nothing else
        lambda name: name == "pooler_output",
    ):
        if wanted := [(name, x) for name, x in named if is_wanted(name)]:
            return wanted
    return named


def _named_tensors(output: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        output = {"output": output}
    elif isinstance(output, (tuple, list)):
        output = {f"output[{n}]": x for n, x in enumerate(output)}
    for name, x in output.items() if isinstance(output, Mapping) else ():
        is_float = isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0
        if is_float and not any(part in name for part in LEFT_OUT[1:]) and name != LEFT_OUT[0]:
            yield name, x


def _as_rows(
    model: nn.Module, name: str, x: Tensor, mask: Tensor | None, most: int | None
) -> _Rows:
    config = config_of(model)
    problem = getattr(config, "problem_type", None) if name == "logits" else None
    is_class = "logits" in name and problem != "regression"
    kind = CLASSES if is_class else VALUES
    if x.ndim == 1:
        x = x[:, None]
    if name in POSITIONS and x.ndim == 2:
        if mask is not None and mask.shape == x.shape:
            x = x.masked_fill(~mask.to(x.device), HIDDEN)
    elif is_class and x.ndim == 2 and mask is not None and x.shape == mask.shape != (len(x), 1):
        if x.shape[1] != getattr(config, "num_labels", None):
            x, kind = x[..., None], LABELS  # one label for each token
    elif is_class and x.ndim == 4:  # an image of classes, [B, C, H, W]
        x = x.movedim(1, -1)
    if problem == "multi_label_classification":
        kind = LABELS
    elif x.shape[-1] == 1 and kind == CLASSES:
        kind = VALUES  # a score
    number = len(x)
    by_token = mask is not None and x.ndim == 3 and mask.shape == x.shape[:2]
    rows = x.reshape(number, -1, x.shape[-1])
    sequence = torch.arange(number, device=x.device)[:, None].expand(rows.shape[:2])
    if by_token and mask is not None:
        chosen = mask.to(x.device)
        rows, sequence = rows[chosen], sequence[chosen]
    else:
        rows, sequence = rows.flatten(0, 1), sequence.flatten()
    step = 1 if most is None else max(1, -(-rows.numel() // most))
    return _Rows(kind, rows[::step], sequence[::step], number)


def _per_sequence(compared: list[tuple[_Rows, Tensor]]) -> tuple[Tensor, Tensor]:
    """The sum of several outputs' losses by sequence, and the number of their rows; where outputs
    have different numbers of rows, the sum of the means over each one's rows, and 1.
    """
    sums, counts = [], []
    for rows, each in compared:
        zeros = each.new_zeros(rows.number, dtype=torch.float64)
        sums.append(zeros.index_add(0, rows.sequence, each.double()))
        counts.append(torch.bincount(rows.sequence, minlength=rows.number))
    if all(torch.equal(count, counts[0]) for count in counts):
        return torch.stack(sums).sum(0), counts[0]
    if all(len(count) == len(counts[0]) for count in counts):
        means = [total / count.clamp(min=1) for total, count in zip(sums, counts, strict=True)]
        return torch.stack(means).sum(0), torch.ones_like(counts[0])
    # for instance of pictures and of texts: there are no sequences in common
    means = [(total.sum() / count.sum())[None] for total, count in zip(sums, counts, strict=True)]
    return torch.stack(means).sum(0), torch.ones_like(counts[0][:1])


# ---- the loss of rows


def _distance(kind: str, s: Tensor, t: Tensor) -> Tensor:
    """The distance of each row of `s` from that of `t`, `[n, C]` both."""
    if kind == CLASSES:
        each: Tensor = _Divergence.apply(s, t)
        return each
    s, t = s.double(), t.double()
    if kind == LABELS:
        p = t.sigmoid()
        loss = nn.functional.binary_cross_entropy_with_logits
        return (loss(s, p, reduction="none") - loss(t, p, reduction="none")).sum(-1)
    return _precision(t) * (s - t).square().sum(-1)


def _precision(t: Tensor) -> Tensor:
    """The factor of a row's squared difference: embeddings are compared relative to their square,
    scores as they are.
    """
    if t.shape[-1] == 1:
        return torch.ones_like(t[:, 0])
    return 1 / t.square().sum(-1).clamp(min=1e-12)


def _drawn_loss(kind: str, s: Tensor, t: Tensor, generator: torch.Generator) -> Tensor:
    """-log p of a row drawn from the distribution that `t` is of, up to a constant: its second
    derivative is that of `_distance`.
    """
    s, t = s.float(), t.float()
    if kind == CLASSES:
        # the largest of logits with Gumbel noise is drawn from their softmax
        noise = torch.rand(t.shape, generator=generator, device="cpu").clamp(1e-10, 1 - 1e-7)
        drawn = (t - (-noise.log()).log().to(t)).argmax(-1)
        return nn.functional.cross_entropy(s, drawn, reduction="none")
    if kind == LABELS:
        labels = torch.rand(t.shape, generator=generator, device="cpu").to(t) < t.sigmoid()
        loss = nn.functional.binary_cross_entropy_with_logits
        return loss(s, labels.to(s), reduction="none").sum(-1)
    precision = _precision(t)
    noise = torch.randn(t.shape, generator=generator, device="cpu").to(t)
    drawn = t + noise / (2 * precision).sqrt()[:, None]
    return precision * (s - drawn).square().sum(-1)


class _Divergence(torch.autograd.Function):
    """KL(softmax(teacher) || softmax(student)) of each row, of logits `[rows, V]`.

    Computed for a few rows at a time, so that only one tensor of the logits' size is kept: their
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        grad = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        each = torch.zeros(len(student), dtype=torch.float64, device=student.device)
        for start in range(0, len(student), ROWS):
            # of a few classes exactly: a head that hardly matters changes less than float32 shows
            dtype = torch.float64 if student.shape[-1] <= FEW else torch.float32
            both = (x[start : start + ROWS].to(dtype) for x in (student, teacher))
            q, p = (x.log_softmax(-1) for x in both)
            some = nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
            each[start : start + ROWS] = some
            if grad is not None:
                grad[start : start + ROWS] = q.exp_().sub_(p.exp_())
        ctx.save_for_backward(*([] if grad is None else [grad]))
        return each

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = ctx.saved_tensors[0]
        return grad * grads[0].to(grad)[:, None], None
