"""Where the files of a model are: locate a checkpoint, download it, and check that it is complete.

Nothing is ever unpickled, and no model is built here.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ..errors import MultiheadError

__all__ = [
    "BUILTIN",
    "EXPECTED",
    "PICKLES",
    "check_weight_files",
    "download_model",
    "list_some",
    "locate_model",
    "named_class",
    "quiet",
    "raise_cannot_open",
    "read_json",
]

BUILTIN = Path(__file__).parent / "builtin"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
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


@contextlib.contextmanager
def quiet(hide_stderr: bool) -> Iterator[None]:
    """Hide transformers' warnings and progress bars: `load` reports what matters in them."""
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


def check_weight_files(name: str, folder: Path, raw: dict[str, Any]) -> None:
    """Raise unless all weight files exist and are as long as their headers demand, before a model
    is built.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    elif index.exists():
        files = sorted(set(read_json(name, index).get("weight_map", {}).values()))
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


def named_class(raw: dict[str, Any]) -> Any:
    """The first class of transformers that a config names under "architectures", or None."""
    import transformers

    for architecture in raw.get("architectures") or []:
        kind = getattr(transformers, str(architecture), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    return None


def list_some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")


def raise_cannot_open(name: str, error: Exception, what: str) -> NoReturn:
    raise MultiheadError(
        f"model={name!r}: {what}: {type(error).__name__}: {str(error).strip()}"
    ) from error
