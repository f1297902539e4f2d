"""Open a GGUF file through transformers, with errors for files that are broken."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError
from .checkpoint_files import EXPECTED, PICKLES, named_class, raise_cannot_open

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["auto_class", "open_gguf", "read_gguf_once"]


def open_gguf(name: str, file: Path, dtype: str) -> tuple[Any, Any, dict[str, Any]]:
    if file.suffix == ".safetensors":
        raise MultiheadError(
            f"model={str(file)!r} holds weights only; give its folder, which has config.json"
            " next to it"
        )
    if file.suffix in PICKLES:
        raise MultiheadError(
            f"model={str(file)!r} is a pickle, which can run any code as it is opened, so it never"
            f" is; give {EXPECTED}"
        )
    with file.open("rb") as start:
        if start.read(4) != b"GGUF":
            raise MultiheadError(
                f"model={str(file)!r} is not a GGUF file (those begin with the letters GGUF); give"
                f" {EXPECTED}"
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
        with read_gguf_once():
            config = AutoConfig.from_pretrained(**where)
            kind = named_class(config.to_dict()) or auto_class(config)
            opened, info = kind.from_pretrained(
                **where, config=config, dtype=dtype, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # what a broken file raises depends on where it breaks off
        if _is_broken(file):
            raise_cannot_open(
                name,
                error,
                f"{file} ({file.stat().st_size:,} bytes) is truncated or damaged; download or copy"
                " it again",
            )
        raise_cannot_open(
            name, error, f"transformers {transformers.__version__} could not open {file}"
        )
    return opened, tokenizer, info


@contextlib.contextmanager
def read_gguf_once() -> Iterator[None]:
    """Parse each GGUF file once while the `with` lasts.

    transformers parses it for the config, the weights and the tokenizer, and builds the same map of
    names for each module: two thirds of the time that opening takes. Both are only read.
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


def _is_broken(file: Path) -> bool:
    """Whether the file is shorter than its table of contents demands, or the table is damaged."""
    import gguf

    try:
        gguf.GGUFReader(file)
    except Exception:  # the reader raises many kinds
        return True
    return False


def auto_class(config: PretrainedConfig) -> Any:
    """The automatic class for a config that names no class, as those of GGUF files."""
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
