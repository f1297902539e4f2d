"""`Reader`: what is known of an attention module from its attributes and from running its twin."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MultiheadError
from ...ops.masks import IntervalMask
from .masks import mask_of
from .positions import setting
from .projections import is_projection
from .trial import MASKS, MEMORY, MPT, Trial, arguments_of, is_cross_attention
from .twin import Call, definition_of, refuse, run, signature_of, twin_of

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

    def __init__(
        self,
        module: nn.Module,
        *,
        is_causal: bool | None = None,
        is_cross: bool | None = None,
        has_positions: bool | None = None,
    ) -> None:
        check_module(module)
        given = dict(is_causal=is_causal, is_cross=is_cross, has_positions=has_positions)
        for name, value in given.items():
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: expected True, False, or None to find out")
        self.module, self.is_causal = module, is_causal
        self.is_cross, self.has_positions = is_cross, has_positions
        self.locate("", None)

    def locate(self, path: str, out_path: str | None) -> None:
        """Set where the projections are, and make the twin."""
        self.path, self.out_path = path, out_path
        self.inner = self.module.get_submodule(path)
        self.config: Any = getattr(self.inner, "config", None)
        found = is_cross_attention(self.module) or is_cross_attention(self.inner)
        self.cross = found if self.is_cross is None else self.is_cross
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
        takes = signature_of(self.module)
        uses_bias = calls and calls[0].options.get("position_bias") is not None
        is_mpt = definition_of(self.module, MPT) is not None
        if "position_bias" in takes and not uses_bias and not is_mpt:
            raise refuse(self.module, "forward takes the argument position_bias=")
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
        clip = setting(self.inner, "clip_qkv") or getattr(self.inner, "clip_qkv", None)
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

    def mask(self, seen: dict[str, Any]) -> IntervalMask | None:
        """The mask of every call of a module that passes `seen` to its attention function."""
        return mask_of(self.module, self.inner, seen, self.is_causal)

    def masks_itself(self, call: Call | None) -> bool:
        """Whether the module computes attention itself and takes no mask, so that it may have a
        causal one inside.
        """
        takes = signature_of(self.module)
        return call is None and self.is_causal is None and not any(x in takes for x in MASKS)

    def settle(self, trial: Trial) -> None:
        """Take cosines and sines out of a trial where the model passes none to the module.

        Raises:
            MultiheadError: a module that takes None as well, or another sequence whose keys it
                doesn't rotate, and doesn't know which it gets.
        """
        if trial.tables is None:
            return
        if self.has_positions is False:
            trial.tables, trial.takes_none = None, True
            return
        plain = replace(trial, tables=None, takes_none=True)
        if self.has_positions is None and not self.cross and self._differ(trial, plain):
            raise refuse(
                self.module,
                "nothing in it shows whether its model passes it positions, without which it works"
                " too",
                "give has_positions=True or has_positions=False",
            )
        if self.is_cross is None and not self.cross and trial.rule is None:
            takes = signature_of(self.module)
            name = next((x for x in MEMORY if x in takes), None)
            memory = trial.hidden[:, : trial.hidden.shape[1] // 2]
            if name is not None and self._runs(replace(trial, memory=memory)):
                raise refuse(
                    self.module,
                    f"nothing in it shows whether its keys are those of {name}, which it doesn't"
                    " rotate",
                    "give is_cross=True or is_cross=False",
                )

    def _runs(self, trial: Trial) -> bool:
        try:
            self.observe(trial)
        except MultiheadError:
            return False
        return True

    def _differ(self, trial: Trial, other: Trial) -> bool:
        """Whether the module takes the other trial too, and gives another output."""
        return self._runs(other) and not torch.equal(self.observe(trial)[0], self.observe(other)[0])

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
        """Parts and settings of the module that may be the reason, with their values."""
        named = [
            f"{name}={type(child).__name__}"
            for name, child in self.inner._modules.items()
            if child is not None and not is_projection(child) and not isinstance(child, nn.Dropout)
        ]
        flags = [
            f"{name}={value!r}"
            for name, value in vars(self.inner).items()
            if isinstance(value, str | bool) and value and name != "training" and name[0] != "_"
        ]
        held = [
            f"{name}{list(x.shape)}" for name, x in self.inner._parameters.items() if x is not None
        ]
        found = [*named, *flags, *held]
        return f" (it has {', '.join(found)})" if found else ""


def check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module is a {type(module).__name__}: expected an attention module of transformers,"
            " such as model.model.layers[0].self_attn"
        )
    if type(module).__module__.startswith(f"{__package__.rpartition('.')[0]}."):
        raise refuse(
            module,
            "it is a module of multihead",
            "after replace_attention the layer is its part `attention`",
        )
    if any(p.is_meta for p in module.parameters()):
        raise refuse(module, "its parameters are on the meta device", "load its weights first")


def rate(owner: Any, names: str) -> float:
    for name in names.split():
        value = getattr(owner, name, None)
        value = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(value, float) and 0 < value < 1:
            return value
    return 0.0
