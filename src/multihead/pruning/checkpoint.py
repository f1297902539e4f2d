"""Write a pruned model, whole or not at all, with proof: it is kept only after a fresh process
loaded it and gave the same.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..io import atomic_folder, require_new_folder
from ..models.contexts import evaluation
from ..models.introspect import device_of, tolerance
from ..models.quiet import quiet

__all__ = ["save", "who_loads"]

LINE = "The heads that are left must still give the same."
# Runs in a fresh process, which knows the folder and nothing of the model in memory.
FRESH = """
import sys, torch
from safetensors.torch import load_file, save_file
folder, inputs, outputs, kind = sys.argv[1:]
torch.set_num_threads({threads})
{opening}
model.eval()
with torch.no_grad():
    output = model(**load_file(inputs))
    name = "logits" if "logits" in output else "last_hidden_state"
    save_file({{"output": output[name].contiguous()}}, outputs)
"""
PLAIN = (
    "import transformers\nmodel = getattr(transformers, kind).from_pretrained(folder, dtype='auto')"
)
OURS = "import multihead\nmodel = multihead.load(folder, dtype='auto')"


def who_loads(plain: bool) -> str:
    """A sentence on what can load a checkpoint, given whether plain transformers can."""
    if plain:
        return (
            "plain transformers loads it (from_pretrained), and so does multihead.load, which also"
            " keeps the heads' labels"
        )
    return (
        "multihead.load loads it. Plain transformers can't: its config has no place for numbers of"
        " heads that differ by layer, nor, in some families, for the bias that compensates removed"
        " heads. With kind='uniform' it can, in such families with compensate='none' as well"
    )


def save(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    batch: Mapping[str, Tensor] | None = None,
    *,
    plain: bool,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model, its tokenizer and JSON files to a new folder, and load it again in a fresh
    process.

    The folder appears under its name only when it is complete and the loaded model gave the same
    as the one in memory.

    Args:
        out: the folder; it must not exist, or be empty.
        batch: inputs to compare on; by default a line of text.
        plain: compare with plain transformers too, not only `multihead.load`.
        extra: JSON content by file name.

    Raises:
        MultiheadError: something is there already, or the loaded model differs.
        OSError: it can't be written (a full disk); no file is left.
    """
    require_new_folder(out)
    if batch is None:
        device, line = device_of(model), tokenizer(LINE, return_tensors="pt")
        batch = {
            name: value.to(device)
            for name, value in line.items()
            if name in ("input_ids", "attention_mask")
        }
    try:
        with atomic_folder(out) as partial:
            # left over from a GGUF file; the weights are plain now
            model.config.__dict__.pop("quantization_config", None)
            if hasattr(model, "hf_quantizer"):
                model.hf_quantizer = None
            model.is_quantized = False
            with quiet():
                model.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            for name, content in (extra or {}).items():
                (partial / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
            for opening in [OURS, PLAIN] if plain else [OURS]:
                _load_again(model, partial, batch, opening)
            for file in partial.iterdir():  # weights are written readable by their owner alone
                shutil.copymode(partial / "config.json", file)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                error.errno,
                f"out={str(out)!r}: the disk is full; nothing was written. Free "
                f"{_size(model):,} bytes, or give a folder on another disk",
            ) from error
        raise


def _size(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _load_again(model: Any, folder: Path, batch: Mapping[str, Tensor], opening: str) -> None:
    from safetensors.torch import load_file, save_file

    with evaluation(model), torch.no_grad():
        output = model(**batch)
    expected = output["logits" if "logits" in output else "last_hidden_state"].cpu()
    with tempfile.TemporaryDirectory() as folder_of_files:
        inputs, outputs = (Path(folder_of_files) / f"{n}.safetensors" for n in ("in", "out"))
        save_file({name: value.cpu().contiguous() for name, value in batch.items()}, inputs)
        script = FRESH.format(opening=opening, threads=torch.get_num_threads())
        source = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        files = [str(path) for path in (folder, inputs, outputs)]
        run = subprocess.run(
            [sys.executable, "-c", script, *files, type(model).__name__],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        who = "multihead.load" if opening == OURS else "plain transformers"
        if run.returncode:
            last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
            raise MultiheadError(
                f"the checkpoint doesn't load again with {who} in a fresh process, so it wasn't"
                f" kept: {last}"
            )
        loaded = load_file(outputs)["output"]
    difference = float((loaded.double() - expected.double()).abs().max())
    largest = float(expected.abs().max())
    if not difference <= tolerance(expected.dtype) * largest:
        raise MultiheadError(
            f"the checkpoint, loaded again with {who} in a fresh process, gives logits that differ"
            f" by {difference:.3g} of {largest:.3g}, so it wasn't kept"
        )
