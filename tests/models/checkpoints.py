"""A small checkpoint, and ways to break and to open it, for tests of loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multihead.models.loading import load_with_tokenizer

SIZES: dict[str, Any] = dict(
    vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
)


def edit(file: Path, **entries: Any) -> None:
    content = json.loads(file.read_text())
    content.update(entries)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def ask(script: str, **environment: str) -> str:
    """All that a fresh interpreter prints: the hub's library, for one, reads its settings once."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | environment, **both)
    assert not done.returncode, done.stdout
    return str(done.stdout)


def refusal(kind: type[Exception], *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(kind) as caught:
        load_with_tokenizer(*arguments, **keywords)
    return str(caught.value)
