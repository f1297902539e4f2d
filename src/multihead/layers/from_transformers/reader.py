"""`Reader`: what is known of an attention module from its attributes and from running its twin."""

from __future__ import annotations

import re
import sys
from functools import cached_property
from inspect import getsource, signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MultiheadError
from ...ops.masks import IntervalMask, causal, window
from .positions import layer_type
from .projections import is_projection
from .trial import MEMORY, Trial, arguments_of, is_cross_attention
from .twin import Call, refuse, run, signature_of, twin_of

TOLERANCE = 1e-4  # of the outputs, which are of the order of 1
# Keywords of an attention function that change no result, or that are read elsewhere.
KNOWN = {
    *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "sinks", "position_bias"),
    *("is_causal", "output_attentions", "output_hidden_states", "use_cache", "training"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids"),
    *("deterministic", "layer_idx"),
}
OUT_DROPOUTS = (
    "resid_dropout residual_dropout out_dropout proj_drop proj_dropout output_dropout"
    " hidden_dropout"
)
ATTENTION_DROPOUTS = "attn_dropout attention_dropout dropout"
SLIDING = ("sliding_attention", "local", "sliding")
FULL = ("full_attention", "global", "attention", "full", "hybrid")
# Settings that change attention where a trial may not show it.
UNSEEN = (
    *("attn_temperature_tuning", "use_logn_attn", "log_scaling", "attention_sink_size"),
    *("relative_attention", "is_cross_decoder"),
)


class Reader:
    """An attention module, its twin, and the options of a layer that they show.

    Attributes:
        module: the module that was given, and `twin`, its twin.
        path: path of the module in it that has the projections, "" for itself.
        inner: that module, and `inner_twin`.
        out_path: path of an output projection outside of it, as in BERT; None for one in it.
        cross: whether keys are always those of another sequence.
    """

    def __init__(self, module: nn.Module, is_causal: bool | None = None) -> None:
        check_module(module)
        if is_causal is not None and not isinstance(is_causal, bool):
            raise TypeError(f"is_causal={is_causal!r}: expected True, False, or None to find out")
        self.module, self.is_causal = module, is_causal
        self.locate("", None)

    def locate(self, path: str, out_path: str | None) -> None:
        """Set where the projections are, and make the twin."""
        self.path, self.out_path = path, out_path
        self.inner = self.module.get_submodule(path)
        self.config: Any = getattr(self.inner, "config", None)
        self.cross = is_cross_attention(self.module) or is_cross_attention(self.inner)
        for name in UNSEEN:
            value = getattr(self.inner, name, None)
            if isinstance(value, bool | int | float) and value:
                raise refuse(self.module, f"{name}={value!r}")

    @cached_property
    def twin(self) -> nn.Module:
        return twin_of(self.module)

    @property
    def inner_twin(self) -> nn.Module:
        return self.twin.get_submodule(self.path)

    def observe(self, trial: Trial) -> tuple[Tensor, Call | None]:
        """The twin's output, before a residual connection, and the call of its attention function;
        None if it computes attention itself.
        """
        outputs: list[Tensor] = []
        arguments = arguments_of(self.module, trial)
        if self.out_path is not None:
            projection = self.twin.get_submodule(self.out_path)
            handle = projection.register_forward_hook(lambda _, __, y: outputs.append(y))
        try:
            out, calls = run(self.twin, arguments)
        except Exception as error:
            raise refuse(
                self.module,
                f"a call with {', '.join(arguments)} fails ({error!r:.150}){self.hints()}",
            ) from error
        finally:
            if self.out_path is not None:
                handle.remove()
        if len(calls) > 1:
            raise refuse(self.module, f"it calls attention {len(calls)} times")
        return (outputs[-1] if outputs else out), (calls[0] if calls else None)

    def options(self, call: Call | None, trial: Trial) -> dict[str, Any]:
        """Options of the constructor that aren't sizes."""
        options: dict[str, Any] = {}
        seen = {} if call is None else call.options
        for name, value in seen.items():
            if name not in KNOWN and value is not None:
                shown = list(value.shape) if isinstance(value, Tensor) else repr(value)
                raise refuse(self.module, f"it passes {name}={shown:.60} to attention")
        if seen.get("softcap") is not None:
            options["softcap"] = float(seen["softcap"])
        clip = getattr(self.config, "clip_qkv", None) or getattr(self.inner, "clip_qkv", None)
        if clip:
            options["clip_qkv"] = float(clip)
        options["dropout"] = self.dropout(call, trial)
        owners: list[Any] = [self.inner]
        if self.out_path is not None:
            owners = [self.module.get_submodule(self.out_path.rpartition(".")[0])]
        names = OUT_DROPOUTS if self.out_path is None else "dropout"
        options["out_dropout"] = rate(owners[0], names)
        return options

    def dropout(self, call: Call | None, trial: Trial) -> float:
        """The share of weights that is dropped in training."""
        if call is None:
            return rate(self.inner, ATTENTION_DROPOUTS)
        vars(self.inner_twin)["training"] = True
        try:
            with torch.random.fork_rng(devices=[]):
                _, call = self.observe(trial)
        finally:
            vars(self.inner_twin)["training"] = False
        return 0.0 if call is None else float(call.options.get("dropout") or 0.0)

    def _reads_back_only(self, seen: dict[str, Any]) -> bool:
        if self.is_causal is not None:
            return self.is_causal
        users = models_of(type(self.config).__name__, type(self.inner).__module__)
        if any("is_decoder" in signature(cls.forward).parameters for cls in users):
            raise self._needs_is_causal()  # the model's call decides
        if self._hides_causality():
            raise self._needs_is_causal()
        if "Text" in type(self.config).__name__ and _masks(users) == {"create_causal_mask"}:
            return True  # CLIP's text model masks for modules that don't know of it
        for value in (
            seen.get("is_causal"),
            getattr(self.inner, "is_causal", None),
            getattr(self.inner, "is_decoder", None),
        ):
            if isinstance(value, bool):
                return value
        if getattr(self.config, "is_decoder", False) is True:
            return True
        kinds = [name for name in file_names(self.inner) if name.endswith(_HEADS_OF_MODELS)]
        decodes = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in kinds)
        encodes = any(not name.endswith(("ForCausalLM", "LMHeadModel")) for name in kinds)
        if any(_is_lower(x) for x in self.inner._buffers.values()):
            return True
        if decodes and encodes:
            raise self._needs_is_causal()
        return decodes

    def _hides_causality(self) -> bool:
        """Whether one class serves self and cross attention of a decoder, and the file never says
        which: BigBird-Pegasus' and LED's.
        """
        takes = signature_of(self.inner)
        is_open = any(name in takes and takes[name].default is None for name in MEMORY)
        if not is_open or self.cross or getattr(self.inner, "is_decoder", None) is not True:
            return False
        if getattr(self.inner, "is_causal", None):
            return False
        source = getsource(sys.modules[type(self.inner).__module__])
        return re.search(r"is_causal=(?!False)", source) is None

    def _needs_is_causal(self) -> MultiheadError:
        return refuse(
            self.module,
            "nothing in it shows whether its queries read later keys",
            "give is_causal=True or is_causal=False",
        )

    def mask(self, seen: dict[str, Any]) -> IntervalMask | None:
        """The mask of every call."""
        is_causal = self._reads_back_only(seen)
        kind = layer_type(self.inner)
        if kind is not None and kind not in SLIDING + FULL:
            raise refuse(self.module, f"layer_type={kind!r}")
        size = seen.get("sliding_window")
        if size is None:
            if hasattr(self.inner, "sliding_window"):
                size = self.inner.sliding_window
            elif hasattr(self.inner, "window_size"):
                size = self.inner.window_size
            elif kind in SLIDING or (
                kind is None and getattr(self.config, "use_sliding_window", True) is not False
            ):
                names = ("sliding_window", *(("window_size",) if kind in SLIDING else ()))
                size = next((x for n in names if (x := getattr(self.config, n, None))), None)
        if kind in FULL or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            return causal() if is_causal else None
        if is_causal:
            return causal() & window(left=size - 1)
        # the module may have one more than its config, for flash attention
        size = getattr(self.config, "sliding_window", size)
        return window(left=size, right=size)

    # ---- Verdicts

    def accepts(self, error: float) -> bool:
        return error <= TOLERANCE

    def differs(self, error: float) -> MultiheadError:
        """The error for a module that no combination equals."""
        return refuse(
            self.module,
            f"its output differs from that of a layer with its projections by {error:.2g}"
            f"{self.hints()}",
        )

    def check_parameters(self, owned: set[str]) -> None:
        """Raise unless every parameter of the module is one of these, or in one of these parts."""
        parts = tuple(f"{name}." for name in owned)
        names = [name for name, _ in self.module.named_parameters()]
        left = [name for name in names if name not in owned and not name.startswith(parts)]
        if left:
            raise refuse(self.module, f"its parameters {', '.join(left)} have no place in a layer")

    def hints(self) -> str:
        named = [
            name
            for name, child in self.inner._modules.items()
            if child is not None and not is_projection(child) and not isinstance(child, nn.Dropout)
        ]
        flags = [
            f"{name}={value!r}"
            for name, value in vars(self.inner).items()
            if isinstance(value, str | bool) and value and not name.startswith("_")
        ]
        found = [*named, *flags, *vars(self.inner)["_parameters"]]
        return f" (it has {', '.join(found)})" if found else ""


def check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module is a {type(module).__name__}: expected an attention module of transformers,"
            " such as model.model.layers[0].self_attn"
        )
    if any(p.is_meta for p in module.parameters()):
        raise refuse(module, "its parameters are on the meta device", "load its weights first")


_HEADS_OF_MODELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def file_names(module: nn.Module) -> list[str]:
    """The names in the file that defines the module's class."""
    return list(vars(sys.modules[type(module).__module__]))


def models_of(config: str, file: str) -> list[type[nn.Module]]:
    """The models in a file whose constructors take this class of config."""
    found = []
    for value in vars(sys.modules[file]).values():
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == file:
            hint = getattr(value.__init__, "__annotations__", {}).get("config")
            name = hint if isinstance(hint, str) else getattr(hint, "__name__", "")
            if name == config and hasattr(value, "config_class"):
                found.append(value)
    return found


def _masks(models: list[type[nn.Module]]) -> set[str]:
    """The functions that make masks in these models' forward."""
    found = set()
    for cls in models:
        code = getattr(unwrap(cls.forward), "__code__", None)
        names = () if code is None else code.co_names
        found |= {name for name in names if name.startswith("create_") and "mask" in name}
    return found


def _is_lower(x: Tensor | None) -> bool:
    """Whether a buffer is a causal mask."""
    if x is None or x.ndim < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] < 2:
        return False
    flags = x[(0,) * (x.ndim - 2)].bool()
    return bool(flags.any() and torch.equal(flags, flags.tril()) and flags.diagonal().all())


def rate(owner: Any, names: str) -> float:
    for name in names.split():
        value = getattr(owner, name, None)
        value = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(value, float) and 0 < value < 1:
            return value
    return 0.0
