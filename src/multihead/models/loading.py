"""Open a model: a folder with a transformers checkpoint, a GGUF file, or a name on the hub.

Nothing is ever unpickled, and code that lies in a checkpoint runs only with `trust_remote_code`. A
checkpoint that doesn't fill its model is an error: transformers itself would initialise the missing
weights at random, warn, and go on.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError
from ..outside import clean
from .checkpoint_files import (
    check_config,
    check_files,
    check_weight_files,
    code_names,
    download_model,
    list_some,
    locate_model,
    named_class,
    read_json,
)
from .gguf import auto_class, open_gguf
from .guard import blame_checkpoint
from .quiet import quiet
from .weigh import build_on_meta, weigh_counts, weigh_model

# torch and transformers take seconds to import, and `multihead --help` must not wait for them
if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DTYPES", "LoadedModel", "load", "load_builtin", "load_with_tokenizer"]

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")  # of attention, that need no other package


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with its tokenizer if it came with one.

    `name` is a short name for reports, `path` the folder or GGUF file it came from, and `notes` are
    what the user should know about how it was opened. `differences` are how the model differs from
    what the checkpoint holds: weights without a place in it, or random ones.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    path: Path
    notes: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()


def load(
    model: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Open a model, also one that `multihead prune` or `multihead share` wrote: an ordinary
    transformers model in evaluation mode.

    It generates with a KV cache, trains, and is saved again by `save_pretrained`. Its class is the
    one that the checkpoint names, so heads for masked or causal language modelling stay.

    Args:
        model: a folder with a transformers checkpoint, a GGUF file, or a name on the hub (a copy in
            the local cache needs no network). By default the small model that comes with multihead.
        device: "cpu" by default.
        dtype: of the weights, one of "float32" (default), "bfloat16", "float16", "float64", or
            "auto" for the checkpoint's own.
        trust_remote_code: run Python code that lies in the checkpoint.

    Raises:
        FileNotFoundError: no such model, no weights in it, or some weight files missing.
        MultiheadError: weights that are damaged, incomplete or pickled, code that isn't trusted, a
            dtype or device that doesn't exist, a model that transformers doesn't know.

    >>> import multihead
    >>> type(multihead.load()).__name__
    'LlamaForCausalLM'
    """
    return load_with_tokenizer(
        model, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    ).model


def load_with_tokenizer(
    model: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Open a model with its tokenizer, name, path and notes; arguments and errors as of `load`."""
    dtype_name = _dtype(dtype)
    place = _device(device)
    name, path = locate_model(model)
    if path is None:
        path = download_model(name, trust_remote_code)
    with quiet():
        if not path.is_dir():
            opened, tokenizer, info = open_gguf(name, path, dtype_name)
            notes: tuple[str, ...] = ()
        else:
            opened, tokenizer, info, notes = _open_folder(name, path, dtype_name, trust_remote_code)
    left_out = _check_filled(name, opened, info)
    random = sorted(info["missing_keys"])  # of a pooler: anything else is an error
    differences = list(left_out)
    if random:
        differences.append(
            f"{len(random)} weights of {type(opened).__name__} aren't in the checkpoint and are"
            f" random: {list_some(random)}"
        )
    model_there = opened.eval().to(place)
    notes = (*notes, *left_out)
    return LoadedModel(model_there, tokenizer, name, path, notes, tuple(differences))


def load_builtin() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open the small causal model that comes with multihead, and its tokenizer.

    Raises:
        FileNotFoundError: an installation without the model's files.

    >>> model, tokenizer = load_builtin()
    >>> type(model).__name__
    'LlamaForCausalLM'
    """
    loaded = load_with_tokenizer()
    assert loaded.tokenizer is not None
    return loaded.model, loaded.tokenizer


def _dtype(dtype: str | torch.dtype | None) -> str:
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise MultiheadError(
            f"dtype={name!r} is not a dtype that models are read in; choose one of"
            f" {', '.join(DTYPES)}"
        )
    return name


def _device(device: str | torch.device | None) -> torch.device:
    import torch

    there = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        there += [
            f"{kind.type if kind else ''}:{index}"
            for index in range(torch.accelerator.device_count())
        ]
    try:
        wanted = torch.device("cpu" if device is None else device)
    except RuntimeError:
        wanted = None
    full = wanted and (
        wanted.type if wanted.type == "cpu" else f"{wanted.type}:{wanted.index or 0}"
    )
    if wanted is None or full not in there:
        raise MultiheadError(
            f"device={str(device)!r} is not a device that torch {torch.__version__} finds on this"
            f" machine; choose one of {', '.join(there)}"
        )
    return wanted


def _open_folder(
    name: str, folder: Path, dtype: str, trust_remote_code: bool
) -> tuple[Any, Any, dict[str, Any], tuple[str, ...]]:
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    from .pruned import is_own_code, pruned_class, restore_original_class
    from .transformers import NAME

    file = folder / "config.json"
    raw = read_json(name, file)
    check_config(name, file, raw)
    if any(map(is_own_code, code_names(raw))):  # for plain transformers; nothing here needs it
        raw = {key: value for key, value in raw.items() if key != "auto_map"}
    check_files(name, folder)
    weights = check_weight_files(name, folder, raw)
    weigh_counts(name, file, raw, weights)
    native = named_class(raw)
    # A checkpoint that transformers has a class for needs no foreign code; it runs only
    # if asked for.
    custom = bool(raw.get("auto_map")) and (trust_remote_code or native is None)
    if custom and not trust_remote_code:
        raise MultiheadError(
            f"model={name!r}: {file} asks to run Python code that lies in the"
            f" checkpoint ({list_some(sorted(code_names(raw)))}), which is never"
            " done unasked. Read that code; if you trust it, pass trust_remote_code=True (on the"
            " command line --trust-remote-code)."
        )
    # Code that is trusted may lie in another repository; nothing else is downloaded.
    source = {"trust_remote_code": custom, "local_files_only": not custom}
    what = f"model={name!r}: transformers {transformers.__version__} could not open {folder}"
    with blame_checkpoint(what):
        config = AutoConfig.from_pretrained(folder, **source)
    kind = _custom_class(raw) if custom else native or auto_class(config)
    notes: tuple[str, ...] = ()
    if not custom:
        notes = _use_installed_attention(config)
        weigh_model(name, build_on_meta(kind, copy.deepcopy(config), what), weights)
    if custom and NAME in raw:  # the class itself: only its own heads can be cut
        with blame_checkpoint(what):
            kind = _code_class(kind, raw, folder)
    smaller_class = pruned_class(kind, raw)
    with blame_checkpoint(what):
        opened, info = (smaller_class or kind).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            # only so that _check_filled can name them: transformers' error does not
            ignore_mismatched_sizes=True,
            **source,
        )
    if smaller_class is not None:
        restore_original_class(opened, kind)
    tokenizer = None
    if any(
        file for pattern in ("tokenizer*", "vocab.*", "*.model") for file in folder.glob(pattern)
    ):
        what = (
            f"model={name!r}: transformers {transformers.__version__} could not open the tokenizer"
            f" in {folder}"
        )
        with blame_checkpoint(what):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
            )
        longest = getattr(tokenizer, "model_max_length", None)
        if isinstance(longest, bool) or not isinstance(longest, int | float | None):
            raise MultiheadError(
                f"model={name!r}: {folder / 'tokenizer_config.json'}: model_max_length is"
                f" {clean(repr(longest), 200)}, expected a number; correct it or remove it"
            )
    return opened, tokenizer, info, notes


def _use_installed_attention(config: PretrainedConfig) -> tuple[str, ...]:
    """Let transformers choose the attention where a config asks for a package that may be missing,
    or for code from the hub; a reading replaces it anyway.
    """
    notes = []
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        asked = getattr(part, "_attn_implementation", None)
        if part is not None and asked not in (None, *IMPLEMENTATIONS):
            part._attn_implementation = None
            notes.append(
                f"the config asks for the attention {asked!r}; the model runs with what"
                " transformers chooses"
            )
    return tuple(dict.fromkeys(notes))


def _custom_class(raw: dict[str, Any]) -> Any:
    import transformers

    order = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
    return getattr(
        transformers, next((name for name in order if name in raw["auto_map"]), "AutoModel")
    )


def _code_class(auto: Any, raw: dict[str, Any], folder: Path) -> Any:
    """The class in the checkpoint's code that an automatic class would take."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    kind = get_class_from_dynamic_module(raw["auto_map"][auto.__name__], str(folder))
    kind.register_for_auto_class(auto.__name__)
    return kind


def _check_filled(name: str, model: Any, info: dict[str, Any]) -> tuple[str, ...]:
    """Raise for a model with randomly initialised weights; note weights that it has no place
    for.
    """
    # A pooler comes after all attention, and encoders are often saved without one.
    missing = sorted(key for key in info["missing_keys"] if not re.search(r"(^|\.)pooler\.", key))
    kind = type(model).__name__
    if missing:
        raise MultiheadError(
            f"model={name!r}: the checkpoint lacks {len(missing)} of the weights of {kind}"
            f" ({list_some(missing)}), which would be random. Take the complete checkpoint; or, if"
            f" its"
            ' weights are for another class, name that class under "architectures" in its'
            " config.json."
        )
    if other := sorted(info["mismatched_keys"]):
        key, found, expected = other[0]
        raise MultiheadError(
            f"model={name!r}: {len(other)} weights of the checkpoint have another size than its"
            f" config makes them, the first {key}: {tuple(found)}, expected {tuple(expected)}. Take"
            " both from the same checkpoint."
        )
    if left := sorted(info["unexpected_keys"]):
        return (
            (
                f"{len(left)} weights of the checkpoint have no place in {kind} and were left out:"
                f" {list_some(left)}"
            ),
        )
    return ()
