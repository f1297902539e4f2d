"""A folder with all that can lie in a checkpoint's folder, and its model without two heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from multihead.models.loading import load_with_tokenizer
from multihead.models.pruned import finalize_config
from multihead.models.site import find_sites
from multihead.pruning.surgery import remove_heads
from tiny_tokenizers import byte_level

TIED = "lm_head.weight"


def write_llama(folder: Path, **config: Any) -> Path:
    """A small Llama in bfloat16 with norms in float32, in three files that have metadata."""
    torch.manual_seed(0)
    made = tf.LlamaConfig(
        **dict(hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
        | dict(num_key_value_heads=4, head_dim=8, vocab_size=300, tie_word_embeddings=True)
        | dict(attention_bias=True, max_position_embeddings=64)
        | config
    )
    model = tf.LlamaForCausalLM(made)
    for name, x in model.named_parameters():
        x.data = x.data * (1 if "norm" in name else 8)
    model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="14KB")
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            own = weights.metadata() | {"made by": "a user"}
        state = load_file(file)
        state = {n: x.float() + 0.001 if "norm" in n else x for n, x in state.items()}
        save_file(state, file, metadata=own)
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    return folder


def shrink(
    folder: Path, heads: tuple[int, ...] | dict[str, list[int]] = (1, 2), **options: Any
) -> tuple[Any, Any, bool]:
    """The model of a folder without these heads of each layer or of those named, its tokenizer, and
    whether plain transformers loads it.
    """
    loaded = load_with_tokenizer(folder, **options)
    model, sites = loaded.model, find_sites(loaded.model)
    batch = {"input_ids": torch.arange(2, 18)[None]}
    removed = heads if isinstance(heads, dict) else {site.name: list(heads) for site in sites}
    smaller = remove_heads(model, removed, batch)
    return smaller, loaded.tokenizer, finalize_config(smaller)


def stored(folder: Path) -> dict[str, tuple[str, torch.dtype]]:
    """File and type of each tensor in a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: (file.name, x.dtype) for name, x in load_file(file).items()}
    return found


def add_all_kinds_of_files(folder: Path, outside: Path) -> None:
    """Files to keep, files of weights that pruning makes stale, and links."""
    texts = {
        "README.md": "---\nlicense: mit\n---\n# Ours",
        "modules.json": json.dumps([{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}]),
        "2_Dense/config.json": "{}",
        "2_Dense/model.safetensors": "weights of another module",
        "preprocessor_config.json": '{"size": 3}',
        "modeling_own.py": "# code",
        "notes/über uns.txt": "kept",
        "onnx/model.onnx": "stale",
        "onnx/config.json": "{}",
        "original/deep/consolidated.00.pth": "stale",
        "pytorch_model.bin": "stale",
        "pytorch_model.bin.index.json": "{}",
        ".cache/huggingface/a.lock": "",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    outside.write_text("secret")
    (folder / "leads_out.txt").symlink_to(outside)
    (folder / "leads_to_nothing.txt").symlink_to(folder / "none")
    (folder / "link.txt").symlink_to("notes/über uns.txt")
    (folder / "around").symlink_to(folder)
    (folder / "notes" / "above").symlink_to(outside.parent)
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(0o444)
