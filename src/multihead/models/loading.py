"""Opening a model: a folder with a transformers checkpoint, a GGUF file, or a name on the hub.

Nothing is ever unpickled, code that lies in a checkpoint runs only under `trust_remote_code`, and a
checkpoint that
does not fill its model is an error: transformers itself would draw the missing weights at random,
    warn, and go on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import MultiheadError

if (
    TYPE_CHECKING
):  # torch and transformers take seconds to import, and `multihead --help` must not wait for them
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["BUILTIN", "DTYPES", "Loaded", "load", "load_builtin"]

BUILTIN = Path(__file__).parent / "builtin"
DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WAYS = "a folder with config.json, model.safetensors and the tokenizer's files, or a GGUF file"


@dataclass(frozen=True)
class Loaded:
    """A model ready to be read: in evaluation mode, with its tokenizer where it came with one.

    `name` is what to call it, `path` the folder or GGUF file that it came from, and `notes` what a
    user should know.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    path: Path
    notes: tuple[str, ...] = ()


def load(
    model: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """Opens a model and its tokenizer.

    The class is the one that the checkpoint names, so that heads for masked or causal language
    modelling stay.

    Args:
        model: a folder with a transformers checkpoint, a GGUF file, or a name on the hub (a copy in
            the local cache does without network). Without it: the small model that comes with
            multihead.
        device: where to put it, "cpu" unless given.
        dtype: of its weights: "float32" unless given, or one of the other `DTYPES`; "auto" keeps
            the checkpoint's.
        trust_remote_code: whether Python code that lies in the checkpoint may run.

    Raises:
        FileNotFoundError: nothing there, or no weights, or a part of them missing.
        ValueError: weights that are damaged, incomplete or pickled, code that isn't trusted, a
            dtype or a device that doesn't exist, a model that transformers doesn't know.
    """
    dtype_name = _dtype(dtype)
    place = _device(device)
    name, path = _locate(model)
    if path is None:
        path = _download(name, trust_remote_code)
    with quiet(hide_stderr=path.is_file()):
        if path.is_file():
            opened, tokenizer, info = _open_gguf(name, path, dtype_name)
        else:
            opened, tokenizer, info = _open_folder(name, path, dtype_name, trust_remote_code)
    notes = _check_filled(name, opened, info)
    return Loaded(opened.eval().to(place), tokenizer, name, path, notes)


def load_builtin() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The small causal model that comes with multihead, and its tokenizer.

    >>> model, tokenizer = load_builtin()
    >>> type(model).__name__
    'LlamaForCausalLM'
    """
    loaded = load()
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


def _locate(model: str | Path | None) -> tuple[str, Path | None]:
    """What to call the model, and where it lies; None for a name that only the hub can know."""
    if model is None:
        if not (BUILTIN / "config.json").exists():
            raise FileNotFoundError(
                f"the built-in model is missing from {BUILTIN}; reinstall, or give {WAYS}"
            )
        return "built-in", BUILTIN
    path = Path(model).expanduser()
    if str(model) and path.exists():
        return path.resolve().name, path
    text = str(model)
    # On the hub a name is NAME or OWNER/NAME; whatever looks otherwise is meant as a path.
    hub_name = isinstance(model, str) and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text)
    if hub_name and path.suffix not in (".gguf", ".safetensors", *PICKLES):
        return text, None
    folder = path.parent
    close = (
        get_close_matches(path.name, [p.name for p in folder.iterdir()], 1)
        if folder.is_dir()
        else []
    )
    hint = f" Did you mean {str(folder / close[0])!r}?" if close else ""
    raise FileNotFoundError(
        f"model={text!r}: there is no such file or folder.{hint} Expected {WAYS}."
    )


def _download(name: str, trust_remote_code: bool) -> Path:
    """The folder in the local cache that holds the checkpoint `name` of the hub; pickles are not
    even downloaded.
    """
    from huggingface_hub import constants, errors, snapshot_download

    wanted = [
        "*.safetensors",
        "*.json",
        "*.txt",
        "*.model",
        "*.jinja",
        *(["*.py"] if trust_remote_code else []),
    ]
    try:
        # "*/*": copies in other formats lie in subfolders.
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except errors.GatedRepoError as error:
        raise MultiheadError(
            f"model={name!r}: its owner lets only some people download it. Accept the terms on its"
            " page, run `hf auth login`, and try again."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"model={name!r}: there is no such file or folder here, and no public model of that"
            f" name on the hub. Expected {WAYS}, or the name of a model on the hub (a private one"
            " needs `hf auth login`)."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no network"
        raise FileNotFoundError(
            f"model={name!r}: there is no such file or folder here, the hub can't be asked"
            f" ({cause}), and the local cache {constants.HF_HUB_CACHE} does not hold it. What works"
            f" without network: {WAYS}, a model that the cache holds already, or no model at all"
            " (the built-in one)."
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise MultiheadError(f"model={name!r}: the hub refused it: {error}") from error


@contextlib.contextmanager
def quiet(hide_stderr: bool) -> Iterator[None]:
    """Without transformers' warnings and progress bars: what they have to say, `load` says
    itself.
    """
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Unpacking GGUF has a progress bar that listens to no setting.
    with contextlib.redirect_stderr(io.StringIO()) if hide_stderr else contextlib.nullcontext():
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def _open_folder(
    name: str, folder: Path, dtype: str, trust_remote_code: bool
) -> tuple[Any, Any, dict[str, Any]]:
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    from .pruned import opened as settle_opened
    from .pruned import pruned_class

    raw = _read_json(name, folder / "config.json")
    _check_weights(name, folder, raw)
    native = _named_class(raw)
    # A checkpoint that transformers has a class of its own for needs no foreign code; it runs only
    # if asked for.
    custom = bool(raw.get("auto_map")) and (trust_remote_code or native is None)
    if custom and not trust_remote_code:
        raise MultiheadError(
            f"model={name!r}: {folder / 'config.json'} asks to run Python code that lies in the"
            f" checkpoint ({_some(sorted(map(str, raw['auto_map'].values())))}), which is never"
            " done unasked. Read that code; if you trust it, pass trust_remote_code=True (on the"
            " command line --trust-remote-code)."
        )
    trust = {"trust_remote_code": custom}
    try:
        config = AutoConfig.from_pretrained(folder, **trust)
        kind = _custom_class(raw) if custom else native or _class_for(config)
        narrowed = pruned_class(kind, raw)
        opened, info = (narrowed or kind).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            # only so that _check_filled can say which: transformers' error does not
            ignore_mismatched_sizes=True,
            **trust,
        )
        if narrowed is not None:
            settle_opened(opened, kind)
    except (
        OSError,
        ValueError,
        RuntimeError,
        ImportError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        _refused(name, error, f"transformers {transformers.__version__} could not open {folder}")
    tokenizer = None
    if any(
        file for pattern in ("tokenizer*", "vocab.*", "*.model") for file in folder.glob(pattern)
    ):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (
            OSError,
            ValueError,
            RuntimeError,
            ImportError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            _refused(
                name,
                error,
                f"transformers {transformers.__version__} could not open the tokenizer in {folder}",
            )
    return opened, tokenizer, info


def _open_gguf(name: str, file: Path, dtype: str) -> tuple[Any, Any, dict[str, Any]]:
    if file.suffix == ".safetensors":
        raise MultiheadError(
            f"model={str(file)!r} holds weights only; give its folder, which has config.json"
            " beside it"
        )
    if file.suffix in PICKLES:
        raise MultiheadError(
            f"model={str(file)!r} is a pickle, which can run any code as it is opened, so it never"
            f" is; give {WAYS}"
        )
    with file.open("rb") as start:
        if start.read(4) != b"GGUF":
            raise MultiheadError(
                f"model={str(file)!r} is not a GGUF file (those begin with the letters GGUF); give"
                f" {WAYS}"
            )
    missing = [
        package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None
    ]
    if missing:
        raise MultiheadError(
            f"model={str(file)!r}: reading GGUF needs {' and '.join(missing)}; run: pip install"
            " 'multihead[gguf]'"
        )
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        with _gguf_read_once():
            config = AutoConfig.from_pretrained(**where)
            kind = _named_class(config.to_dict()) or _class_for(config)
            opened, info = kind.from_pretrained(
                **where, config=config, dtype=dtype, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # what a broken file raises depends on where it breaks off
        if _broken_gguf(file):
            _refused(
                name,
                error,
                f"{file} ({file.stat().st_size:,} bytes) is truncated or damaged; download or copy"
                " it again",
            )
        _refused(name, error, f"transformers {transformers.__version__} could not open {file}")
    return opened, tokenizer, info


def _read_json(name: str, file: Path) -> dict[str, Any]:
    folder = file.parent
    if not file.exists():
        found = ""
        if (folder / "adapter_config.json").exists():
            found = (
                " It holds an adapter: merge it into its model first (peft: merge_and_unload,"
                " save_pretrained)."
            )
        elif ggufs := sorted(folder.glob("*.gguf")):
            found = f" It holds a GGUF file: give {str(ggufs[0])!r}."
        raise FileNotFoundError(
            f"model={str(folder)!r}: the folder has no {file.name}.{found} Expected {WAYS}."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MultiheadError(
            f"model={name!r}: {file} is not valid JSON ({error}); download or copy it again"
        ) from error
    if not isinstance(content, dict):
        raise MultiheadError(
            f"model={name!r}: {file} holds a {type(content).__name__}, expected named entries"
            " {...}"
        )
    return content


def _check_weights(name: str, folder: Path, raw: dict[str, Any]) -> None:
    """That all weight files are there and whole, before anything is built: their headers say how
    long they must be.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    elif index.exists():
        files = sorted(set(_read_json(name, index).get("weight_map", {}).values()))
        if absent := [file for file in files if not (folder / file).exists()]:
            raise FileNotFoundError(
                f"model={name!r}: {len(absent)} of the {len(files)} weight files that {index} lists"
                f" are missing ({', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''});"
                " download or copy them again"
            )
    else:
        _no_weights(name, folder, raw)
    for file in files:
        try:
            with safe_open(folder / file, framework="numpy"):
                pass
        except SafetensorError as error:
            size = (folder / file).stat().st_size
            raise MultiheadError(
                f"model={name!r}: {folder / file} ({size:,} bytes) is truncated or damaged"
                f" ({error}); download or copy it again"
            ) from error


def _no_weights(name: str, folder: Path, raw: dict[str, Any]) -> NoReturn:
    # By name, because a training run leaves other pickles beside the weights: its arguments, its
    # optimiser.
    names = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    pickles = [
        name for name in names if name.startswith(("pytorch_model", "model", "consolidated"))
    ]
    if pickles:
        native = _named_class(raw)
        raise MultiheadError(
            f"model={name!r}: {folder} has its weights only as a pickle ({_some(pickles)}), which"
            " can run any code as it is opened, so it never is. Take a checkpoint in safetensors;"
            " or, if you trust this one, convert it once, in Python:"
            f" transformers.{native.__name__ if native else 'AutoModel'}.from_pretrained({str(folder)!r},"
            f" use_safetensors=False).save_pretrained({str(folder) + '-safetensors'!r}), and copy"
            " the tokenizer's files there."
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    found = f" (there is {_some(others)}, which transformers does not look for)" if others else ""
    raise FileNotFoundError(
        f"model={name!r}: {folder} has a config.json but no weights: no model.safetensors, nor "
        f"model.safetensors.index.json with the files that it lists{found}. Expected {WAYS}."
    )


def _named_class(raw: dict[str, Any]) -> Any:
    """The first class of transformers that the config names as the model's own, or None."""
    import transformers

    for architecture in raw.get("architectures") or []:
        kind = getattr(transformers, str(architecture), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    return None


def _class_for(config: PretrainedConfig) -> Any:
    """The automatic class for a config that names none, as GGUF files do."""
    import transformers as t

    if config.is_encoder_decoder:
        return (
            t.AutoModelForSeq2SeqLM
            if type(config) in t.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
            else t.AutoModel
        )
    # Most encoders are in the list of causal models too (a BERT can be made a decoder); the masked
    # ones come first.
    if (
        type(config) in t.MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) not in t.MODEL_FOR_MASKED_LM_MAPPING
    ):
        return t.AutoModelForCausalLM
    return t.AutoModel


def _custom_class(raw: dict[str, Any]) -> Any:
    import transformers

    order = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
    return getattr(
        transformers, next((name for name in order if name in raw["auto_map"]), "AutoModel")
    )


@contextlib.contextmanager
def _gguf_read_once() -> Iterator[None]:
    """transformers parses the file anew for the config, the weights and the tokenizer, and makes
    the same map of names for each module: two thirds of the time that opening takes. Both are only
    read, so one of each serves.
    """
    import gguf

    before = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = (
        cache(gguf.GGUFReader),
        cache(gguf.get_tensor_name_map),
    )
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = before


def _broken_gguf(file: Path) -> bool:
    """Whether the file ends before its own table of contents says, or the table itself can't be
    read.
    """
    import gguf

    try:
        gguf.GGUFReader(file)
    except Exception:  # whatever its reader trips over
        return True
    return False


def _check_filled(name: str, model: Any, info: dict[str, Any]) -> tuple[str, ...]:
    """Refuses a model of which a part was drawn at random; notes weights that the model has no
    place for.
    """
    # A pooler stands after all attention, and encoders are often saved without.
    missing = sorted(key for key in info["missing_keys"] if not re.search(r"(^|\.)pooler\.", key))
    kind = type(model).__name__
    if missing:
        raise MultiheadError(
            f"model={name!r}: the checkpoint lacks {len(missing)} of the weights of {kind}"
            f" ({_some(missing)}), which would be random. Take the complete checkpoint; or, if its"
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
                f" {_some(left)}"
            ),
        )
    return ()


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")


def _refused(name: str, error: Exception, what: str) -> NoReturn:
    raise MultiheadError(
        f"model={name!r}: {what}: {type(error).__name__}: {str(error).strip()}"
    ) from error
