"""Taps see and change what happens at each site, nest, and leave the model as it came."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F

import multihead
from multihead.layers import MultiHeadAttention
from multihead.models import HeadIntervention, ModuleHook, Tap, find_sites, instrument, suspend
from multihead.models.instrument import is_plain
from small import IDS, llama
from untouched import assert_untouched, snapshot


class Log(Tap):
    """Every call of every method, in order."""

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        self.name, self.log = name, [] if log is None else log
        self.entered: dict[str, Tensor] = {}
        self.left: dict[str, Tensor] = {}

    def begin_pass(self, inputs: Any) -> None:
        self.inputs = inputs
        self.log.append(f"{self.name}begin")

    def attend(self, site: Any, call: Any, compute: Any) -> Tensor:
        self.log.append(f"{self.name}attend {site.label}")
        out = compute(call)
        self.log.append(f"{self.name}attended {site.label}")
        return out

    def heads_out(self, site: Any, x: Tensor) -> None:
        self.entered[site.label] = x
        self.log.append(f"{self.name}heads {site.label}")

    def update(self, site: Any, x: Tensor | None, y: Tensor) -> None:
        assert x is not None
        self.left[site.label] = y
        self.log.append(f"{self.name}update {site.label}")

    def end_pass(self, outputs: Any) -> None:
        self.log.append(f"{self.name}end")


class Sdpa(nn.Module):
    """A user's attention module, which calls torch's scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OwnLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))
MAKERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "transformers": (llama, IDS),
    "torch": (torch_encoder, X),
    "this library": (OwnLayer, X),
    "sdpa": (Sdpa, X),
}
every_kind = pytest.mark.parametrize("kind", MAKERS)


def model_and_inputs(kind: str) -> tuple[Any, Tensor]:
    make, inputs = MAKERS[kind]
    torch.manual_seed(0)
    return make().eval(), inputs


def output(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(inputs)
    return found if isinstance(found, Tensor) else found.logits


@every_kind
def test_methods_are_called_in_order_and_change_nothing(kind: str) -> None:
    model, inputs = model_and_inputs(kind)
    before, want = snapshot(model), output(model, inputs)
    with instrument(model, log := Log()) as sites:
        got = output(model, inputs)
    assert_untouched(model, before)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    expected = ["begin"]
    for site in sites:
        steps = ("attend", "attended", "heads", "update")
        expected += [f"{step} {site.label}" for step in steps]
    assert log.log == [*expected, "end"]
    for site in sites:
        weight, bias = site.out_weight()
        torch.testing.assert_close(
            log.entered[site.label] @ weight + bias, log.left[site.label], msg=site.label
        )
    assert log.inputs.args == (inputs,)


@every_kind
def test_every_method_can_replace(kind: str) -> None:
    model, inputs = model_and_inputs(kind)

    class Zero(Tap):
        def __init__(self, where: str) -> None:
            self.where = where

        def attend(self, site: Any, call: Any, compute: Any) -> Tensor:
            out = compute(call)
            return out * 0 if self.where == "attend" else out

        def heads_out(self, site: Any, x: Tensor) -> Tensor | None:
            return x * 0 if self.where == "heads_out" else None

        def update(self, site: Any, x: Tensor | None, y: Tensor) -> Tensor | None:
            return site.out_weight()[1].expand_as(y) if self.where == "update" else None

    outs = []
    for where in ("attend", "heads_out", "update"):
        with instrument(model, Zero(where)):
            outs.append(output(model, inputs))
    assert not torch.equal(outs[0], output(model, inputs))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


@every_kind
def test_only_what_is_overridden_is_connected(kind: str) -> None:
    """Without `attend` the model computes as it came: transformers with the same implementation,
    torch's layer with the forward of its class as long as nothing must see what enters W_O.
    """

    class Update(Tap):
        passive = True

        def update(self, site: Any, x: Tensor | None, y: Tensor) -> None:
            seen.append(y)

    model, inputs = model_and_inputs(kind)
    seen: list[Tensor] = []
    with instrument(model, Update()) as sites:
        for site in sites:
            assert "forward" not in vars(site.module)
        if kind == "transformers":
            assert model.config._attn_implementation == "sdpa"
        got = output(model, inputs)
    assert len(seen) == len(sites)
    torch.testing.assert_close(got, output(model, inputs))


def test_some_sites() -> None:
    model = llama()
    with instrument(model, log := Log(), sites=find_sites(model)[1:]):
        output(model, IDS)
    assert list(log.entered) == ["L1"]


# ---- nesting


def test_taps_nest() -> None:
    """Values pass the outermost first; `attend` wraps, so the innermost is called first."""
    model = llama()
    log: list[str] = []
    site = find_sites(model)[0]
    with (
        instrument(model, Log("outer ", log), sites=[site]),
        instrument(model, Log("inner ", log), sites=[site]),
    ):
        output(model, IDS)
    several = []
    with instrument(model, Log("outer ", several), Log("inner ", several), sites=[site]):
        output(model, IDS)
    steps = [line for line in log if "begin" not in line]
    assert steps == [
        "inner attend L0",
        "outer attend L0",
        "outer attended L0",
        "inner attended L0",
        "outer heads L0",
        "inner heads L0",
        "outer update L0",
        "inner update L0",
        "outer end",
        "inner end",
    ]
    assert [line for line in several if "begin" not in line] == steps


def test_update_has_what_entered_in_the_end() -> None:
    model = llama()

    class Entered(Tap):
        def update(self, site: Any, x: Tensor | None, y: Tensor) -> None:
            assert x is not None
            values.append(bool(x.any()))

    class Off(Tap):
        def heads_out(self, site: Any, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    for taps in ((Entered(), Off()), (Off(), Entered())):
        values: list[bool] = []
        with instrument(model, taps[0]), instrument(model, taps[1]):
            output(model, IDS)
        assert values == [False, False]


def test_a_tap_knows_whether_others_want_the_call() -> None:
    model = llama()
    plain = []

    class Ask(Tap):
        def attend(self, site: Any, call: Any, compute: Any) -> Tensor:
            plain.append(is_plain(compute))
            return compute(call)

    with instrument(model, Ask()), instrument(model, Ask(), sites=find_sites(model)[:1]):
        output(model, IDS)
    assert plain == [False, True, True]  # inner, then outer at the first site; outer at the second


# ---- suspending


@every_kind
def test_suspended_it_is_as_it_came(kind: str) -> None:
    model, inputs = model_and_inputs(kind)
    before, want = snapshot(model), output(model, inputs)
    with instrument(model, log := Log()) as sites:
        inside = snapshot(model)
        with suspend(model):
            assert_untouched(model, before)
            torch.testing.assert_close(output(model, inputs), want, rtol=0, atol=0)
            assert not log.log
            copied = copy.deepcopy(model)
        assert {k: v for k, v in snapshot(model).items() if "ook" not in k}.keys() == {
            k: v for k, v in inside.items() if "ook" not in k
        }.keys()
        output(model, inputs)
        assert len(log.entered) == len(sites)
        with pytest.raises(TypeError, match=r"copy or save it before or after.*suspend"):
            copy.deepcopy(model)
    assert_untouched(model, before)
    torch.testing.assert_close(output(copied, inputs), want, rtol=0, atol=0)


@every_kind
def test_what_changes_the_model_may_stay(kind: str) -> None:
    model, inputs = model_and_inputs(kind)
    site = find_sites(model)[0]
    before = snapshot(model)
    with instrument(model, HeadIntervention({site.name: [1]})):
        want = output(model, inputs)
    with (
        instrument(model, log := Log()),
        instrument(model, HeadIntervention({site.name: [1]})),
        instrument(model, Log(log=log.log)),
    ):
        with suspend(model, keep_changes=True):
            got = output(model, inputs)
        assert not log.log
        output(model, inputs)
        assert log.log.count("begin") == 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_untouched(model, before)


def test_a_pass_within_a_pass() -> None:
    """`suspend(keep_changes=True)` in `begin_pass`: the pass goes on with all its hooks and keywords
    (torch forgets which hooks take keywords once they are taken off)."""
    model = llama()
    passes = []

    class Twice(Tap):
        def begin_pass(self, inputs: Any) -> None:
            with suspend(model, keep_changes=True):
                passes.append(model(*inputs.args, **inputs.kwargs).logits)

        def end_pass(self, outputs: Any) -> None:
            passes.append(outputs.logits)

    with torch.no_grad(), instrument(model, log := Log()), instrument(model, Twice()):
        model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert len(passes) == 2 and log.log.count("begin") == 1
    assert set(log.inputs.kwargs) == {"input_ids", "attention_mask"}


# ---- exceptions


@every_kind
@pytest.mark.parametrize("method", ["begin_pass", "attend", "heads_out", "update", "end_pass"])
def test_an_exception_in_any_method(kind: str, method: str) -> None:
    class Stop(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Stop

    model, inputs = model_and_inputs(kind)
    before, want = snapshot(model), output(model, inputs)
    stopping = type("Stopping", (Tap,), {method: stop})()
    with instrument(model, log := Log()):
        with pytest.raises(Stop), instrument(model, stopping):
            output(model, inputs)
        torch.testing.assert_close(output(model, inputs), want, rtol=1e-4, atol=1e-5)
        with pytest.raises(Stop), suspend(model):
            raise Stop
        output(model, inputs)
    assert log.log.count("end") == 2 + (method == "end_pass")
    assert_untouched(model, before)
    torch.testing.assert_close(output(model, inputs), want, rtol=0, atol=0)


def test_a_hook_that_cannot_be_made_leaves_nothing() -> None:
    class Broken(Tap):
        def heads_out(self, site: Any, x: Tensor) -> None: ...
        def hooks(self, model: Any, sites: Any) -> Any:
            yield ModuleHook(model.lm_head, after=lambda *_: None)
            raise ZeroDivisionError

    model = llama()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), instrument(model, Broken()):
        pass
    assert_untouched(model, before)


# ---- hooks, interventions


def test_hooks_on_other_modules() -> None:
    model = llama()
    shapes = []

    class Queries(Tap):
        def hooks(self, model: nn.Module, sites: Any) -> list[ModuleHook]:
            return [ModuleHook(site.module.q_proj, after=self.projected) for site in sites]

        def projected(self, args: Any, kwargs: Any, q: Tensor) -> None:
            shapes.append(tuple(q.shape))

    with instrument(model, Queries()):
        output(model, IDS)
    assert shapes == [(2, 12, 24)] * 2


def test_a_leaf_for_gradients_of_frozen_parameters() -> None:
    model = llama().requires_grad_(False)

    class Leaves(Tap):
        def __init__(self) -> None:
            self.xs: list[Tensor] = []

        def heads_out(self, site: Any, x: Tensor) -> Tensor:
            self.xs.append(x if x.requires_grad else x.detach().requires_grad_())
            return self.xs[-1]

    with instrument(model, leaves := Leaves()):
        loss = model(IDS, labels=IDS).loss
    grads = torch.autograd.grad(loss, leaves.xs)
    assert [g.shape for g in grads] == [(2, 12, 24)] * 2 and all(bool(g.any()) for g in grads)


def test_a_model_that_cannot_be_instrumented() -> None:
    with (
        pytest.raises(multihead.MultiheadError, match="Linear can't be read"),
        instrument(nn.Linear(2, 2), Log()),
    ):
        pass


def test_the_attention_of_a_family_may_be_asked_for_alone() -> None:
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=50, n_positions=16)
    ).eval()
    with instrument(model, attention=True):
        assert model.config._attn_implementation == "multihead"
        got = output(model, IDS)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(got, output(model, IDS), rtol=1e-4, atol=1e-5)
