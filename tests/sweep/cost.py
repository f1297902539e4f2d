"""Sweep over every model type of the installed transformers, tiny and random: does its attention cost
what `multihead cost` computes?

    make sweep-cost                                  # all types; earlier results are kept in CACHE

The cost is computed from the config alone, on the meta device, and compared with the model: the
parameters of its attention modules; where inputs are found that it runs with, the shapes of
queries, keys and values in its eager attention, the operations that torch counts there, and the
pairs that its masks allow; and the bytes of its cache after 64 and after 256 tokens, counted
tensor by tensor. A type with a module that never ran isn't equal: its verdict is "didn't run".
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
warnings.filterwarnings("ignore")
SECONDS, CACHE = 60, Path("/tmp/multihead_cost_sweep.json")
VERDICTS = ("equal", "didn't run", "differs", "refused", "not built")
LENGTHS = 64, 256


def judge(name: str) -> dict[str, Any]:
    """The verdict on a model type, one of `VERDICTS`, and why."""
    import torch
    from transformers import CONFIG_MAPPING

    from multihead import cost
    from sweep.judge import build, classes_of
    from sweep.tiny import RECIPES, config_of

    errors: list[str] = []
    best: dict[str, Any] | None = None
    for cls in classes_of(name)[:3]:
        for recipe in RECIPES[:5]:
            try:
                config = config_of(cls.config_class or CONFIG_MAPPING[name], recipe)
                with torch.device("meta"):
                    if (
                        many := sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
                    ) > 30_000_000:
                        raise ValueError(f"still has {many:,} parameters")
                model = build(cls, copy.deepcopy(config))
            except Exception as error:
                errors.append(
                    f"{cls.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
                )
                continue
            config.architectures = [cls.__name__]
            one = {"type": name, "class": cls.__name__}
            try:
                found = cost(config, context_length=13)
            except ValueError as error:
                return best or one | {"verdict": "refused", "reason": str(error)}
            one |= {
                "modules": len(found.shapes),
                "parameters": sum(found.parameters.values()),
                "notes": list(found.notes),
            }
            one["modules"] += len(found.states)
            one |= compare(found, model, config)
            if one["ran"] or one["verdict"] == "differs":
                return add_cache(one, cls, CONFIG_MAPPING[name], recipe)
            best = best or one
    if best:
        return best
    return best or {"type": name, "verdict": "not built", "reason": (errors or ["no class"])[0]}


def compare(found: Any, model: Any, config: Any) -> dict[str, Any]:
    """Compare the model itself with the shapes and states computed from its config."""
    from measured import differences, measured
    from measured import parameters as counted
    from multihead.models.site import find_attention
    from sweep.tiny import inputs_for

    shapes, states = found.shapes, [state.name for state in found.states]
    sites, _ = find_attention(model, states)
    own = sum(
        p.numel() for p in {p for s in sites for p in (*s.module.parameters(), *s.out.parameters())}
    )
    total = sum(sum(shape.parameters.values()) for shape in shapes)
    wrong = [] if own == total else [f"{total} parameters, not {own}"]
    wrong += [
        f"{shape.label}: {shape.parameters}, not {counted(site)}"
        for shape, site in zip(shapes, sites, strict=True)
        if sum(shape.parameters.values()) != counted(site)
    ]
    wrong += [
        f"{state.label}: {state.parameters} parameters"
        for state in found.states
        if not any(f"{state.name}.".startswith(f"{shape.name}.") for shape in shapes)
        and state.parameters != sum(p.numel() for p in model.get_submodule(state.name).parameters())
    ]
    ran: set[str] = set()
    called: set[str] = set()
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
        for name in states
    ]
    for batch in inputs_for(model, config):
        try:
            real = measured(model, batch, states)
        except Exception:  # these inputs aren't what it takes; the next may be
            continue
        new = [s for s in shapes if real[s.name].heads is not None and s.name not in ran]
        wrong += [f"{s.label}: {line}" for s in new for line in differences(s, real[s.name])]
        ran |= {s.name for s in new}
        if len(ran | called) == len(shapes) + len(states) or wrong:
            break
    for handle in handles:
        handle.remove()
    whole = len(ran | called) == len(shapes) + len(states)
    verdict = "differs" if wrong else "equal" if whole else "didn't run"
    return {"ran": len(ran | called), "verdict": verdict, "reason": "; ".join(wrong[:3])}


def add_cache(
    one: dict[str, Any], cls: Any, config_class: Any, recipe: dict[str, int]
) -> dict[str, Any]:
    """The verdict with the bytes of the cache of one sequence after 64 and 256 tokens: those that
    are computed, and those that the model holds in float32; nothing where it takes no cache.
    """
    from sweep.judge import build
    from sweep.tiny import config_of

    try:
        config = config_of(cls.config_class or config_class, recipe | {"positions": 512})
        model = build(cls, copy.deepcopy(config))
        held = [held_bytes(model, config, length) for length in LENGTHS]
    except Exception as error:  # of the model's own code
        held = []
        one |= {"cache": f"{type(error).__name__}"}
    if not held or None in held:
        return one
    config.architectures = [cls.__name__]
    from multihead import cost

    found = cost(config, context_length=1, dtype="float32")
    said = []
    for _, length, source in held:
        at = replace(found, context_length=length, source_length=source or length)
        said.append(at.cache("transformers"))
    real = [number for number, *_ in held]
    one |= {"cache": " / ".join(f"{number:,}" for number in real), "cached": said == real}
    if said != real:
        why = f"cache {' / '.join(map(str, said))} bytes, not {' / '.join(map(str, real))}"
        one |= {"verdict": "differs", "reason": "; ".join(filter(None, [one["reason"], why]))}
    return one


def held_bytes(model: Any, config: Any, length: int) -> tuple[int, int, int | None] | None:
    """Bytes of one sequence in the cache of a pass over so many tokens; the tokens in it, of
    pictures too; and those of its source. None without a cache.
    """
    import torch

    from measured import cache_bytes
    from sweep.tiny import inputs_for, words

    for batch in inputs_for(model, config):
        ids = next((n for n in ("decoder_input_ids", "input_ids") if n in batch), None)
        if ids is None or batch[ids].ndim != 2:
            continue
        texts = batch[ids].shape[0]
        batch = {n: x for n, x in batch.items() if "mask" not in n} | {ids: words(texts, length)}
        try:
            with torch.no_grad():
                out = model(**batch, use_cache=True)
        except Exception:  # these inputs aren't what it takes
            continue
        names = ("cache", "past_key_values", "cache_params", "state")
        cache = next((c for n in names if (c := getattr(out, n, None)) is not None), None)
        if cache is None:
            continue
        cross = getattr(cache, "cross_attention_cache", None)
        layers = getattr(cross, "layers", None)
        source = layers[0].keys.shape[-2] if layers else None
        try:
            tokens = int(cache.get_seq_length())
        except Exception:  # no layer of attention
            tokens = 0
        return cache_bytes(cache) // texts, tokens or length, source
    return None


def page(found: list[dict[str, Any]], version: str) -> str:
    """The text of docs/cost-models.md."""
    counts = {verdict: sum(one["verdict"] == verdict for one in found) for verdict in VERDICTS}
    cached = sum("cached" in one for one in found)
    right = sum(one.get("cached", False) for one in found)
    lines = [
        "# Costs of every model type",
        "",
        f"Written by `make sweep-cost` against transformers {version}: every model type, tiny.",
        "**Equal**: the parameters computed from the config alone are exactly those of the model's",
        "attention modules; all of these ran, and the shapes of queries, keys and values, the operations",
        "that torch counts in eager attention, and the pairs that masks allow are as computed too. Of",
        f"{cached} types that take a cache it is real: the bytes of one sequence, float32, after 64 and 256",
        "tokens, counted tensor by tensor, are those that `multihead cost` gives as transformers keeps it.",
        f"For {right} of these they are.",
        "**Didn't run**: as far as compared nothing differs, but some of its modules were never reached.",
        "",
        "| result | model types |",
        "| --- | --- |",
        *(f"| {verdict} | {number} |" for verdict, number in counts.items()),
        "",
        "| model type | class | result | modules | of these ran | parameters | cache | remarks |",
        "| --- " * 8 + "|",
    ]
    for one in found:
        remarks = " ".join(
            "; ".join([one.get("reason", ""), *one.get("notes", [])])
            .strip("; ")
            .replace("|", "/")
            .replace(f"{sys.prefix}/", "")
            .split()
        )
        cells = [
            one["type"],
            *(
                one.get(key, "")
                for key in ("class", "verdict", "modules", "ran", "parameters", "cache")
            ),
            remarks[:300],
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="model types; all by default")
    parser.add_argument("--write", type=Path, help="write the table of all results to this file")
    parser.add_argument("--again", action="store_true", help="repeat types that have a result")
    chosen = parser.parse_args()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    def late(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    known: dict[str, dict[str, Any]] = (
        json.loads(CACHE.read_text()) if CACHE.exists() and not chosen.again else {}
    )
    names = chosen.names or sorted(MODEL_MAPPING_NAMES)
    for number, name in enumerate(names, 1):
        if name in known:
            continue
        signal.alarm(SECONDS)
        try:
            one = judge(name)
        except Exception as error:  # a mistake of the script's own must not pass for a model's
            one = {
                "type": name,
                "verdict": "not built" if isinstance(error, TimeoutError) else "differs",
                "reason": f"{type(error).__name__}: {error} {traceback.format_exc()[-300:]}",
            }
        signal.alarm(0)
        known[name] = one
        CACHE.write_text(json.dumps(known, indent=1))
        print(
            f"{number}/{len(names)} {name}: {one['verdict']} {one.get('ran', '')}"
            f" {one.get('reason', '')[:300]}",
            flush=True,
        )
    found = [known[name] for name in names]
    for verdict in VERDICTS:
        print(f"{verdict}: {sum(one['verdict'] == verdict for one in found)}")
    if chosen.write:
        chosen.write.write_text(page(found, transformers.__version__))
    return 1 if any(one["verdict"] == "differs" for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
