"""The one seam between this library and a running model: `with instrument(model, *taps)`.

A `Tap` sees, and may replace, what happens at each attention site during a pass:

    begin_pass(inputs)                   the outermost module that holds sites is called
      attend(site, call, compute)        attention of one site: q, k, v -> [B, H, L, Ev]
      attended(site, own, out)           out [B, L, H, Ev] goes back to a transformers module
      heads_out(site, x)                 [..., H*Ev] enters the output projection W_O
      update(site, x, y)                 x entered W_O and y [..., D] left it
    end_pass(outputs)                    that module returns

A pass begins wherever the model is entered: at the model itself, at a wrapper around it that was
instrumented, or at a part of it (an encoder, a layer) that is called alone.

Only the methods that a tap's class overrides are connected. Where one of them is `attend`, the
model computes with `multihead.attention` for as long as the `with` lasts; else it keeps the
attention implementation that it came with. Everything is undone at the end, also after an
exception: hooks, configs and attributes are as before. All state lives on the model's own modules,
so two models can be instrumented in two threads.

**Nesting.** Instrumentations of one model stack. A value passes the outermost tap first, as if what
the outer `with` does belonged to the model: the outermost sees `x` first, the innermost has the
last word, and `update` gives all of them the `x` that reached W_O in the end. `attend` is called
the other
way round, since it wraps: the innermost tap is called first, and its `compute` runs the outer ones.
A tap that doesn't call `compute` hides the call from outer taps.

**Suspending.** `with suspend(model)` gives the model as it was before any instrumentation (to copy
it, or to run passes that no tap may see). `suspend(model, keep_changes=True)` leaves taps in force
that change what the model computes, such as `HeadIntervention`, and takes off those that only look.

The norm of what enters each W_O, and a pass that ends as soon as the last one was seen:

>>> import torch, multihead
>>> from multihead.models import Tap, instrument
>>> class Norms(Tap):
...     def __init__(self):
...         self.norms = {}
...     def heads_out(self, site, x):
...         self.norms[site.label] = float(x.norm())
>>> model, tokenizer = multihead.load_builtin()
>>> with torch.no_grad(), instrument(model, norms := Norms()) as sites:
...     _ = model(**tokenizer("the cat sat", return_tensors="pt"))
>>> list(norms.norms) == [site.label for site in sites]
True
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ..ops.call import AttentionCall
from ..ops.functional import compute
from .contexts import (
    NAMED,
    attention_implementation,
    is_in_backward,
    named_implementation,
    temporary_attributes,
    uncompiled,
)
from .foreign import Kind, PatchedForward, flatten_features, kind_of, update_of
from .own_attention import COMPARE, OwnAttention
from .site import Site, find_sites
from .transformers import ATTEND, NAME, register_attention
from .weights import OURS

__all__ = ["ModuleHook", "PassInputs", "Tap", "instrument", "is_plain", "replaced_heads", "suspend"]

Compute = Callable[[AttentionCall], Tensor]
_FRAMES = "_multihead_frames"  # attribute of the root and of each site's module while instrumented
_counter = itertools.count()  # orders frames by entry


class PassInputs(NamedTuple):
    """Arguments of one pass, and the module that it begins at: the outermost one that was called.

    >>> PassInputs(nn.Linear(2, 2), (), {"input": 1}).named()
    {'input': 1}
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self) -> dict[str, Any]:
        """The arguments by name, also those given by position or inside a dict of features."""
        try:
            bound = inspect.signature(self.model.forward).bind_partial(*self.args, **self.kwargs)
        except TypeError:
            return flatten_features(self.kwargs)
        given = dict(bound.arguments)
        for name in ("args", "kwargs"):
            more = given.pop(name, {})
            if not isinstance(more, dict):
                more = {f"{name}[{n}]": value for n, value in enumerate(more)}
            given |= more
        return flatten_features(given)


class ModuleHook(NamedTuple):
    """Forward hooks on one more module of the model, for what no site shows.

    `before(args, kwargs)` may return `(args, kwargs)` that replace the arguments, and
    `after(args, kwargs, output)` an output that replaces the module's. With `first`, `before` sees
    the arguments ahead of all other hooks on the module.

    >>> ModuleHook(nn.Linear(2, 2), after=lambda args, kwargs, output: output * 2).first
    False
    """

    module: nn.Module
    before: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
    after: Callable[[tuple[Any, ...], dict[str, Any], Any], Any] | None = None
    first: bool = False


class Tap:
    """Sees or changes a model's passes; override what is needed (see the module's docstring).

    An exception raised in any method ends the pass and reaches the caller of the model: that is
    how a pass is stopped early. `end_pass` isn't called then, so state of a pass is reset in
    `begin_pass`.

    >>> import torch
    >>> class Count(Tap):
    ...     calls = 0
    ...     def update(self, site, x, y):
    ...         self.calls += 1
    >>> from multihead import load_builtin
    >>> model, tokenizer = load_builtin()
    >>> with torch.no_grad(), instrument(model, count := Count()) as sites:
    ...     _ = model(**tokenizer("the cat", return_tensors="pt"))
    >>> count.calls == len(sites)
    True
    """

    changes_model: ClassVar[bool] = False
    """Whether the tap changes what the model computes, and so stays in force in
    `suspend(model, keep_changes=True)`."""

    passive: ClassVar[bool] = False
    """Whether the model must run exactly as it came. `update` then has x = None at an
    `nn.MultiheadAttention`, whose own forward doesn't call W_O as a module."""

    def begin_pass(self, inputs: PassInputs) -> None:
        """The model was called, or a part of it that holds sites: `inputs.model`."""

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        """Attention of one site -> head outputs `[B, H, L, Ev]`; `compute(call)` gives them.

        Defined for every kind of site, whatever the model's own attention implementation.
        """
        return compute(call)

    def attended(self, site: Site, own: OwnAttention, out: Tensor) -> None:
        """A transformers module gets `out` `[B, L, H, Ev]` from attention that isn't its own;
        `own.rows((i, j))` gives rows of what its own function computes."""

    def heads_out(self, site: Site, x: Tensor) -> Tensor | None:
        """x `[..., H*Ev]` is about to enter W_O. A returned tensor replaces it, for instance
        `x.detach().requires_grad_()`, a leaf for gradients."""
        return None

    def update(self, site: Site, x: Tensor | None, y: Tensor) -> Tensor | None:
        """W_O returned y `[..., D]` for the x `[..., H*Ev]` that entered it in the end. A returned
        tensor replaces y."""
        return None

    def end_pass(self, outputs: Any) -> None:
        """The module at which the pass began returned `outputs`."""

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> Iterable[ModuleHook]:
        """Hooks on further modules: a projection's output, a layer's input, a norm."""
        return ()

    def replaces(self, site: Site) -> Sequence[int]:
        """Heads of the site in whose place `heads_out` puts something else than a multiple of what
        they gave, so that their weights don't describe what they add."""
        return ()


@contextmanager
def instrument(
    model: nn.Module, *taps: Tap, sites: Sequence[Site] | None = None, attention: bool | None = None
) -> Iterator[list[Site]]:
    """Connect taps to a model for the length of the `with`; gives the sites.

    Args:
        model: a model with sites (see `multihead.read`).
        taps: as if nested in this order, the first outermost.
        sites: the sites to connect; all of the model's by default (`find_sites`).
        attention: True computes with `multihead.attention` even if no tap overrides `attend`.

    Raises:
        MultiheadError: the model's attention can't be reached; names its class.

    >>> from multihead import load_builtin
    >>> model, _ = load_builtin()
    >>> with instrument(model, Tap()) as sites:
    ...     sites[0].label
    'L0'
    """
    frame = _Frame(model, taps, find_sites(model) if sites is None else list(sites), attention)
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # compiled parts have fixed code, which no hook reaches
            stack.enter_context(uncompiled)
        frame.connect()
        stack.callback(frame.disconnect)
        yield frame.sites


@contextmanager
def suspend(model: nn.Module, *, keep_changes: bool = False) -> Iterator[None]:
    """The model as it was before all instrumentation around this, for the length of the `with`.

    Args:
        keep_changes: instrumentations with a tap that changes what the model computes stay.

    >>> import torch
    >>> from multihead import ablate_heads, load_builtin
    >>> model, tokenizer = load_builtin()
    >>> inputs = tokenizer("the cat", return_tensors="pt")
    >>> before = model(**inputs).logits
    >>> with ablate_heads(model, "L0.H0"), suspend(model):
    ...     torch.equal(model(**inputs).logits, before)
    True
    """
    frames = {frame for module in model.modules() for frame in vars(module).get(_FRAMES, ())}
    ordered = sorted(frames, key=lambda frame: frame.number)
    with ExitStack() as stack:
        for frame in reversed(ordered):
            if keep_changes:
                frame.unpatch()
                stack.callback(frame.patch)
            else:
                frame.disconnect()
                stack.callback(frame.connect)
        for frame in ordered:
            if keep_changes and frame.changes_model:
                frame.patch()
                stack.callback(frame.unpatch)
        yield


def is_plain(compute: Compute) -> bool:
    """Whether a tap's `compute` is `multihead.attention` alone, with no other tap to call."""
    return compute is _plain


def replaced_heads(site: Site) -> list[int]:
    """Heads of the site whose output is replaced by some tap before it reaches W_O."""
    frames = vars(site.module).get(_FRAMES, ())
    return sorted({h for frame in frames for tap in frame.taps for h in tap.replaces(site)})


_plain: Compute = compute


class _Frame:
    """One `instrument(...)`: hooks, and patches that take attention over.

    While a pass runs, hooks can't be taken off the module whose hooks are being called. So
    `suspend(keep_changes=True)`, which may run in `begin_pass`, undoes the patches, and hooks of a
    frame that isn't patched do nothing.
    """

    def __init__(
        self, model: nn.Module, taps: Sequence[Tap], sites: list[Site], attention: bool | None
    ) -> None:
        self.model, self.taps, self.sites = model, taps, sites
        self.number = next(_counter)
        self.attention = bool(attention or self._overriding("attend"))
        self.changes_model = any(tap.changes_model for tap in taps)
        self._hooks, self._patches = ExitStack(), ExitStack()
        self.patched = False
        self._entered: nn.Module | None = None  # the module at which the pass under way began

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self.model).__name__} is being read or otherwise instrumented, and its hooks"
            " would stay in the copy: copy or save it before or after, or within"
            " multihead.models.suspend(model)"
        )

    def _overriding(self, method: str) -> list[Tap]:
        """The taps that do something in this method."""
        return [tap for tap in self.taps if getattr(type(tap), method) is not getattr(Tap, method)]

    def connect(self) -> None:
        with ExitStack() as stack:
            self._hooks = stack
            for site in self.sites:
                self._hook_site(site)
            for hook in (hook for tap in self.taps for hook in tap.hooks(self.model, self.sites)):
                self._hook(hook)
            if self._overriding("begin_pass") or self._overriding("end_pass"):
                for module in _find_holders(self.model, self.sites):
                    self._hook_pass(module)
            self.patch()
            self._hooks = stack.pop_all()

    def disconnect(self) -> None:
        self.unpatch()
        self._hooks.close()

    def patch(self) -> None:
        with ExitStack() as stack:
            modules = {id(m): m for m in (self.model, *(site.module for site in self.sites))}
            for module in modules.values():
                frames = (*vars(module).get(_FRAMES, ()), self)
                stack.enter_context(temporary_attributes(module, **{_FRAMES: frames}))
            if self.attention:
                for site in self.sites:
                    named = {NAMED: named_implementation(site.module)}
                    stack.enter_context(temporary_attributes(site.module, **named))
                register_attention()
                stack.enter_context(attention_implementation(self.model, NAME))
            for module in self.model.modules():
                # torch's encoder would pack padded rows into nested tensors
                if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
                    stack.enter_context(temporary_attributes(module, use_nested_tensor=False))
            for site in self.sites:
                if self._takes_forward(site):
                    stack.enter_context(
                        temporary_attributes(site.module, forward=PatchedForward(site.module))
                    )
                for tap in self._overriding("attend"):
                    inner = vars(site.module).get(ATTEND, _plain)
                    attend = functools.partial(tap.attend, site, compute=inner)
                    stack.enter_context(temporary_attributes(site.module, **{ATTEND: attend}))
                for tap in self._overriding("attended"):
                    others = vars(site.module).get(COMPARE, ())
                    chain = (*others, functools.partial(tap.attended, site))
                    stack.enter_context(temporary_attributes(site.module, **{COMPARE: chain}))
            self._patches = stack.pop_all()
        self.patched = True

    def unpatch(self) -> None:
        self.patched = False
        self._patches.close()

    def _takes_forward(self, site: Site) -> bool:
        kind = kind_of(site.module)
        if not isinstance(kind, Kind):
            return False
        inside = [*self._overriding("heads_out"), *self._overriding("update")]
        return self.attention or (not kind.projects and not all(tap.passive for tap in inside))

    # ---- hooks

    def _hook_site(self, site: Site) -> None:
        before, after = self._overriding("heads_out"), self._overriding("update")
        for tap in before:
            self._hook(ModuleHook(site.out, before=functools.partial(_heads_out, tap, site)))
        for tap in after:
            self._hook(ModuleHook(site.out, after=functools.partial(_update, tap, site)))
        kind = kind_of(site.module)
        if isinstance(kind, Kind) and not kind.projects:
            # torch's fused layers bypass the modules in them, unless these carry hooks: at least
            # one
            self._hook(ModuleHook(site.module, before=lambda args, kwargs: None))
            for tap in after:
                self._hook(ModuleHook(site.module, after=functools.partial(_returned, tap, site)))

    def _hook(self, hook: ModuleHook) -> None:
        before, after = hook.before, hook.after
        if before is not None:

            def call_before(module: Any, args: Any, kwargs: Any) -> Any:
                return before(args, kwargs) if self.patched else None

            vars(call_before)[OURS] = True
            handle = hook.module.register_forward_pre_hook(
                call_before, with_kwargs=True, prepend=hook.first
            )
            self._hooks.callback(handle.remove)
        if after is not None:

            def call_after(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
                return after(args, kwargs, output) if self.patched else None

            vars(call_after)[OURS] = True
            handle = hook.module.register_forward_hook(call_after, with_kwargs=True)
            self._hooks.callback(handle.remove)

    def _hook_pass(self, module: nn.Module) -> None:
        """Begin a pass where this module is called from outside of all modules with sites."""

        def forget(*_: Any) -> None:  # also after an exception
            if self.patched and self._entered is module:
                self._entered = None

        self._hook(
            ModuleHook(
                module,
                before=functools.partial(self._begin_pass, module),
                after=functools.partial(self._end_pass, module),
                first=True,
            )
        )
        self._hooks.callback(module.register_forward_hook(forget, always_call=True).remove)

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Checkpointed layers run again in the backward pass, which is no pass of the model.
        if (self._entered is not None and self._entered is not module) or is_in_backward():
            return
        self._entered = module
        inputs = PassInputs(module, args, kwargs)
        for tap in self._overriding("begin_pass"):
            tap.begin_pass(inputs)

    def _end_pass(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        if self._entered is module:
            for tap in self._overriding("end_pass"):
                tap.end_pass(outputs)


def _find_holders(model: nn.Module, sites: Sequence[Site]) -> list[nn.Module]:
    """The modules that are or hold one of the sites, and the model itself, outermost first."""
    held = {id(site.module) for site in sites}
    holders: dict[int, bool] = {}

    def holds(module: nn.Module) -> bool:
        if id(module) not in holders:
            holders[id(module)] = id(module) in held  # for modules that hold each other
            inside = [holds(child) for child in module.children()]
            holders[id(module)] |= any(inside)
        return holders[id(module)]

    holds(model)
    return [module for module in model.modules() if module is model or holders[id(module)]]


def _heads_out(tap: Tap, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = tap.heads_out(site, args[0])
    return None if x is None else ((x, *args[1:]), kwargs)


def _update(tap: Tap, site: Site, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Any:
    return tap.update(site, args[0], output)


def _returned(tap: Tap, site: Site, args: Any, kwargs: Any, output: Any) -> None:
    """A module whose own forward doesn't call W_O as a module returned: y is in its output."""
    if not isinstance(vars(site.module).get("forward"), PatchedForward):
        y = update_of(site.module, output)
        if y is not None:
            tap.update(site, None, y)
