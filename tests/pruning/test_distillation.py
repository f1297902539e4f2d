"""The distance from the original's outputs against formulas by hand, and against its second
derivative; which outputs are compared, and over which of their axes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multihead.data.batch import Batch
from multihead.errors import MultiheadError
from multihead.pruning.distillation import CLASSES, LABELS, VALUES, _distance, _drawn_loss, distil


class Giving(nn.Module):
    """Gives what it was made with, times a factor."""

    def __init__(self, config: Any = None, **outputs: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: self.config, **(config or {}))
        self.factor, self.outputs = nn.Parameter(torch.ones(())), outputs

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return {
            name: x * self.factor if isinstance(x, Tensor) else x
            for name, x in self.outputs.items()
        }


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


IDS = torch.zeros(2, 3, dtype=torch.int64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
BATCH = Batch({"input_ids": IDS, "attention_mask": MASK})


def moved(model: Giving, by: float = 0.7, batch: Batch = BATCH) -> tuple[Any, Any]:
    """Losses and counts once the model's outputs are so many times what they were."""
    distilled = distil(model, batch)
    zero, _ = distilled.losses(model)
    assert float(zero.detach().abs().max()) < 1e-12
    model.factor.data.fill_(by)
    total, count = distilled.losses(model)
    assert distilled.loss(model)[0] == total.sum()
    return total.tolist(), count.tolist()


def test_the_outputs_of_another_model_are_named() -> None:
    distilled = distil(Giving(logits=draw(2, 4)), BATCH)
    others = {"logits [2, 5]": Giving(logits=draw(2, 5)), "x [2, 4]": Giving(x=draw(2, 4))}
    for has, other in others.items():
        words = rf"are logits \[2, 4\] .* other one {re.escape(has)}, so they can't"
        with pytest.raises(MultiheadError, match=words):
            distilled.losses(other)


def divergence(t: Tensor, s: Tensor) -> float:
    p, q = t.double().softmax(-1), s.double().softmax(-1)
    return float((p * (p / q).log()).sum())


def test_classes_of_a_sequence_and_of_each_token() -> None:
    x = draw(2, 4)
    total, count = moved(Giving(logits=x))
    assert count == [1, 1]
    assert total == pytest.approx([divergence(row, 0.7 * row) for row in x], rel=1e-5)
    x = draw(2, 3, 4)
    total, count = moved(Giving(logits=x, hidden_states=(x,), loss=x.sum()))
    assert count == [3, 1]  # what is padding isn't compared
    expected = [sum(divergence(row, 0.7 * row) for row in x[0]), divergence(x[1, 0], 0.7 * x[1, 0])]
    assert total == pytest.approx(expected, rel=1e-5)


def test_where_an_answer_begins_and_ends() -> None:
    a, b = draw(2, 3), draw(2, 3, seed=1)
    total, count = moved(Giving(start_logits=a, end_logits=b))
    assert count == [1, 1] and total[1] == pytest.approx(0, abs=1e-9)  # one position is text
    assert total[0] == pytest.approx(sum(divergence(x[0], 0.7 * x[0]) for x in (a, b)), rel=1e-5)


def test_outputs_of_tokens_and_of_sequences_weigh_the_same() -> None:
    tokens, whole = draw(2, 3, 4), draw(2, 2, seed=1)
    total, count = moved(Giving(prediction_logits=tokens, seq_relationship_logits=whole))
    assert count == [1, 1]
    means = [tokens[0], tokens[1, :1]]
    expected = [
        sum(divergence(row, 0.7 * row) for row in rows) / len(rows) + divergence(one, 0.7 * one)
        for rows, one in zip(means, whole, strict=True)
    ]
    assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("config", "shape", "columns"),
    [
        ({"problem_type": "multi_label_classification", "num_labels": 4}, (2, 4), 4),
        ({"num_labels": 2}, (2, 3), 1),  # as ELECTRA's, one label for each token
    ],
)
def test_labels_by_themselves(config: Any, shape: tuple[int, ...], columns: int) -> None:
    x = draw(*shape)
    total, count = moved(Giving(config, logits=x))
    assert count == ([1, 1] if columns == 4 else [3, 1])
    rows = [x[0], x[1, : columns if columns == 4 else 1]]
    for one, row in zip(total, rows, strict=True):
        both = torch.stack([row, torch.zeros_like(row)], -1)
        assert one == pytest.approx(sum(divergence(a, 0.7 * a) for a in both), rel=1e-5)


def test_scores_and_embeddings() -> None:
    score = draw(2, 1)
    total, _ = moved(Giving(logits=score))
    assert total == pytest.approx(((0.3 * score) ** 2)[:, 0].tolist(), rel=1e-5)
    for outputs in (
        {"pooler_output": draw(2, 5)},
        {"sentence_embedding": draw(2, 5), "token_embeddings": draw(2, 3, 5)},
        {"text_embeds": draw(2, 5), "last_hidden_state": draw(2, 3, 5)},
    ):
        total, count = moved(Giving(**outputs))
        assert count == [1, 1] and total == pytest.approx([0.09, 0.09], rel=1e-4)
    total, count = moved(Giving(last_hidden_state=draw(2, 3, 5), pooler_output=draw(2, 5)))
    assert count == [3, 1] and total == pytest.approx([0.27, 0.09], rel=1e-4)


def test_classes_of_an_image() -> None:
    x = draw(2, 4, 3, 5)
    total, count = moved(Giving(logits=x))
    assert count == [15, 15]
    rows = x.movedim(1, -1)[0].flatten(0, 1)
    assert total[0] == pytest.approx(sum(divergence(row, 0.7 * row) for row in rows), rel=1e-4)


def test_only_some_rows_are_kept_of_large_outputs() -> None:
    model = Giving(logits=draw(2, 3, 4))
    few = distil(model, BATCH, 8)
    assert [len(x) for x in few.original.values()] == [2]  # of four that are text
    model.factor.data.fill_(0.7)
    total, count = few.losses(model)
    assert count.tolist() == [2, 0] and float(total[0].detach()) > 0


def test_a_model_that_gives_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="Giving returns no tensor of logits, embeddings or"):
        distil(Giving(loss=torch.ones(()), past_key_values=1), BATCH)


@pytest.mark.parametrize(("kind", "width"), [(CLASSES, 4), (LABELS, 3), (VALUES, 3), (VALUES, 1)])
def test_gradients_of_drawn_losses_are_the_distance_s_second_derivative(
    kind: str, width: int
) -> None:
    """Of a head that changes the outputs along d, E[(g . d)^2] = d' H d, H the Hessian at the
    original: what the criterion `fisher` is about.
    """
    t, d = draw(1, width).double(), draw(1, width, seed=1).double()

    def along(x: Tensor) -> Tensor:
        return _distance(kind, t + x * d, t).sum()

    wanted = torch.autograd.functional.hessian(along, torch.zeros((), dtype=torch.float64))
    if kind == CLASSES:  # its gradient is given, not derived: twice the distance a small way off
        p = t.softmax(-1)
        wanted = (p * d * d).sum() - (p * d).sum() ** 2
        assert float(along(torch.tensor(1e-3))) == pytest.approx(float(wanted) * 5e-7, rel=1e-2)
    many, generator = 20000, torch.Generator().manual_seed(3)
    s = t.expand(many, -1).clone().requires_grad_()
    (grad,) = torch.autograd.grad(_drawn_loss(kind, s, t.expand(many, -1), generator).sum(), s)
    found = (grad * d).sum(-1).square().mean()
    assert float(found) == pytest.approx(float(wanted), rel=0.05)


def test_the_divergence_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    s, t = (torch.randn(600, 7, generator=generator, dtype=torch.float64) for _ in "st")
    a, b = (s.clone().requires_grad_() for _ in "ab")
    each = _distance(CLASSES, a, t)
    plain: Callable[..., Tensor] = nn.functional.kl_div
    wanted = plain(b.log_softmax(-1), t.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(each, wanted)
    weights = torch.arange(600.0, dtype=torch.float64)
    (each * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
