"""Sweep over every model type of the installed transformers, tiny and random: does its attention cost
what `multihead cost` computes?

    make sweep-cost                                  # all types; earlier results are kept in CACHE

The cost is computed from the config alone, on the meta device, and compared with the model: the
parameters of its attention modules; and, where inputs are found that it runs with, the shapes of
queries, keys and values in its eager attention, the operations that torch counts there, and the
pairs that its masks allow.
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
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
warnings.filterwarnings("ignore")
SECONDS, CACHE = 60, Path("/tmp/multihead_cost_sweep.json")
VERDICTS = ("equal", "differs", "refused", "not built")


def judge(name: str) -> dict[str, Any]:
    """The verdict on a model type ("equal", "differs", "refused" or "not built"), and why."""
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
            one |= compare(found.shapes, model, config)
            if one["ran"]:
                return one
            best = best or one
    return best or {"type": name, "verdict": "not built", "reason": (errors or ["no class"])[0]}


def compare(shapes: Any, model: Any, config: Any) -> dict[str, Any]:
    """Compare the model itself with the shapes computed from its config."""
    from measured import differences, measured
    from measured import parameters as counted
    from multihead.models.site import find_attention
    from sweep.tiny import inputs_for

    sites, _ = find_attention(model)
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
    ran = 0
    for batch in inputs_for(model, config):
        try:
            real = measured(model, batch)
        except Exception:  # these inputs aren't what it takes; the next may be
            continue
        wrong += [f"{s.label}: {line}" for s in shapes for line in differences(s, real[s.name])]
        ran = sum(one.heads is not None for one in real.values())
        if ran:
            break
    return {"ran": ran, "verdict": "differs" if wrong else "equal", "reason": "; ".join(wrong[:3])}


def page(found: list[dict[str, Any]], version: str) -> str:
    """The text of docs/cost-models.md."""
    counts = {verdict: sum(one["verdict"] == verdict for one in found) for verdict in VERDICTS}
    ran = sum(bool(one.get("ran")) for one in found if one["verdict"] == "equal")
    lines = [
        "# Costs of every model type",
        "",
        f"Written by `make sweep-cost` against transformers {version}: every model type, tiny.",
        "**Equal**: the parameters computed from the config alone are exactly those of the model's",
        f"attention modules; and for the {ran} types that could be run, the shapes of queries, keys",
        "and values, the operations that torch counts in eager attention, and the pairs that masks",
        "allow are as computed too, in every module that ran.",
        "",
        "| result | model types |",
        "| --- | --- |",
        *(f"| {verdict} | {number} |" for verdict, number in counts.items()),
        "",
        "| model type | class | result | modules | of these ran | parameters | remarks |",
        "| --- " * 7 + "|",
    ]
    for one in found:
        remarks = " ".join(
            "; ".join([one.get("reason", ""), *one.get("notes", [])])
            .strip("; ")
            .replace("|", "/")
            .split()
        )
        cells = [
            one["type"],
            *(one.get(key, "") for key in ("class", "verdict", "modules", "ran", "parameters")),
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
