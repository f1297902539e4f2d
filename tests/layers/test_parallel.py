"""Layers whose heads are divided among two and four processes compute what one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from layers.parallel_ranks import CHECKS, RANKS, create_saved, sharp
from multihead import MultiHeadAttention, load_builtin
from multihead.layers import TransformerBlock, parallel_plan, replace_attention, restore_attention


def test_ranks_equal_one_process(tmp_path: Path) -> None:
    """All checks of `parallel_ranks.py`; in one test, since workers of pytest would each start the
    ranks for theirs.
    """
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parallel_ranks.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    for name in CHECKS:
        results = [tmp_path / f"{name}.{rank}" for rank in range(RANKS)]
        found = [path.read_text() if path.exists() else done.stderr for path in results]
        assert found == ["equal"] * RANKS, f"{name}:\n" + "\n".join(found)
    # and one process loads what two saved
    want = sharp(create_saved)
    torch.manual_seed(1)
    got = create_saved().double()
    state = {"model": got.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    got.load_state_dict(state["model"])
    for name, parameter in want.named_parameters():
        assert torch.equal(got.get_parameter(name), parameter), name


def test_a_transformers_model() -> None:
    """In one process, whose rank has all heads."""
    model, tokenizer = load_builtin()
    ids = tokenizer("the heads of a model", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        want = model.generate(ids, max_new_tokens=4, do_sample=False), model(ids).logits
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plan = parallel_plan(replace_attention(model))
        assert len(plan) == model.config.num_hidden_layers
        parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
        with torch.no_grad():
            got = model.generate(ids, max_new_tokens=4, do_sample=False), model(ids).logits
        assert torch.equal(got[0], want[0]) and torch.allclose(got[1], want[1], atol=1e-4)
        with pytest.raises(ValueError, match="can't be restored: the heads of its layer are"):
            restore_attention(model)
    finally:
        dist.destroy_process_group()


def test_names_of_a_plan() -> None:
    block = TransformerBlock(
        8, 2, hidden_dim=24, cross_attention=True, feed_forward=nn.Linear(8, 8)
    )
    assert set(parallel_plan(block)) == {
        "attention",
        "attention_norm",
        "cross_attention",
        "cross_attention_norm",
        "feed_forward_norm",
    }
    assert list(parallel_plan(MultiHeadAttention(8, 2))) == [""]
    assert list(parallel_plan(MultiHeadAttention(8, 2), prefix="h.*.attn")) == ["h.*.attn"]


def test_words() -> None:
    with pytest.raises(ValueError, match="layer=Linear has no part that is one of MultiHead"):
        parallel_plan(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="layer=3: expected a module"):
        parallel_plan(3)  # type: ignore[arg-type]
