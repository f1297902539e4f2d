"""Long inputs are compared on a few tokens by the whole model, and on a few rows at full length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

import multihead
from families import FAMILIES, WORDS, Family, model_of
from multihead.errors import ReadingError
from multihead.models import PassInputs, Tap, instrument
from multihead.ops.call import AttentionCall
from multihead.reader import spot_check
from multihead.reader.session import Reading
from multihead.reader.spot_check import cut_head
from multihead.reader.verify import Verifier
from untouched import assert_untouched, snapshot

LONG = 24  # tokens of the long inputs here
BOTH = [f for f in FAMILIES if f.inputs in ("decoder", "encoder")]


@pytest.fixture(autouse=True)
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_check, "LONG", LONG)
    monkeypatch.setattr(spot_check, "HEAD", 8)
    monkeypatch.setattr(spot_check, "ROWS", 2)


def inputs_of(padding: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (3, LONG), generator=torch.Generator().manual_seed(1))
    if padding == "none":
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :9], mask[2, : LONG - 3] = 0, 0
    else:
        mask[1, -9:], mask[2, 3:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the passes that a verifier runs by itself."""
    lengths: list[int] = []
    before = Verifier.record

    def record(self: Verifier, inputs: PassInputs) -> Any:
        lengths.append(inputs.named()["input_ids"].shape[1])
        return before(self, inputs)

    monkeypatch.setattr(Verifier, "record", record)
    return lengths


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(f, "sdpa") for f in BOTH]
    + [(f, "eager") for f in BOTH if f.name in ("llama", "mistral", "gpt_oss", "gemma2", "bert")],
    ids=lambda value: getattr(value, "name", value),
)
def test_no_right_model_is_refused(
    family: Family, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family)
    named = model.config._attn_implementation
    try:
        model.set_attn_implementation(implementation)
    except ValueError:
        pytest.skip(f"{family.name} has no {implementation} attention")
    lengths = count_passes(monkeypatch)
    before = snapshot(model)
    for padding in family.paddings():
        with torch.no_grad(), multihead.reading(model) as session:
            model(**inputs_of(padding))
        assert len(session.verifier.kinds) == 1  # type: ignore[union-attr]
    assert_untouched(model, before)
    model.set_attn_implementation(named)
    assert set(lengths) == {8}


MUTATIONS: dict[str, tuple[str, Callable[[AttentionCall], AttentionCall]]] = {
    "scale": ("llama", lambda c: c._replace(scale=c.scale * 1.02)),
    "mask": ("llama", lambda c: c._replace(start=None, stop=None, low=None, high=None)),
    "groups": ("llama", lambda c: c._replace(k=c.k.flip(1))),
    "values of another group": ("llama", lambda c: c._replace(v=c.v.roll(1, 1))),
    "heads": ("gpt2", lambda c: c._replace(q=c.q.flip(1), k=c.k.flip(1), v=c.v.flip(1))),
    "sink": ("gpt_oss", lambda c: c._replace(sinks=None)),
    "sinks of other heads": (
        "gpt_oss",
        lambda c: c._replace(sinks=None if c.sinks is None else c.sinks.flip(0)),
    ),
    "soft cap": ("gemma2", lambda c: c._replace(softcap=None)),
    "another soft cap": ("gemma2", lambda c: c._replace(softcap=c.softcap and c.softcap * 0.7)),
}


class Changed(Tap):
    """Attention that isn't the model's; `only_long`: beyond so many keys."""

    def __init__(
        self, change: Callable[[AttentionCall], AttentionCall], only_long: int = 0
    ) -> None:
        self.change, self.only_long = change, only_long

    def attend(self, site: Any, call: AttentionCall, compute: Any) -> torch.Tensor:
        found: torch.Tensor = compute(
            self.change(call) if call.k.shape[2] > self.only_long else call
        )
        return found


@pytest.mark.parametrize("only_long", [0, 20], ids=["always", "beyond 20 keys"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_change_is_found(name: str, only_long: int) -> None:
    family, change = MUTATIONS[name]
    model = model_of(next(f for f in FAMILIES if f.name == family))
    session = Reading(model)
    assert session.verifier is not None
    with (
        torch.no_grad(),
        pytest.raises(ReadingError, match="attends otherwise under reading than before"),
        instrument(model, session.tokens, session.verifier, Changed(change, only_long)),
    ):
        model(**inputs_of("none"))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss", "llama4"])
def test_a_mask_that_is_wrong_beyond_a_window(
    family: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is left out of this library's masks alone."""
    from multihead.layers import interval_tensor

    model = model_of(next(f for f in FAMILIES if f.name == family))
    before = interval_tensor.from_rows

    def widened(make: Any, length: int, keys: int, **options: Any) -> Any:
        """One key more to the left of each window."""

        def rows(i: int, j: int) -> torch.Tensor:
            may = make(i, j)
            more = torch.nn.functional.pad(may, (0, 1))[..., 1:]
            return may | (more & may.flip(-1).cummax(-1).values.flip(-1))

        return before(rows, length, keys, **options)

    monkeypatch.setattr(interval_tensor, "from_rows", widened)
    with (
        torch.no_grad(),
        pytest.raises(ReadingError, match=r"otherwise under reading|another output"),
        multihead.reading(model),
    ):
        model(**inputs_of(padding))


def test_a_mask_that_never_reaches_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model makes another mask because of the name of the implementation: the head shows it."""
    model = model_of(next(f for f in FAMILIES if f.name == "llama"))
    from multihead.models import transformers as seam

    before = seam.lower_mask
    monkeypatch.setattr(seam, "lower_mask", lambda mask, causal, dtype: before(None, False, dtype))
    with (
        torch.no_grad(),
        pytest.raises(ReadingError, match=r"another output|otherwise under reading"),
        multihead.reading(model),
    ):
        model(**inputs_of("right"))


def test_inputs_that_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(next(f for f in FAMILIES if f.name == "llama"))
    given = inputs_of("right")
    for inputs, cut in (
        (given, True),
        (given | {"use_cache": False, "logits_to_keep": 1}, True),
        (given | {"labels": given["input_ids"]}, True),
        ({"input_ids": given["input_ids"][:, : LONG - 1]}, False),
        (given | {"attention_mask": torch.ones(3, 1, LONG, LONG, dtype=torch.bool)}, False),
        (given | {"past_key_values": tf.DynamicCache()}, False),
        (given | {"logits_to_keep": torch.tensor([1])}, False),
        (given | {"pixel_values": torch.ones(1)}, False),
    ):
        head = cut_head(PassInputs(model, (), inputs))
        assert (head is not None) is cut, inputs.keys()
        if head is not None:
            assert head.kwargs["input_ids"].shape == head.kwargs["attention_mask"].shape == (3, 8)
            assert "labels" not in head.kwargs
    left = cut_head(PassInputs(model, (), inputs_of("left")))
    assert left is not None and left.kwargs["attention_mask"].any(1).all()
