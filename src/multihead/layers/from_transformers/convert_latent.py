"""`to_latent`: a transformers module of latent attention as a `LatentAttention`, proved equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .norms import convert_norm
from .positions import rotaries
from .projections import Part, find, part, place
from .reader import Reader
from .trial import distance, trial_of
from .twin import Call, refuse

PROJECTIONS = {
    "kv_down_proj": "kv_a_proj_with_mqa kv_a_proj",
    "kv_up_proj": "kv_b_proj",
    "q_proj": "q_proj",
    "q_down_proj": "q_a_proj",
    "q_up_proj": "q_b_proj",
    "out_proj": "o_proj out_proj",
}
NORMS = {"kv_norm": "kv_a_layernorm kv_a_norm", "q_norm": "q_a_layernorm q_a_norm"}


def to_latent(cls: Any, module: nn.Module, **known: bool | None) -> Any:
    """`cls.from_transformers(module)`; see there."""
    reader = Reader(module, **known)
    paths = {
        role: name
        for role, names in (PROJECTIONS | NORMS).items()
        if (name := find(module, names)) is not None
    }
    needed = {"kv_down_proj", "kv_up_proj", "out_proj"}
    if needed - set(paths) or not ("q_proj" in paths or "q_up_proj" in paths):
        children = ", ".join(module._modules) or "none"
        raise refuse(
            module,
            f"no projections by way of a latent are found among its children ({children})",
            "use MultiHeadAttention.from_transformers",
        )
    width = part(module, reader.twin, paths["kv_down_proj"]).weight().shape[1]
    trial = trial_of(module, module, width, width, reader.mask({}), False)
    want, call = reader.observe(trial)
    if call is None:
        raise refuse(module, "it computes attention itself")
    trial.rule = reader.mask(call.options)
    want, call = reader.observe(trial)
    assert call is not None
    options = reader.options(call, trial) | {"mask": trial.rule}
    for name in ("softcap", "clip_qkv", "out_dropout"):
        if value := options.pop(name, None):
            raise refuse(module, f"{name}={value}")
    for name in ("s_aux", "sinks"):
        if call.options.get(name) is not None:
            raise refuse(module, f"its scores have sinks ({name})")
    build = _Build(reader, paths, call, options)
    layer = build(cls, reader.twin)
    best: tuple[float, Any] = (float("inf"), None)
    for positions in rotaries(reader.twin, build.rotary_dim, trial.tables):
        layer.positions = positions
        best = min(best, (distance(layer, trial, trial.ids, want), positions), key=lambda x: x[0])
    if not reader.accepts(best[0]):
        raise reader.differs(best[0])
    reader.check_parameters(set(paths.values()))
    made = build(cls, module)
    made.positions = best[1]
    return made


class _Build:
    """How a layer is made of the module, or of its twin."""

    def __init__(
        self, reader: Reader, paths: dict[str, str], call: Call, options: dict[str, Any]
    ) -> None:
        self.module, self.twin, self.paths = reader.module, reader.twin, paths
        self.options = dict(options)
        if call.options.get("scaling") is not None:
            self.options["scale"] = float(call.options["scaling"])
        self.heads, self.v_head_dim = call.q.shape[1], call.v.shape[-1]
        rows, self.latent = self._part("kv_up_proj", self.twin).weight().shape
        self.rotary_dim = self._part("kv_down_proj", self.twin).weight().shape[0] - self.latent
        self.head_dim = rows // self.heads - self.v_head_dim
        if self.rotary_dim + self.head_dim != call.q.shape[-1] or self.rotary_dim < 2:
            raise refuse(
                self.module,
                f"its queries are {call.q.shape[-1]} wide, which isn't {self.head_dim} of the keys"
                f" and {self.rotary_dim} of the rotary key",
            )

    def _part(self, role: str, module: nn.Module) -> Part:
        return part(self.module, module, self.paths[role])

    def __call__(self, cls: Any, module: nn.Module) -> Any:
        down, out = self._part("kv_down_proj", module), self._part("out_proj", module)
        q_latent = None
        if "q_up_proj" in self.paths:
            q_latent = self._part("q_up_proj", module).weight().shape[1]
        with torch.device("meta"):
            layer = cls(
                down.weight().shape[1],
                self.heads,
                kv_latent_dim=self.latent,
                rotary_dim=self.rotary_dim,
                head_dim=self.head_dim,
                v_head_dim=self.v_head_dim,
                q_latent_dim=q_latent,
                out_dim=out.weight().shape[0],
                **self.options,
            )
        for role in PROJECTIONS:
            if role in self.paths and hasattr(layer, role):
                place(getattr(layer, role), self._part(role, module))
        for role, width in (("kv_norm", self.latent), ("q_norm", q_latent)):
            if width is not None:
                norm = None
                if role in self.paths:
                    norm, _ = convert_norm(module, self.paths[role], self.twin, 1, width)
                setattr(layer, role, norm)
        return layer.train(module.training)
