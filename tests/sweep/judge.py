"""One kind of model: built tiny, run with its own eager attention and under a reading, and the two
compared.
"""

from __future__ import annotations

import importlib
import inspect
import re
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import multihead
from families import enlarge
from multihead.models.site import find_sites
from sweep.eager import SPECIAL, Stored, implementation_of, reads_nothing, stored_eager, wrong
from sweep.tiny import RECIPES, TEXT, UNLIKE, Batch, config_of, inputs_for, variants, with_pictures

PIECES = ((0, 7), (7, 8), (8, 9), (9, TEXT))
OWN = (
    "transformers' own eager attention gives other outputs than the one it comes with (sdpa), which"
    " is the measure here"
)
SDPA = (
    "transformers' own sdpa gives other outputs than its eager attention: read with eager, while"
    " with sdpa a reading stops"
)


PATIENCE = 12  # seconds, after which no further recipe is tried


class NotBuilt(Exception):
    """Nothing of a model could be run, reading or not."""


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output.detach()] if output.is_floating_point() and output.ndim else []
    values = (
        output.values()
        if isinstance(output, dict)
        else output
        if isinstance(output, (list, tuple))
        else ()
    )
    return [t for value in values if not hasattr(value, "get_seq_length") for t in tensors(value)]


def outputs_differ(a: Any, b: Any, batch: Batch) -> str:
    """What stands at padding means nothing, and a number that a whole text gives may rest on it."""
    one, two = tensors(a), tensors(b)
    masks = [
        m
        for m in (batch.get("attention_mask"), batch.get("decoder_attention_mask"))
        if m is not None
    ]
    if len(one) != len(two):
        return f"{len(one)} outputs, but {len(two)} under reading"
    for x, y in zip(one, two, strict=True):
        fits = [
            m
            for m in masks
            if x.ndim == 3 and x.shape[0] == m.shape[0] and x.shape[1] <= m.shape[1]
        ]
        fits.sort(
            key=lambda m: m.shape[1]
        )  # of one of its own length, or the last positions of a text read in pieces
        mask = fits[0][:, -x.shape[1] :].bool() if fits else None
        if masks and mask is None:
            continue
        x, y = (x, y) if mask is None else (x[mask], y[mask])
        scale, off = (
            float(x.abs().nan_to_num().max()),
            float((x - y).abs().nan_to_num(nan=0.0).max()),
        )
        if x.numel() and off > 5e-4 * max(scale, 1e-6):
            return f"outputs differ by {off:.3g} of {scale:.3g}"
    return ""


def finite(output: Any) -> bool:
    return all(bool(torch.isfinite(t).any()) for t in tensors(output))


# The judgement of a model.


@torch.no_grad()
def judge(
    model: nn.Module, batch: Batch, forward_names: Any, *, as_eager: bool = False
) -> dict[str, Any]:
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
            own = run(model, steps)
        except Exception as error:
            if name == "plain":
                raise
            if not isinstance(error, KeyError):  # an encoder that takes a cache in vain
                notes.append(f"{name}: doesn't run ({brief(error)})")
            continue
        if name in ("right", "left") and reads_nothing(calls):
            notes.append(f"{name}: not compared, for rows of text may read no key at all")
            continue
        differ = next(
            (
                d
                for a, b, step in zip(expected, own, steps, strict=True)
                if (d := outputs_differ(a, b, step))
            ),
            "",
        )
        if differ and not as_eager:
            calls, expected = run_eager(model, steps, as_it_came=True)
            if name != "plain" and any(
                outputs_differ(a, b, step) for a, b, step in zip(expected, own, steps, strict=True)
            ):
                notes.append(
                    f"{name}: not compared, for its outputs rest on rows that may read nothing"
                )
                continue
            notes.append(f"{name}: {OWN}")
        try:
            with multihead.reading(model, special_ids={SPECIAL}) as reading:
                got = run(model, steps)
            table = reading.table()
        except (ValueError, NotImplementedError) as error:
            if (
                name == "plain"
                and differ
                and "under reading than before" in str(error)
                and not as_eager
            ):
                with implementation_of(model, "eager"):
                    found = judge(model, batch, forward_names, as_eager=True)
                if found["verdict"] == "read":
                    return found | {"notes": [SDPA, *found["notes"]]}
            if name == "plain":
                return {"verdict": "refused", "reason": str(error), "through": len(calls)}
            notes.append(f"{name}: refused ({brief(error)})")
            continue
        except Exception as error:
            return {
                "verdict": "failed",
                "reason": f"{name}: {type(error).__name__}: {brief(error)}",
            }
        sites = reading.sites
        reached |= {record.site.name for record in reading.records if record.reached}
        found = [
            d
            for a, b, step in zip(expected, got, steps, strict=True)
            if (d := outputs_differ(a, b, step))
        ]
        for call, _ in calls:
            site = next((s for s in sites if s.module is call.module), None)
            if (
                site is not None
                and call.projection is not None
                and call.projection not in list(site.out.modules())
            ):
                found.append(
                    f"{site.name}: W_O is taken for {site.out_name}, but heads enter"
                    f" {names_of.get(call.projection)}"
                )
        less = frozenset({"induction"}) if name == "packed" else frozenset()
        if name.startswith("cache"):
            whole = dict(variants(batch, forward_names))["left" if "left" in name else "plain"]
            calls, at_once = run_eager(model, [whole], as_it_came=bool(differ) and not as_eager)
            by_pieces = torch.cat([tensors(x)[0] for x in expected], 1)
            if outputs_differ(tensors(at_once[0])[0], by_pieces, whole):
                notes.append(
                    f"{name}: piece by piece it gives other outputs than at once, so only outputs"
                    " were compared"
                )
                calls = []
        found += wrong(table, calls, names_of, less)
        if found:
            return {
                "verdict": "failed",
                "reason": f"{name}: {len(found)} differences: {'; '.join(found[:3])}",
                "differences": found[:40],
            }
        runs.append(name)
        for note in table.meta["notes"]:
            if "wasn't reached" not in note and note not in notes:
                notes.append(note)
    kinds = sorted({s.kind for s in sites if s.name in reached})
    return {
        "verdict": "read" if reached else "refused",
        "reason": "" if reached else "no site was reached",
        "sites": len(sites),
        "reached": len(reached),
        "unreached": [s.name for s in sites if s.name not in reached],
        "kinds": kinds,
        "runs": runs,
        "notes": notes,
    }


def run(model: nn.Module, steps: list[Batch]) -> list[Any]:
    """The outputs of each step; "cached" in a step: it goes on from the cache (and the encoder) of
    the one before.
    """
    found: list[Any] = []
    going: Batch = {}
    for step in steps:
        torch.manual_seed(0)
        given = {k: v for k, v in step.items() if k not in ("cached", "placeholders")}
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


def run_eager(
    model: nn.Module, steps: list[Batch], *, as_it_came: bool = False
) -> tuple[list[tuple[Stored, Batch]], list[Any]]:
    with stored_eager(model, as_it_came=as_it_came) as calls:
        outputs = run(model, steps)
    if not all(finite(out) for out in outputs):
        raise NotBuilt("its outputs aren't finite numbers")
    return [(call, steps[-1]) for call in calls], outputs


def pieces(batch: Batch, names: Any) -> Iterator[tuple[str, list[Batch]]]:
    """The same text, piece by piece with a cache, for decoders."""
    cached = next((n for n in ("cache", "past_key_values") if n in names), None)
    prefix = "decoder_" if "decoder_input_ids" in batch else ""
    if (
        set(batch) - {"decoder_input_ids"} != {"input_ids"}
        or cached is None
        or "use_cache" not in names
    ):
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
    """The base model, and the heads that its auto mappings name, for types whose base can't be run
    alone.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    found: list[Any] = []
    others = sorted(n for n in dir(modeling_auto) if re.fullmatch("MODEL_FOR_.*_MAPPING_NAMES", n))
    for mapping in ["MODEL_MAPPING_NAMES", *others]:
        entry = getattr(modeling_auto, mapping).get(name)
        for one in entry if isinstance(entry, (list, tuple)) else [entry]:
            cls = getattr(transformers, one, None) or _hidden(name, one) if one else None
            if cls is not None and cls not in found:
                found.append(cls)
    return found


def _hidden(name: str, one: str) -> Any:
    """A class that transformers maps a type to, but doesn't export."""
    from transformers import CONFIG_MAPPING

    module = inspect.getmodule(CONFIG_MAPPING[name])
    place = (
        importlib.import_module(module.__name__.replace("configuration_", "modeling_"))
        if module
        else None
    )
    return getattr(place, one, None)


def judge_type(name: str) -> dict[str, Any]:
    """The verdict on a model type, with whatever of it can be built and run first."""
    from transformers import CONFIG_MAPPING

    errors: list[str] = []
    began = time.monotonic()
    refusal: dict[str, Any] | None = None
    for cls in classes_of(name)[:3]:
        for recipe in RECIPES:
            if (
                time.monotonic() - began > PATIENCE and recipe is not RECIPES[0]
            ):  # each class is tried once
                break
            try:
                sections = "mrope_section" in inspect.getsource(inspect.getmodule(cls) or cls)
                sections |= any(
                    "split_with_sizes" in error for error in errors
                )  # its text model is another's
                config = config_of(
                    cls.config_class or CONFIG_MAPPING[name], recipe | {"mrope": int(sections)}
                )
                if recipe.get("lazy"):
                    with torch.device("meta"):
                        size = sum(p.numel() for p in cls(config).parameters())
                    if size > 60_000_000:
                        continue
                model = build(cls, config)
            except Exception as error:
                errors.append(f"{cls.__name__}: {type(error).__name__}: {brief(error)}")
                continue
            start = {"type": name, "class": cls.__name__}
            if sum(p.numel() for p in model.parameters()) > 90_000_000:
                errors.append(
                    f"{cls.__name__}: still has {sum(p.numel() for p in model.parameters())}"
                    " parameters"
                )
                continue
            try:
                find_sites(model)
            except ValueError as error:
                attends = any(
                    re.search("Attention|Attn", type(m).__name__) for m in model.modules()
                )
                return start | {
                    "verdict": "refused" if attends else "no attention",
                    "reason": str(error),
                }
            gain, found = 1.6, None
            for gain in (1.6, 0.8):
                enlarge(model, 7, gain)
                found = judge_first(model, cls, config, errors)
                if found is not None:
                    break
            if found is not None:
                found = (
                    start
                    | found
                    | ({"notes": [*found.get("notes", []), "smaller weights"]} if gain < 1 else {})
                )
                if found["verdict"] != "refused" or found.get("reason") != "no site was reached":
                    return towers(model, found)
                refusal = refusal or found
    reason = (errors or ["no class"])[0]
    return refusal or {
        "type": name,
        "verdict": "not built",
        "reason": reason,
        "errors": errors[:40],
    }


def judge_first(
    model: nn.Module, cls: type[Any], config: Any, errors: list[str]
) -> dict[str, Any] | None:
    """The verdict with the first inputs that the model runs on."""
    names = inspect.signature(model.forward).parameters.keys() - UNLIKE.get(
        getattr(config, "model_type", ""), frozenset()
    )
    waiting = list(inputs_for(model, config))
    while waiting:
        batch = waiting.pop(0)
        try:
            return judge(model, batch, names)
        except Exception as error:
            errors.append(
                f"{cls.__name__}({', '.join(batch)}): {type(error).__name__}: {brief(error)}"
            )
            places = re.search(r"do not match.*?tokens: (\d+)\D+(\d+)", str(error))
            if (
                places and places[1] == "0" and "input_ids" in batch
            ):  # it says how many places its pictures take
                waiting.insert(
                    0, with_pictures(batch, config, int(places[2]) // len(batch["input_ids"]))
                )
    return None


def towers(model: nn.Module, found: dict[str, Any]) -> dict[str, Any]:
    """Parts that the inputs of the whole didn't reach (a picture's encoder, say) are judged
    alone.
    """
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
            found["notes"] = [
                *found["notes"],
                f"{name} ({type(part).__name__}) is refused: {verdict['reason'][:160]}",
            ]
    if left:
        found["notes"] = [
            *found["notes"],
            f"no inputs were found for {len(left)} sites: {', '.join(sorted(left)[:2])}",
        ]
    return found
