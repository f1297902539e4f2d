"""One kind of model: built tiny, run with its own eager attention and under a reading, and the two compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import multihead
from families import enlarge
from multihead.models.sites import find_sites
from oracles import compare
from oracles.statistics import MASSES, NAMES, OFFSETS, TOKENS, Call, statistics
from sweep_tiny import DECODER, RECIPES, TEXT, Batch, config_of, inputs_for, variants

SPECIAL = 10  # the first word of every text
WEIGHTS_ONLY = frozenset(n for n in NAMES if ":" not in n and n not in ("norm", "share", "cancellation", "reach"))
UPDATES = frozenset({"norm", "share"})
NO_PLACE = frozenset({"distance", "first", *OFFSETS, *TOKENS})  # where a row's place among the keys isn't known
PIECES = ((0, 7), (7, 8), (8, 9), (9, TEXT))
compare.RELATIVE, compare.ABSOLUTE = 1e-4, 2e-5  # these models are float32, and deeper than the tests' families


SDPA = ("transformers' own sdpa and eager attention give different outputs here: read as eager; as sdpa a reading stops, for the "
        "outputs differ")


class NotBuilt(Exception):
    """Nothing of a model could be run, reading or not."""


@dataclass
class Stored:
    """One attention call, as eager computed it, and what then entered the output projection."""

    module: nn.Module
    weights: Tensor  # [B, H, L, S]
    value: Tensor  # [B, G, S, Ev]
    mask: Tensor | None
    out: Tensor  # [B, L, H, Ev]
    entered: Tensor | None = None
    projection: nn.Module | None = None


@contextmanager
def stored_eager(model: nn.Module) -> Iterator[list[Stored]]:
    """Whatever eager function a module would call, it is called, and its weights are kept."""
    from transformers.modeling_utils import AttentionInterface

    calls: list[Stored] = []
    open_calls: list[Stored] = []

    def get_interface(self: Any, name: Any, default: Callable[..., Any]) -> Callable[..., Any]:
        def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *a: Any, **k: Any) -> Any:
            mask = k.pop("attention_mask", mask)
            out, weights = default(module, query, key, value, mask, *a, **k)
            if weights is not None:
                weights = as_they_act(weights.detach(), value.detach(), out.detach())
                call = Stored(module, weights, value.detach(), mask, out.detach())
                calls.append(call)
                open_calls.append(call)
            return out, weights

        return attention

    def enters(module: nn.Module, args: Any) -> None:
        """The projection is the first that takes what the heads gave; else the last of that width within the module."""
        if not args or not isinstance(args[0], Tensor) or width_in(module) is None:
            return
        x = args[0].detach()
        for call in list(open_calls):
            width = call.out.shape[-1] * call.out.shape[-2]
            if width_in(module) == width and x.numel() == call.out.numel():
                call.entered, call.projection = x, module
                if torch.equal(x.reshape(-1), call.out.reshape(-1)):
                    open_calls.remove(call)

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        open_calls[:] = [c for c in open_calls if c.module is not module or c.projection is None]

    before = AttentionInterface.get_interface
    handles = [nn.modules.module.register_module_forward_pre_hook(enters), nn.modules.module.register_module_forward_hook(leaves)]
    AttentionInterface.get_interface = get_interface
    try:
        with implementation_of(model, "eager"):
            yield calls
    finally:
        AttentionInterface.get_interface = before
        for handle in handles:
            handle.remove()


@contextmanager
def implementation_of(model: nn.Module, name: str) -> Iterator[None]:
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation_internal")}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def as_they_act(weights: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """Some eager functions apply their sinks to the output: then a row's weights are what they come to with it."""
    if weights.shape[1] % value.shape[1] or weights.shape[-1] != value.shape[2]:
        return weights
    came = weights @ value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    out = out.transpose(1, 2)
    if came.shape != out.shape or torch.allclose(came, out, rtol=1e-4, atol=1e-5):
        return weights
    factor = (came * out).sum(-1, keepdim=True) / came.square().sum(-1, keepdim=True).clamp(min=1e-30)
    return weights * factor if torch.allclose(came * factor, out, rtol=1e-4, atol=1e-5) else weights


def width_in(module: nn.Module) -> int | None:
    width = getattr(module, "in_features", None)
    if width is None and type(module).__name__ == "Conv1D":
        width = module.weight.shape[0]
    return width if isinstance(width, int) else None


def projection_of(module: nn.Module) -> np.ndarray[Any, Any]:
    if isinstance(module, nn.Linear) and type(module) is nn.Linear:
        return module.weight.detach().double().numpy().T
    width = width_in(module)
    assert width is not None
    unit = torch.eye(width, dtype=next(module.parameters()).dtype)[None]
    return (module(unit) - module(torch.zeros_like(unit)))[0].double().numpy()


# What a table should hold.


def sequence(batch: Batch, length: int, texts: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Which positions of a sequence of this length are text, and their ids: texts are told by their lengths."""
    prefix = {TEXT: "", DECODER: "decoder_"}.get(length)
    ids = None if prefix is None else batch.get(f"{prefix}input_ids")
    if prefix is None or ids is None or ids.shape != (texts, length):
        return np.ones((texts, length), bool), None
    mask = batch.get(f"{prefix}attention_mask")
    return (np.ones(ids.shape, bool) if mask is None else mask.numpy().astype(bool)), ids.numpy()


def calls_of(stored: Stored, batch: Batch, kind: str) -> tuple[list[Call], list[Call], frozenset[str]]:
    """The oracle's view of a call, of what enters W_O alone, and the statistics that it can judge."""
    weights, value = stored.weights.double().numpy(), stored.value.double().numpy()
    texts, heads, rows, keys = weights.shape
    real, ids = sequence(batch, rows, texts)
    real_keys, _ = sequence(batch, keys, texts)
    names = frozenset(NAMES)
    allowed = np.ones((texts, rows, keys), bool)
    if stored.mask is not None:
        low = -9999 if stored.mask.ndim == 4 and stored.mask.shape[1] == 1 else torch.finfo(stored.mask.dtype).min / 2
        may = stored.mask if stored.mask.dtype == torch.bool else stored.mask > low
        may = may.reshape((1,) * (4 - may.ndim) + tuple(may.shape)).expand(-1, -1, rows, -1)[..., :keys]
        if may.shape[0] not in (1, texts) or not bool((may == may[:, :1]).all()):
            names -= {n for n in NAMES if n.startswith("even") or n in ("entropy_ratio", "reach")}
            allowed = weights.max(1) > 0
        else:
            allowed = np.broadcast_to(may[:, 0].numpy(), allowed.shape)
    if kind == "cross" and real_keys.all():
        real_keys = allowed.any(1)
    if kind == "self" and rows != keys:
        names -= {n for n in NAMES if n.rpartition(":")[2] in NO_PLACE}
    if kind == "cross" or rows != keys:
        ids = None
        names -= {n for n in NAMES if n.rpartition(":")[2] == "special"}
    if stored.entered is None or stored.projection is None:
        projection = np.zeros((heads * value.shape[-1], 1))
        names &= WEIGHTS_ONLY
        entered = None
    else:
        projection = projection_of(stored.projection)
        entered = stored.entered.double().reshape(texts, rows, heads, -1).transpose(1, 2)
    whole = Call(weights=weights, values=value, allowed=allowed, projection=projection, real_queries=real, real_keys=real_keys,
                 ids=ids, special=frozenset({SPECIAL}) if ids is not None else None, cross=kind == "cross")
    if entered is None:
        return [whole], [], names
    some = allowed.any(-1)
    unit = np.broadcast_to(np.eye(rows), (texts, heads, rows, rows))
    alone = Call(weights=unit, values=entered.numpy(), allowed=np.eye(rows, dtype=bool)[None] & some[..., None],
                 projection=projection, real_queries=real, real_keys=real)
    out = stored.out.double().transpose(1, 2)
    if not torch.allclose(entered, out, rtol=1e-5, atol=1e-6 * float(out.abs().max())):
        gate = (entered * out).sum(-1) / out.square().sum(-1).clamp(min=1e-30)
        if torch.allclose(gate[..., None] * out, entered, rtol=1e-4, atol=1e-5 * float(entered.abs().max())):
            return gated(whole, gate.numpy()), [alone], names
        names &= WEIGHTS_ONLY | UPDATES
    return [whole], [alone], names


def gated(call: Call, gate: np.ndarray[Any, Any]) -> list[Call]:
    """A gate `[B, H, L]` scales what a head's values add to a row: each row with values of its own."""
    heads, rows = gate.shape[1:]
    values = np.repeat(call.values, heads // call.values.shape[1], axis=1)
    found = []
    for row in range(rows):
        only = np.zeros_like(call.real_queries)
        only[:, row] = call.real_queries[:, row]
        found.append(Call(**vars(call) | {"values": values * gate[:, :, row, None, None], "real_queries": only}))
    return found


def wrong(table: Any, stored: list[tuple[Stored, Batch]], names_of: dict[nn.Module, str], less: frozenset[str] = frozenset()) -> list[str]:
    """Every difference between a table and the stored calls; `less`: statistics that this run can't judge."""
    kinds = {row["site"]: row["kind"] for row in table.rows()}
    found: list[str] = []
    by_site: dict[str, list[tuple[Stored, Batch]]] = {}
    for call, batch in stored:
        by_site.setdefault(names_of.get(call.module, ""), []).append((call, batch))
    for site, calls in by_site.items():
        if site not in kinds:
            found.append(f"{site or 'a module outside the model'} ({type(calls[0][0].module).__name__}) isn't among the sites")
            continue
        wholes, alones, names = [], [], frozenset(NAMES)
        for call, batch in calls:
            whole, alone, judged = calls_of(call, batch, kinds[site])
            wholes, alones, names = wholes + whole, alones + alone, names & judged
        names -= {n for n in NAMES if n.rpartition(":")[2] in less}
        found += compare.differences(table, {site: statistics(wholes)}, names - UPDATES)
        if alones and names & UPDATES:
            found += compare.differences(table, {site: statistics(alones)}, UPDATES)
    return [line for line in found if "only on one side" not in line]


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output.detach()] if output.is_floating_point() and output.ndim else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [t for value in values if not hasattr(value, "get_seq_length") for t in tensors(value)]


def outputs_differ(a: Any, b: Any, batch: Batch) -> str:
    """What stands at padding means nothing, and a number that a whole text gives may rest on it."""
    one, two = tensors(a), tensors(b)
    masks = [m for m in (batch.get("attention_mask"), batch.get("decoder_attention_mask")) if m is not None]
    if len(one) != len(two):
        return f"{len(one)} outputs, but {len(two)} under reading"
    for x, y in zip(one, two, strict=True):
        fits = [m for m in masks if x.ndim == 3 and x.shape[0] == m.shape[0] and x.shape[1] <= m.shape[1]]
        fits.sort(key=lambda m: m.shape[1])  # of one of its own length, or the last positions of a text read in pieces
        mask = fits[0][:, -x.shape[1] :].bool() if fits else None
        if masks and mask is None:
            continue
        x, y = (x, y) if mask is None else (x[mask], y[mask])
        scale, off = float(x.abs().nan_to_num().max()), float((x - y).abs().nan_to_num(nan=0.0).max())
        if x.numel() and off > 5e-4 * max(scale, 1e-6):
            return f"outputs differ by {off:.3g} of {scale:.3g}"
    return ""


def finite(output: Any) -> bool:
    return all(bool(torch.isfinite(t).any()) for t in tensors(output))


# The judgement of a model.


@torch.no_grad()
def judge(model: nn.Module, batch: Batch, forward_names: Any, *, as_eager: bool = False) -> dict[str, Any]:
    """Verdict on a model that runs on this batch."""
    names_of = {module: name for name, module in model.named_modules()}
    runs: list[str] = []
    notes: list[str] = []
    reached: set[str] = set()
    sites: list[Any] = []
    for name, one in [*variants(batch, forward_names), *pieces(batch, forward_names)]:
        steps = one if isinstance(one, list) else [one]
        try:
            calls, expected = run_eager(model, steps)
        except Exception as error:
            if name == "plain":
                raise
            if not isinstance(error, KeyError):  # an encoder that takes a cache in vain
                notes.append(f"{name}: doesn't run ({brief(error)})")
            continue
        try:
            with multihead.reading(model, special_ids={SPECIAL}) as reading:
                got = run(model, steps)
            table = reading.table()
        except (ValueError, NotImplementedError) as error:
            if name == "plain" and "under reading than before" in str(error) and not as_eager:
                came = run(model, steps)
                if outputs_differ(expected[0], came[0], batch):  # equal to eager is what matters here
                    with implementation_of(model, "eager"):
                        found = judge(model, batch, forward_names, as_eager=True)
                    found["notes"] = [SDPA, *found.get("notes", [])]
                    return found
            if name == "plain":
                return {"verdict": "refused", "reason": str(error), "through": len(calls)}
            notes.append(f"{name}: refused ({brief(error)})")
            continue
        except Exception as error:
            return {"verdict": "failed", "reason": f"{name}: {type(error).__name__}: {brief(error)}"}
        sites = reading.sites
        for observer in reading.observers:
            if observer.reached:
                reached.add(observer.site.name)
        found = [d for a, b, step in zip(expected, got, steps, strict=True) if (d := outputs_differ(a, b, step))]
        for call, _ in calls:
            site = next((s for s in sites if s.module is call.module), None)
            if site is not None and call.projection is not None and call.projection is not site.out:
                found.append(f"{site.name}: W_O is taken for {site.out_name}, but the heads enter {names_of.get(call.projection)}")
        less = frozenset({"induction"}) if name == "packed" else frozenset()
        if name.startswith("cache"):
            whole = dict(variants(batch, forward_names))["left" if "left" in name else "plain"]
            calls, at_once = run_eager(model, [whole])
            if outputs_differ(tensors(at_once[0])[0], torch.cat([tensors(x)[0] for x in expected], 1), whole):
                notes.append(f"{name}: piece by piece it gives other outputs than at once, so only outputs were compared")
                calls = []
        found += wrong(table, calls, names_of, less)
        if found:
            return {"verdict": "failed", "reason": f"{name}: {len(found)} differences: {'; '.join(found[:3])}",
                    "differences": found[:40]}
        runs.append(name)
        for note in table.meta["notes"]:
            if "wasn't reached" not in note and note not in notes:
                notes.append(note)
    kinds = sorted({s.kind for s in sites if s.name in reached})
    return {"verdict": "read" if reached else "refused", "sites": len(sites), "reached": len(reached), "kinds": kinds, "runs": runs,
            "notes": notes, "reason": "" if reached else "no site was reached", "unreached": [s.name for s in sites if s.name not in reached]}


def run(model: nn.Module, steps: list[Batch]) -> list[Any]:
    """The outputs of each step; "cached" in a step: it goes on from the cache (and the encoder) of the one before."""
    found: list[Any] = []
    going: Batch = {}
    for step in steps:
        torch.manual_seed(0)
        given = {k: v for k, v in step.items() if k != "cached"}
        name = step.get("cached")
        if name is not None:
            given |= going | {"use_cache": True}
            if "encoder_outputs" in going:
                given.pop("input_ids")
        out = model(**given)
        if name is not None:
            going = {name: out[name if name in out else "past_key_values"]}
            if "decoder_input_ids" in step:
                going["encoder_outputs"] = (out.encoder_last_hidden_state,)
        found.append(out)
    return found


def run_eager(model: nn.Module, steps: list[Batch]) -> tuple[list[tuple[Stored, Batch]], list[Any]]:
    with stored_eager(model) as calls:
        outputs = run(model, steps)
    if not all(finite(out) for out in outputs):
        raise NotBuilt("its outputs aren't finite numbers")
    return [(call, steps[-1]) for call in calls], outputs


def pieces(batch: Batch, names: Any) -> Iterator[tuple[str, list[Batch]]]:
    """The same text, piece by piece with a cache, for decoders."""
    cached = next((n for n in ("cache", "past_key_values") if n in names), None)
    prefix = "decoder_" if "decoder_input_ids" in batch else ""
    if set(batch) - {"decoder_input_ids"} != {"input_ids"} or cached is None or "use_cache" not in names:
        return
    for kind, one in variants(batch, names):
        if kind in ("plain", "left"):
            ids, mask = one[f"{prefix}input_ids"], one.get(f"{prefix}attention_mask")
            cuts = [(a, b) for a, b in PIECES if a < ids.shape[1]]
            steps = [one | {f"{prefix}input_ids": ids[:, a:b], "cached": cached} for a, b in cuts]
            for step, (_, b) in zip(steps, cuts, strict=True):
                if mask is not None:
                    step[f"{prefix}attention_mask"] = mask[:, :b]
            yield "cache" if kind == "plain" else "cache, left", steps


def brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def build(cls: type[Any], config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)
    return model.eval().float()


def classes_of(name: str) -> list[type[Any]]:
    """The base model, and the heads that its auto mappings name, for types whose base can't be run alone."""
    import transformers
    from transformers.models.auto import modeling_auto

    found: list[Any] = []
    for mapping in ["MODEL_MAPPING_NAMES", *sorted(n for n in dir(modeling_auto) if re.fullmatch("MODEL_FOR_.*_MAPPING_NAMES", n))]:
        entry = getattr(modeling_auto, mapping).get(name)
        for one in entry if isinstance(entry, (list, tuple)) else [entry]:
            cls = getattr(transformers, one, None) if one else None
            if cls is not None and cls not in found:
                found.append(cls)
    return found


def judge_type(name: str) -> dict[str, Any]:
    """The verdict on a model type, with whatever of it can be built and run first."""
    from transformers import CONFIG_MAPPING

    errors: list[str] = []
    refusal: dict[str, Any] | None = None
    for cls in classes_of(name)[:4]:
        for recipe in RECIPES:
            try:
                config = config_of(cls.config_class or CONFIG_MAPPING[name], recipe)
                model = build(cls, config)
            except Exception as error:
                errors.append(f"{cls.__name__}: {type(error).__name__}: {brief(error)}")
                continue
            start = {"type": name, "class": cls.__name__}
            if sum(p.numel() for p in model.parameters()) > 60_000_000:
                errors.append(f"{cls.__name__}: still has {sum(p.numel() for p in model.parameters())} parameters")
                continue
            try:
                find_sites(model)
            except ValueError as error:
                attends = any(re.search("Attention|Attn", type(m).__name__) for m in model.modules())
                return start | {"verdict": "refused" if attends else "no attention", "reason": str(error)}
            gain, found = 1.6, None
            for gain in (1.6, 0.8):
                enlarge(model, 7, gain)
                found = judge_first(model, cls, config, errors)
                if found is not None:
                    break
            if found is not None:
                found = start | found | ({"notes": [*found.get("notes", []), "smaller weights"]} if gain < 1 else {})
                if found["verdict"] != "refused" or found.get("reason") != "no site was reached":
                    return towers(model, found)
                refusal = refusal or found
    return refusal or {"type": name, "verdict": "not built", "reason": (errors or ["no class"])[0], "errors": errors[:40]}


def judge_first(model: nn.Module, cls: type[Any], config: Any, errors: list[str]) -> dict[str, Any] | None:
    """The verdict with the first inputs that the model runs on."""
    import inspect

    names = inspect.signature(model.forward).parameters
    for batch in inputs_for(model, config):
        try:
            return judge(model, batch, names)
        except Exception as error:
            errors.append(f"{cls.__name__}({', '.join(batch)}): {type(error).__name__}: {brief(error)}")
    return None


def towers(model: nn.Module, found: dict[str, Any]) -> dict[str, Any]:
    """Parts that the inputs of the whole didn't reach (a picture's encoder, say) are judged alone."""
    from transformers import PreTrainedModel

    left = set(found.pop("unreached", ()))
    if found["verdict"] != "read":
        return found
    for name, part in model.named_modules():
        inside = {site for site in left if site.startswith(f"{name}.")}
        if not name or not inside or not isinstance(part, PreTrainedModel):
            continue
        verdict = judge_first(part, type(part), part.config, [])
        if verdict is None:
            continue
        if verdict["verdict"] == "failed":
            return found | {"verdict": "failed", "reason": f"{name}: {verdict['reason']}"}
        if verdict["verdict"] == "read":
            done = inside - {f"{name}.{site}" for site in verdict["unreached"]}
            found["reached"] += len(done)
            left -= done
            found["notes"] = [*found["notes"], f"{name} ({type(part).__name__}) was read alone"]
            found["notes"] += [f"{name}: {note}" for note in verdict["notes"]]
            found["kinds"] = sorted({*found["kinds"], *verdict["kinds"]})
        else:
            found["notes"] = [*found["notes"], f"{name} ({type(part).__name__}) is refused: {verdict['reason'][:160]}"]
    if left:
        found["notes"] = [*found["notes"], f"no inputs were found for {len(left)} sites: {', '.join(sorted(left)[:2])}"]
    return found
