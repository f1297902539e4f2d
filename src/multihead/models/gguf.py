"""Open a GGUF file through transformers, with errors for files that are broken."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError
from ..io import require_regular_file
from .checkpoint_files import EXPECTED, PICKLES, named_class
from .gguf_header import read_gguf_header
from .gguf_rope import TABLE, rule_of
from .guard import blame_checkpoint
from .weigh import WeightFiles, build_on_meta, weigh_counts, weigh_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["auto_class", "check_gguf", "open_gguf", "read_gguf_once"]


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
    require_regular_file(file, f"model={str(file)!r}")
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

    weights = check_gguf(name, file)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    what = f"model={name!r}: transformers {transformers.__version__} could not open {file}"
    with read_gguf_once():
        with blame_checkpoint(what):
            config = AutoConfig.from_pretrained(**where, local_files_only=True)
        _complete_config(name, config, file)
        kind = named_class(config.to_dict()) or auto_class(config)
        weigh_counts(name, file, config.to_dict(), weights)
        weigh_model(name, build_on_meta(kind, copy.deepcopy(config), what), weights)
        with blame_checkpoint(what):
            opened, info = kind.from_pretrained(
                **where, config=config, dtype=dtype, output_loading_info=True, local_files_only=True
            )
        with blame_checkpoint(what):
            tokenizer = AutoTokenizer.from_pretrained(**where, local_files_only=True)
    # transformers notes the folder, which may hold other models
    opened.config._name_or_path = opened.name_or_path = str(file)
    return opened, tokenizer, info


def _complete_config(name: str, config: PretrainedConfig, file: Path) -> None:
    """Set what transformers doesn't read in files of Llama's kin: heads of another width than its
    default, the biases of attention, and Llama 3.1's scaling of rotary positions.
    """
    header = read_gguf_header(file)
    architecture = header.values.get("general.architecture")
    if architecture not in ("llama", "qwen2", "qwen3"):
        return
    width = header.values.get(f"{architecture}.attention.key_length")
    usual = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if isinstance(width, int) and width != usual:
        config.head_dim = width
    biases = {f"blk.0.{name}.bias" for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    if architecture == "llama" and biases <= header.names:
        config.attention_bias = True
    if architecture == "llama" and TABLE in header.names:
        import gguf

        tensors = gguf.GGUFReader(str(file)).tensors
        table = next(tensor.data for tensor in tensors if tensor.name == TABLE)
        try:
            rule = rule_of(table, config.rope_parameters["rope_theta"])
        except MultiheadError as error:
            raise MultiheadError(f"model={name!r}: {file}: {error}") from None
        config.rope_parameters = rule or config.rope_parameters


def check_gguf(name: str, file: Path) -> WeightFiles:
    """Raise for a file that is shorter than its table of contents demands, or whose table is
    damaged or counts more layers than it has tensors for; return how much it holds.
    """
    size = file.stat().st_size
    try:
        header = read_gguf_header(file)
    except ValueError as error:
        raise MultiheadError(
            f"model={name!r}: {file} ({size:,} bytes) is truncated or damaged; download or copy it"
            f" again: {error}"
        ) from error
    weights = WeightFiles(header.tensors, size)
    weigh_counts(name, file, header.values, weights)
    return weights


@contextlib.contextmanager
def read_gguf_once() -> Iterator[None]:
    """Parse each GGUF file once while the `with` lasts, without a progress bar.

    A reader slices the file for each word of the vocabulary, which takes three times as long of a
    memmap as of a plain array of the same memory. transformers parses the file for the config, the
    weights and the tokenizer, and builds the same map of names for each module: two thirds of the
    time that opening takes. All of it is only read.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as unpacking

    before, bar = (gguf.GGUFReader, gguf.get_tensor_name_map), unpacking.tqdm
    unpacking.tqdm = _no_bar  # it listens to no setting
    gguf.GGUFReader, gguf.get_tensor_name_map = (
        cache(_plain_reader(gguf.GGUFReader)),
        cache(gguf.get_tensor_name_map),
    )
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = before
        unpacking.tqdm = bar


def _plain_reader(reader: Any) -> Any:
    """The reader with its file as a plain array."""
    import numpy as np  # not on top: `multihead --help` must not wait for it

    class PlainReader(reader):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, file: Any) -> None:
            self._plain = file.view(np.ndarray)

    return PlainReader


def _no_bar(iterable: Any, *_: Any, **__: Any) -> Any:
    return iterable


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
