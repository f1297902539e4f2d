"""Heads switched off or gated: the same as zeroing rows of W_O, and differentiable."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multihead
from families import FAMILIES, batches_of, model_of
from multihead.models.site import find_sites
from small import IDS, llama


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_off_is_zeroing_what_enters_the_projection(family: Any) -> None:
    """In every family: the head's columns of W_O's input are cut out, of the second site and its
    last head.
    """
    model, batch = model_of(family), batches_of(family, "none")[0]
    site = find_sites(model)[1]
    head = site.num_heads - 1
    with torch.no_grad():
        plain = model(**batch)[0]
        with multihead.ablate_heads(model, site.head_label(head)):
            off = model(**batch)[0]
        weight = site.out.weight
        columns = slice(head * site.head_dim, (head + 1) * site.head_dim)
        part = weight[columns] if type(site.out).__name__ == "Conv1D" else weight[:, columns]
        kept = part.clone()
        part.zero_()
        zeroed = model(**batch)[0]
        part.copy_(kept)
        assert torch.allclose(off, zeroed, atol=1e-5 * float(zeroed.abs().max()))
        assert torch.equal(model(**batch)[0], plain)
    if "vision" not in site.name:
        assert (off - plain).abs().max() > 1e-3 * plain.abs().max()


def test_gates_are_what_head_mask_was() -> None:
    model = llama()
    gates = torch.ones(2, 3, requires_grad=True)
    with multihead.ablate_heads(model, gates=gates):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    eps = 1e-2
    for n in range(6):
        moved = []
        for sign in (1, -1):
            changed = torch.ones(2, 3)
            changed.view(-1)[n] += sign * eps
            with (
                torch.no_grad(),
                multihead.ablate_heads(model, gates={"L0": changed[0], "L1": changed[1]}),
            ):
                moved.append(float(model(IDS, labels=IDS).loss))
        assert float(gates.grad.view(-1)[n]) == pytest.approx(
            (moved[0] - moved[1]) / (2 * eps), rel=0.05, abs=1e-4
        )


def test_mean_is_the_mean_over_real_rows() -> None:
    model, mask = llama(), torch.ones_like(IDS)
    mask[0, :4] = 0
    batch = {"input_ids": IDS, "attention_mask": mask}
    entered: list[torch.Tensor] = []
    out = model.model.layers[0].self_attn.o_proj
    hook = out.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    model(**batch)
    hook.remove()
    mean = entered[0][mask.bool()].mean(0)[8:16]
    hook = out.register_forward_pre_hook(
        lambda _, args: (
            torch.cat([args[0][..., :8], mean.expand(2, 12, 8), args[0][..., 16:]], -1),
        )
    )
    want = model(**batch).logits
    hook.remove()
    with multihead.ablate_heads(model, "L0.H1", mode="mean", over=[batch]):
        assert torch.allclose(model(**batch).logits, want, atol=1e-5)


def test_a_reading_sees_what_is_switched() -> None:
    model, batch = llama(), {"input_ids": IDS}
    with multihead.ablate_heads(model, ["L0.H1"]):
        table = multihead.read(model, [batch], probe=False)
    assert (
        table.value("norm")[1] == 0 and table.value("share")[1] == 0 and table.value("norm")[0] > 0
    )
    with multihead.ablate_heads(model, ["L0.H1"], mode="mean", over=[batch]):
        table = multihead.read(model, [batch], probe=False)
    assert table.value("norm")[1] > 0
    contributions = [row["contribution:self"] for row in table.rows()]
    assert contributions[1] is None and None not in (
        contributions[0],
        contributions[2],
    )  # the others read as before
    plain = multihead.read(model, [batch], probe=False)
    assert contributions[0] == pytest.approx(plain.value("contribution:self")[0], rel=1e-4)


def test_afterwards_nothing_is_left_even_after_an_error() -> None:
    model = llama()
    want = model(IDS).logits
    with pytest.raises(ZeroDivisionError), multihead.ablate_heads(model, ["L1.H1"]):
        raise ZeroDivisionError
    assert torch.equal(model(IDS).logits, want)
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"heads": "L9.H1"}, ["'L9.H1' doesn't exist", "L0.H0 to L1.H2"]),
        ({"heads": 0}, ["heads=0", "'L2.H3'"]),
        ({"heads": [(0, 1)]}, ["heads=[(0, 1)]", "'L2.H3'"]),
        ({"heads": "L0.H1", "mode": "one"}, ["mode='one'", "'zero' or 'mean'"]),
        ({"heads": "L0.H1", "mode": "mean"}, ["over=[...]"]),
        ({"heads": "L0.H1", "mode": "mean", "over": []}, ["over is empty"]),
        ({"gates": torch.ones(2, 4)}, ["gates[2, 4]", "[2 sites, [3] heads]"]),
        ({"gates": {"L5": torch.ones(3)}}, ["'L5'", "L0, L1"]),
        ({"gates": {"L1": torch.ones(2)}}, ["gates['L1'][2]", "3 heads"]),
    ],
)
def test_words(arguments: dict[str, Any], words: list[str]) -> None:
    with (
        pytest.raises((ValueError, TypeError)) as caught,
        multihead.ablate_heads(llama(), **arguments),
    ):
        pass
    assert all(word in str(caught.value) for word in words), str(caught.value)
