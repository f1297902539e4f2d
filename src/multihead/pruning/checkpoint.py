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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.batching import first_batch
from ..errors import MultiheadError
from ..io import atomic_file, atomic_folder, require_new_file, require_new_folder
from ..models.contexts import evaluation
from ..models.gguf_header import read_gguf_header
from ..models.gguf_write import require_gguf_output, write_gguf
from ..models.introspect import adds_parameters, inner_model, is_sentence_transformer, tolerance
from ..models.kept_files import CODE, add_to_readme, copy_companions
from ..models.pruned_code import write_pruned_code
from ..models.quiet import quiet
from ..models.source import Source, find_source, list_types, to_stored_layout

__all__ = ["Written", "is_gguf", "require_new_checkpoint", "save", "who_loads"]

LINE = "The heads that are left must still give the same."
# Runs in a fresh process, which knows the folder and nothing of the model in memory.
FRESH = """
import sys, torch
from safetensors.torch import load_file, save_file
folder, inputs, outputs, kind, dtype = sys.argv[1:]
torch.set_num_threads({threads})
{opening}
model.eval()
torch.manual_seed(0)
with torch.no_grad():
    output = model(**load_file(inputs))
named = output.items() if hasattr(output, "items") else enumerate(output)
tensors = {{str(name): x for name, x in named if torch.is_tensor(x) and x.is_floating_point()}}
save_file({{name: x.clone().contiguous() for name, x in tensors.items()}}, outputs)
"""
PLAIN = (
    "import transformers\n"
    "model = getattr(transformers, kind).from_pretrained(folder, dtype=dtype, **{trust})"
)
OURS = "import multihead\nmodel = multihead.load(folder, dtype=dtype, **{trust})"
# with the code in the checkpoint; both must be one model
CODED = """
import transformers, multihead
model = getattr(transformers, kind).from_pretrained(
    folder, dtype=dtype, trust_remote_code=True
).eval()
batch = load_file(inputs)
with torch.no_grad():
    coded = model(**batch)[0]
    model = multihead.load(folder, dtype=dtype)
    torch.testing.assert_close(coded, model(**batch)[0], rtol=0, atol=0)
"""


@dataclass(frozen=True)
class Written:
    """A checkpoint as it was written.

    Attributes:
        path: the folder.
        bytes_on_disk: of the weight files of the model before, None for a model that came from no
            checkpoint, and of the new ones.
        stored_in: names of the types of the weights before and after, the most frequent first.
        left_out: files of the checkpoint before that were not copied, with the reason.
        has_code: whether plain transformers opens it with the code in it.
    """

    path: Path
    bytes_on_disk: tuple[int | None, int]
    stored_in: tuple[tuple[str, ...], tuple[str, ...]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    has_code: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes on disk": list(self.bytes_on_disk),
            "stored in": [list(types) for types in self.stored_in],
            "left out": dict(self.left_out),
        }


def is_gguf(out: str | Path) -> bool:
    """Whether a checkpoint of this name is a GGUF file, and no folder."""
    return Path(out).suffix == ".gguf"


def require_new_checkpoint(out: str | Path, argument: str = "out") -> Path:
    """Check that a checkpoint could be written at `out`; errors as of `require_new_folder`."""
    return (require_new_file if is_gguf(out) else require_new_folder)(out, argument)


def who_loads(plain: bool, reason: str = "") -> str:
    """A sentence on what can load a checkpoint, given whether plain transformers can, or why
    not.
    """
    if plain:
        return (
            "plain transformers loads it (from_pretrained), and so does multihead.load, which also"
            " keeps the heads' labels"
        )
    why = f": {reason}" if reason else ""
    return f"multihead.load loads it. Plain transformers can't{why}"


def save(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    batch: Mapping[str, Tensor] | None = None,
    *,
    plain: bool,
    extra: Mapping[str, Any] | None = None,
    summary: str | None = None,
) -> Written:
    """Write a model, its tokenizer and JSON files to a new folder, and load it again in a fresh
    process.

    The checkpoint stays what it was: weights in the types and files that those of the model's
    source lie in (`models.source.find_source`), and its other files. The folder appears under its
    name only when it is complete and the loaded model gave the same as the one in memory, whose
    weights were rounded to the types that they are stored in.

    Args:
        out: the folder; it must not exist, or be empty. A name that ends in .gguf is a new file in
            that format (see `models.gguf_write`).
        batch: inputs to compare on; by default a line of text.
        plain: compare with plain transformers too, not only `multihead.load`.
        extra: JSON content by file name.
        summary: a paragraph for the README, if there is one.

    Raises:
        MultiheadError: something is there already, or the loaded model differs.
        OSError: it can't be written (a full disk); no file is left.
    """
    require_new_checkpoint(out)
    model, batch = _transformers_model(model, batch)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise MultiheadError(
            f"{type(model).__name__} has an adapter (peft), without which its weights aren't the"
            " model's; merge it into the weights first (merge_and_unload)"
        )
    source = find_source(model)
    if batch is None:
        batch = first_batch(model, [LINE], tokenizer)[0]
    batch = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    if is_gguf(out):
        texts = {f"multihead.{Path(name).stem}": json.dumps(x) for name, x in (extra or {}).items()}
        texts |= {} if summary is None else {"general.description": summary}
        return _save_gguf(model, tokenizer, Path(out), batch, source, texts)
    with _full_disk(model, out), atomic_folder(out) as partial:
        _write_model(model, partial, source)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        left_out = {} if source is None else copy_companions(model, tokenizer, source, partial)
        if summary is not None:
            add_to_readme(partial, summary)
        for name, content in (extra or {}).items():
            (partial / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        is_trusted = any(type(x).__module__.startswith(CODE) for x in (model, tokenizer))
        expected = _output(model, batch, _rounded(model, source))
        kind = None if plain else write_pruned_code(model, partial)
        openings = [OURS, PLAIN] if plain else [CODED if kind else OURS]
        for opening in openings:
            _load_again(model, partial, batch, opening, expected, is_trusted, kind)
        for file in partial.rglob("*"):  # weights are written readable by their owner alone
            if file.is_file():
                shutil.copymode(partial / "config.json", file)
        return _describe(Path(out), partial, source, left_out, kind is not None)


def _transformers_model(
    model: Any, batch: Mapping[str, Any] | None
) -> tuple[Any, Mapping[str, Any] | None]:
    """The transformers model in a model of sentence-transformers, whose other modules are in files
    that are copied, and its inputs.
    """
    inner = inner_model(model)
    if is_sentence_transformer(model):
        return inner, None if batch is None else batch.get("input", batch)
    if adds_parameters(model):
        raise MultiheadError(
            f"{type(model).__name__} has parameters around {type(inner).__name__} that a checkpoint"
            " of transformers has no place for: save the smaller model by torch.save, or prune the"
            " model inside it"
        )
    return model, batch


@contextmanager
def _full_disk(model: Any, out: str | Path) -> Iterator[None]:
    """Add to the error of a full disk how much is needed."""
    try:
        yield
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


def _save_gguf(
    model: Any,
    tokenizer: Any,
    out: Path,
    batch: Mapping[str, Tensor],
    source: Source | None,
    texts: Mapping[str, str],
) -> Written:
    require_gguf_output(model, tokenizer, source)
    with _full_disk(model, out), atomic_file(out, argument="out") as part:
        held = write_gguf(model, tokenizer, source, part, texts)
        expected = _output(model, batch, held)
        _load_again(model, part, batch, OURS, expected, False, None)
        sizes = (None if source is None else source.size, part.stat().st_size)
        types = (() if source is None else source.types, read_gguf_header(part).types)
        return Written(out, sizes, types)


def _write_model(model: Any, partial: Path, source: Source | None) -> None:
    """Write config and weights, in the types and files of the source if there is one."""
    # left over from a GGUF file; the weights are plain now
    model.config.__dict__.pop("quantization_config", None)
    if hasattr(model, "hf_quantizer"):
        model.hf_quantizer = None
    model.is_quantized = False
    if source is None or source.is_gguf:
        with quiet():
            model.save_pretrained(partial)
        return
    with quiet():
        state = source.store(model.state_dict())
        # one file, whatever its size: its tensors go to the files that they were in
        model.save_pretrained(partial, state_dict=state, max_shard_size=1 << 62)
    del state
    to_stored_layout(partial, source)
    config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
    _restore_dtypes(config, source.config)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (partial / "config.json").write_text(text, encoding="utf-8")


def _restore_dtypes(config: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Give a config and its parts the type that they named before, whatever the model was
    computed in.
    """
    config.pop("dtype", None)
    if named := before.get("dtype", before.get("torch_dtype")):
        config["dtype"] = named
    for name, part in config.items():
        if isinstance(part, dict) and isinstance(before.get(name), Mapping):
            _restore_dtypes(part, before[name])


def _describe(
    out: Path, partial: Path, source: Source | None, left_out: Mapping[str, str], has_code: bool
) -> Written:
    files = sorted(partial.glob("*.safetensors"))
    after = list_types(files)
    size = sum(file.stat().st_size for file in files)
    before = None if source is None else source.size
    return Written(
        out, (before, size), (() if source is None else source.types, after), left_out, has_code
    )


# ---- the proof


def _rounded(model: Any, source: Source | None) -> dict[str, Tensor]:
    """The weights of a model that are stored in fewer bits than they have, rounded to these."""
    weights = dict(model.named_parameters())
    stored = weights if source is None else source.store(weights)
    return {
        name: x.to(weights[name].dtype)
        for name, x in stored.items()
        if x.dtype.itemsize < weights[name].dtype.itemsize
    }


def _output(
    model: Any, batch: Mapping[str, Tensor], weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The outputs of a model with some of its weights replaced."""
    with evaluation(model), torch.no_grad(), torch.random.fork_rng([]):
        torch.manual_seed(0)  # some models mask parts of a picture at random
        output = torch.func.functional_call(model, weights, kwargs=dict(batch))
    named = output.items() if hasattr(output, "items") else enumerate(output)
    return {
        str(name): x.cpu() for name, x in named if isinstance(x, Tensor) and x.is_floating_point()
    }


def _load_again(
    model: Any,
    folder: Path,
    batch: Mapping[str, Tensor],
    opening: str,
    expected: Mapping[str, Tensor],
    is_trusted: bool,
    kind: str | None,
) -> None:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder_of_files:
        inputs, outputs = (Path(folder_of_files) / f"{n}.safetensors" for n in ("in", "out"))
        save_file({name: value.cpu().contiguous() for name, value in batch.items()}, inputs)
        trust = {"trust_remote_code": True} if is_trusted else {}
        script = FRESH.format(opening=opening.format(trust=trust), threads=torch.get_num_threads())
        source = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        files = [str(path) for path in (folder, inputs, outputs)]
        dtype = str(model.dtype).removeprefix("torch.")
        run = subprocess.run(
            [sys.executable, "-c", script, *files, kind or _class_name(model, folder), dtype],
            env=os.environ | {"PYTHONPATH": paths, "HF_MODULES_CACHE": folder_of_files},
            capture_output=True,
            text=True,
            check=False,
        )
        who = "plain transformers" if opening == PLAIN else "multihead.load"
        if run.returncode:
            last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
            raise MultiheadError(
                f"the checkpoint doesn't load again with {who} in a fresh process, so it wasn't"
                f" kept: {last}"
            )
        loaded = load_file(outputs)
    for name, right in expected.items():
        found = loaded.get(name)
        if found is None or found.shape != right.shape:
            shape = "none" if found is None else list(found.shape)
            raise MultiheadError(
                f"the checkpoint, loaded again with {who} in a fresh process, gives {shape} for"
                f" {name} {list(right.shape)}, so it wasn't kept"
            )
        difference = float((found.double() - right.double()).abs().max()) if right.numel() else 0
        largest = float(right.abs().max()) if right.numel() else 0
        if not difference <= tolerance(right.dtype) * largest:
            raise MultiheadError(
                f"the checkpoint, loaded again with {who} in a fresh process, gives {name} that"
                f" differ by {difference:.3g} of {largest:.3g}, so it wasn't kept"
            )


def _class_name(model: Any, folder: Path) -> str:
    """The class of transformers that opens a model; an automatic one for code of a checkpoint."""
    name = type(model).__name__
    if not type(model).__module__.startswith(CODE):
        return name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = {str(v).rpartition(".")[2]: k for k, v in (config.get("auto_map") or {}).items()}
    return named.get(name, "AutoModel")
