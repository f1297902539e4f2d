"""Where the files of a model are: locate a checkpoint, download it, and check that it is complete.

Nothing is ever unpickled, and no model is built here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ..errors import MultiheadError
from ..io import parse_json, read_regular_file, require_regular_file
from ..outside import clean, clean_exception
from .guard import blame_checkpoint
from .weigh import WeightFiles

__all__ = [
    "BUILTIN",
    "EXPECTED",
    "PICKLES",
    "check_config",
    "check_files",
    "check_weight_files",
    "code_names",
    "download_model",
    "list_some",
    "list_weight_files",
    "locate_model",
    "named_class",
    "read_json",
]

BUILTIN = Path(__file__).parent / "builtin"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
EXPLICIT = "transformers_weights"  # entry of a config that names the weight file
# what a user is to give
EXPECTED = "a folder with config.json, model.safetensors and the tokenizer's files, or a GGUF file"


def locate_model(model: str | Path | None) -> tuple[str, Path | None]:
    """Return the name of a model and its path; None for a name that only the hub can know."""
    if model is None:
        if not (BUILTIN / "config.json").exists():
            raise FileNotFoundError(
                f"the built-in model is missing from {BUILTIN}; reinstall, or give {EXPECTED}"
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
        f"model={text!r}: there is no such file or folder.{hint} Expected {EXPECTED}."
    )


def download_model(name: str, trust_remote_code: bool) -> Path:
    """Download a checkpoint of the hub to the local cache and return its folder; pickles are left
    out.
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
            f" name on the hub. Expected {EXPECTED}, or the name of a model on the hub (a private"
            " one needs `hf auth login`)."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no network"
        raise FileNotFoundError(
            f"model={name!r}: there is no such file or folder here, the hub can't be asked"
            f" ({cause}), and the local cache {constants.HF_HUB_CACHE} does not hold it. What works"
            f" without network: {EXPECTED}, a model that the cache holds already, or no model at"
            " all (the built-in one)."
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise MultiheadError(f"model={name!r}: the hub refused it: {error}") from error


def read_json(name: str, file: Path) -> dict[str, Any]:
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
            f"model={str(folder)!r}: the folder has no {file.name}.{found} Expected {EXPECTED}."
        )
    shown = f"model={name!r}: {file}"
    content = parse_json(read_regular_file(file, shown), shown, "; download or copy it again")
    if not isinstance(content, dict):
        raise MultiheadError(
            f"{shown} holds a {type(content).__name__}, expected named entries {{...}}"
        )
    return content


def check_config(name: str, file: Path, raw: Mapping[str, Any]) -> None:
    """Raise where an entry that decides on classes, code or files is of another type than it must
    be, or names something outside of the folder.
    """

    def require(good: bool, key: str, expected: str) -> None:
        if not good:
            value = clean(json.dumps(raw[key]), 200)
            raise MultiheadError(f"model={name!r}: {file}: {key} is {value}, expected {expected}")

    def are_texts(values: Iterable[Any]) -> bool:
        return all(isinstance(value, str) for value in values)

    kinds, code, weights = (raw.get(k) for k in ("architectures", "auto_map", EXPLICIT))
    is_list = isinstance(kinds, list) and are_texts(kinds)
    require(kinds is None or is_list, "architectures", "a list of names of classes")
    is_map = isinstance(code, dict) and are_texts(code_names(raw))
    require(code is None or is_map, "auto_map", "names of classes by automatic class")
    kind = raw.get("model_type")
    require(kind is None or isinstance(kind, str), "model_type", "a text")
    endings = (".safetensors", ".safetensors.index.json")
    is_weights = isinstance(weights, str) and weights.endswith(endings)
    require(weights is None or is_weights, EXPLICIT, f"a file that ends in {' or '.join(endings)}")


def code_names(raw: Mapping[str, Any]) -> list[str]:
    """The classes that "auto_map" of a config names; that of a tokenizer can be a list."""
    named = (raw.get("auto_map") or {}).values()
    lists = [entry if isinstance(entry, list) else [entry] for entry in named]
    return [entry for one in lists for entry in one if entry is not None]


def check_files(name: str, folder: Path) -> None:
    """Raise where a file of the folder is none that may be opened, or leads out of the folder."""
    for file in sorted(folder.iterdir()):
        if not file.is_dir() and file.exists():
            require_regular_file(file, f"model={name!r}: {file}")
    if (folder / "adapter_config.json").exists():
        if not (folder / "adapter_model.safetensors").exists():
            raise MultiheadError(
                f"model={name!r}: {folder} has an adapter_config.json without an"
                " adapter_model.safetensors; remove it, or add the weights of the adapter"
            )
        read_json(name, folder / "adapter_config.json")
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        files = read_json(name, settings).get("fast_tokenizer_files") or []
        for entry in files if isinstance(files, list) else [files]:
            require_inside(name, settings, entry)


def require_inside(name: str, file: Path, entry: Any) -> str:
    """The name of a file in the folder that `file` is in, as one of its entries gives it.

    A link in the folder may lead elsewhere, as in the hub's cache; a name may not.
    """
    parts = re.split(r"[/\\]", entry) if isinstance(entry, str) else [".."]
    if "" in parts or ".." in parts or ":" in parts[0] or "\0" in entry:
        raise MultiheadError(
            f"model={name!r}: {file} names {clean(repr(entry), 200)}, which is not the name of a"
            " file in its folder; nothing outside is opened"
        )
    return str(entry)


def check_weight_files(name: str, folder: Path, raw: Mapping[str, Any]) -> WeightFiles:
    """Raise unless all weight files exist and are as long as their headers demand, before a model
    is built; return how much they hold.
    """
    from safetensors import SafetensorError, safe_open

    tensors = size = 0
    for file in list_weight_files(name, folder, raw):
        shown = f"model={name!r}: {folder / file}"
        length = require_regular_file(folder / file, shown).stat().st_size
        try:
            with safe_open(folder / file, framework="numpy") as weights:
                tensors += len(weights.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise MultiheadError(
                f"{shown} ({length:,} bytes) is truncated or damaged ({error}); download or copy it"
                " again"
            ) from clean_exception(error)
        size += length
    return WeightFiles(tensors, size)


def list_weight_files(name: str, folder: Path, raw: Mapping[str, Any]) -> list[str]:
    """The names of the weight files in a folder."""
    explicit = raw.get(EXPLICIT)
    single = require_inside(name, folder / "config.json", explicit or "model.safetensors")
    index = folder / (single if single.endswith(".json") else "model.safetensors.index.json")
    if not single.endswith(".json") and (folder / single).exists():
        return [single]
    if (explicit is not None and index.name != single) or not index.exists():
        _no_weights(name, folder, raw)
    entries = read_json(name, index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise MultiheadError(
            f"model={name!r}: {index} has no weight_map, expected the name of a file for each"
            " weight; download or copy it again"
        )
    # of each value once; one that is no text can be anything
    distinct = {repr(entry): entry for entry in entries.values()}.values()
    files = sorted(require_inside(name, index, entry) for entry in distinct)
    if others := [file for file in files if not file.endswith(".safetensors")]:
        # transformers takes them for pickles
        raise MultiheadError(
            f"model={name!r}: {index} lists {clean(list_some(others), 300)}, expected files that"
            " end in .safetensors; take a checkpoint in safetensors"
        )
    if absent := [file for file in files if not (folder / file).exists()]:
        raise FileNotFoundError(
            f"model={name!r}: {len(absent)} of the {len(files)} weight files that {index} lists"
            f" are missing ({clean(list_some(absent), 300)}); download or copy them again"
        )
    return files


def _no_weights(name: str, folder: Path, raw: Mapping[str, Any]) -> NoReturn:
    # By name, because a training run leaves other pickles next to the weights: its arguments, its
    # optimiser.
    names = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    pickles = [
        name for name in names if name.startswith(("pytorch_model", "model", "consolidated"))
    ]
    if pickles:
        native = named_class(raw)
        raise MultiheadError(
            f"model={name!r}: {folder} has its weights only as a pickle ({list_some(pickles)}),"
            " which can run any code as it is opened, so it never is. Take a checkpoint in"
            " safetensors; or, if you trust this one, convert it once, in Python:"
            f" transformers.{native.__name__ if native else 'AutoModel'}"
            f".from_pretrained({str(folder)!r}, use_safetensors=False)"
            f".save_pretrained({str(folder) + '-safetensors'!r}), and copy the"
            " tokenizer's files there."
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    found = (
        f" (there is {list_some(others)}, which transformers does not look for)" if others else ""
    )
    raise FileNotFoundError(
        f"model={name!r}: {folder} has a config.json but no weights: no model.safetensors, nor "
        f"model.safetensors.index.json with the files that it lists{found}. Expected {EXPECTED}."
    )


def named_class(raw: Mapping[str, Any]) -> Any:
    """The first class of transformers that a config names under "architectures", or None."""
    import transformers

    for architecture in raw.get("architectures") or []:
        with blame_checkpoint(f"architectures: {architecture!r} can't be used"):
            kind: Any = getattr(transformers, architecture, None)
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        # the base of all has no config; transformers would keep what it finds out about it for all
        if is_model and kind.config_class is not None:
            return kind
    return None


def list_some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
