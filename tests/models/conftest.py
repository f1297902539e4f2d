"""A small checkpoint to open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, PreTrainedTokenizerFast

from models.checkpoints import SIZES


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small random Llama with a tokenizer of a few words."""
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, intermediate_size=24, num_key_value_heads=1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "the": 1, "head": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder
