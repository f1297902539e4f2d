"""A pruned model is written whole or not at all, and loads in a fresh process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import multihead
from families import FAMILIES, batches_of, model_of
from multihead.io import require_new_folder
from multihead.models.ablate import collect_head_means
from multihead.models.head_intervention import HeadIntervention
from multihead.models.loading import load_with_tokenizer
from multihead.models.pruned import finalize_config
from multihead.models.site import find_sites
from multihead.pruning import checkpoint
from multihead.pruning.surgery import remove_heads
from pruning.kept_checkpoints import TIED, add_all_kinds_of_files, shrink, stored, write_llama

BY_NAME = {family.name: family for family in FAMILIES}


def pruned(
    name: str, removed: dict[int, list[int]], *, means: bool = False
) -> tuple[Any, dict[str, torch.Tensor], bool]:
    family = BY_NAME[name]
    model, batch = model_of(family), batches_of(family, "none")[0]
    sites = find_sites(model)
    gone = {sites[i].name: heads for i, heads in removed.items()}
    compensation = None
    if means:
        found = collect_head_means(model, sites, [batch])
        constant = {name: found[name][heads].flatten() for name, heads in gone.items()}
        compensation = HeadIntervention(gone, constant=constant)
    smaller = remove_heads(model, gone, batch, compensation=compensation)
    return smaller, batch, bool(finalize_config(smaller, batch))


# name, heads by place of the site, whether means are put in, whether plain transformers loads it
CASES = [
    ("llama", {0: [0, 1], 1: [4, 5]}, False, True),
    ("llama", {0: [0, 2, 4], 1: [1, 3, 4]}, True, True),
    ("llama", {0: [0], 1: [1, 2, 3]}, True, False),
    ("llama", {1: [0, 1, 2, 3, 4, 5]}, True, False),
    ("gpt2", {0: [1], 1: [0, 2]}, True, False),
    ("bert", {0: [0, 3], 1: [1, 2, 3, 4]}, True, False),
    ("bert", {0: [0, 1, 2, 3, 4]}, True, False),
    ("t5", {0: [1], 3: [0, 4]}, True, False),
    ("phi3", {0: [0], 1: [1]}, False, False),
    ("qwen3", {0: [0, 1], 1: [0, 1]}, True, True),
    ("gpt_neox", {0: [1], 1: [0, 2]}, True, False),
]  # whose weights have other names in checkpoints


@pytest.mark.parametrize(("name", "removed", "means", "plain"), CASES)
def test_loads_again(
    tmp_path: Path, name: str, removed: dict[int, list[int]], means: bool, plain: bool
) -> None:
    smaller, batch, settled = pruned(name, removed, means=means)
    assert settled == plain
    smaller.save_pretrained(tmp_path / "it")
    again = multihead.load(tmp_path / "it")
    assert type(again) is type(smaller)
    with torch.no_grad():
        expected, got = smaller(**batch), again(**batch)
    key = "logits" if "logits" in expected else "last_hidden_state"
    torch.testing.assert_close(got[key], expected[key], rtol=0, atol=1e-6)
    assert [s.head_label(h) for s in find_sites(again) for h in range(s.num_heads)] == [
        s.head_label(h) for s in find_sites(smaller) for h in range(s.num_heads)
    ]
    if plain:
        loaded = type(smaller).from_pretrained(tmp_path / "it")
        with torch.no_grad():
            torch.testing.assert_close(loaded(**batch)[key], expected[key], rtol=0, atol=1e-5)
    else:
        with pytest.raises((RuntimeError, ValueError)):
            type(smaller).from_pretrained(tmp_path / "it")
    again.save_pretrained(tmp_path / "twice")  # by the user, after a training say
    with torch.no_grad():
        torch.testing.assert_close(
            multihead.load(tmp_path / "twice")(**batch)[key], expected[key], rtol=0, atol=1e-6
        )


def test_save_proves_it_in_a_fresh_process(tmp_path: Path) -> None:
    smaller, batch, plain = pruned("llama", {0: [0, 1], 1: [4, 5]})
    checkpoint.save(
        smaller,
        None,
        tmp_path / "it",
        batch,
        plain=plain,
        extra={"plan.json": {"remove": ["L0.H0"]}},
    )
    assert json.loads((tmp_path / "it" / "plan.json").read_text()) == {"remove": ["L0.H0"]}
    assert [p.name for p in tmp_path.iterdir()] == ["it"]
    with pytest.raises(ValueError, match="there is something already, and nothing is overwritten"):
        checkpoint.save(smaller, None, tmp_path / "it", batch, plain=plain)
    with pytest.raises(ValueError, match=r"the folder .*nowhere' doesn't exist; create it first"):
        checkpoint.save(smaller, None, tmp_path / "nowhere" / "it", batch, plain=plain)
    for place in (tmp_path, tmp_path / "none"):  # links, to an empty folder and to nothing
        (link := tmp_path / f"link-{place.name}").symlink_to(place)
        with pytest.raises(ValueError, match="is a link, which can't become a folder"):
            require_new_folder(link)
    if os.geteuid():  # for root all folders can be written to
        (shut := tmp_path / "shut").mkdir(0o500)
        with pytest.raises(ValueError, match="can't be written to"):
            require_new_folder(shut / "it")
    assert "plain transformers loads it" in checkpoint.who_loads(True)
    assert "Plain transformers can't" in checkpoint.who_loads(False)


@pytest.mark.slow
def test_what_does_not_come_back_the_same_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller, batch, _ = pruned("llama", {0: [0], 1: [1]})
    with pytest.raises(
        ValueError,
        match="doesn't load again with plain transformers in a fresh process, so it wasn't kept",
    ):
        checkpoint.save(smaller, None, tmp_path / "it", batch, plain=True)
    assert list(tmp_path.iterdir()) == []

    def other(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        with torch.no_grad():
            save_file({"logits": smaller(**batch).logits * 1.01}, command[5])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", other)
    with pytest.raises(
        ValueError, match=r"gives logits that differ by .* of .*, so it wasn't kept"
    ):
        checkpoint.save(smaller, None, tmp_path / "it", batch, plain=False)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from test_checkpoint import pruned
from multihead.pruning import checkpoint
smaller, batch, plain = pruned("llama", {0: [0, 1], 1: [4, 5]})
inner = smaller.save_pretrained


def slow(folder, *args, **kwargs):
    inner(folder, *args, **kwargs)
    print("writing", flush=True)
    import time
    time.sleep(60)
smaller.save_pretrained = slow
checkpoint.save(smaller, None, sys.argv[1], batch, plain=plain)
"""


def test_killed_while_writing_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "it"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(out)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None and run.stdout.readline() == "writing\n"
    time.sleep(0.1)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not out.exists()


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller, batch, plain = pruned("llama", {0: [0, 1], 1: [4, 5]})

    def full(folder: Path, *args: object, **kwargs: object) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smaller, "save_pretrained", full)
    with pytest.raises(OSError, match=r"the disk is full; nothing was written\. Free [\d,]+ bytes"):
        checkpoint.save(smaller, None, tmp_path / "it", batch, plain=plain)
    assert list(tmp_path.iterdir()) == []


def test_trainer_takes_it(tmp_path: Path) -> None:
    smaller, batch, _ = pruned("llama", {0: [0], 1: [1, 2, 3]}, means=True)
    smaller.save_pretrained(tmp_path / "it")
    model = multihead.load(tmp_path / "it")
    model.requires_grad_(True)
    before = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    data = [{"input_ids": ids, "labels": ids} for ids in batch["input_ids"]]
    settings = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    transformers.Trainer(model, settings, train_dataset=data).train()
    assert not torch.equal(model.model.layers[0].self_attn.q_proj.weight, before)
    model.save_pretrained(tmp_path / "trained")
    with torch.no_grad():
        torch.testing.assert_close(
            multihead.load(tmp_path / "trained")(**batch).logits, model.eval()(**batch).logits
        )


@pytest.mark.parametrize(
    "removed", [{0: [0], 1: [1, 2, 3]}, {0: [0, 1], 1: [4, 5]}, {1: [0, 1, 2, 3, 4, 5]}]
)
def test_costs_are_those_of_the_heads_that_are_left(
    tmp_path: Path, removed: dict[int, list[int]]
) -> None:
    """From the config alone, layer by layer: as many parameters as are there, as many bytes as the
    cache takes.
    """
    smaller, batch, _ = pruned("llama", removed, means=True)
    smaller.save_pretrained(tmp_path / "it")
    (tmp_path / "it" / "model.safetensors").unlink()
    found = multihead.cost(tmp_path / "it", context_length=11, batch_size=3, dtype="float32")
    held = sum(p.numel() for site in find_sites(smaller) for p in [*site.module.parameters()])
    assert sum(found.parameters.values()) == held
    ids = batch["input_ids"][:, :11]
    with torch.no_grad():
        layers = smaller(ids, use_cache=True).past_key_values.layers
    kept = sum(
        t.numel() * 4
        for layer in layers
        if layer.keys.shape[-1] > 1
        for t in (layer.keys, layer.values)
    )
    assert found.cache("theory") == kept


def test_a_checkpoint_stays_what_it_was(tmp_path: Path) -> None:
    """Types, files, metadata and companions; weights that are stale and what is outside stay out.
    In a folder with spaces and letters beyond ASCII, and into a folder inside of it.
    """
    folder = write_llama(tmp_path / "ein Modell für uns")
    add_all_kinds_of_files(folder, tmp_path / "outside.txt")
    smaller, tokenizer, plain = shrink(folder)
    assert plain and smaller.dtype == torch.float32
    for x in smaller.parameters():  # to values that bfloat16 doesn't hold
        x.data *= 1 + torch.rand_like(x) / 30
    before = {name: x.clone() for name, x in smaller.state_dict().items()}
    out = folder / "smaller ü"
    written = checkpoint.save(smaller, tokenizer, out, plain=plain, summary="Two heads fewer.")

    was, now = stored(folder), stored(out)
    assert was == now and {kind for _, kind in now.values()} == {torch.bfloat16, torch.float32}
    assert len({file for file, _ in now.values()}) == 3 and TIED not in now
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            assert weights.metadata() == {"format": "pt", "made by": "a user"}
    old, new = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (folder, out))
    assert new["weight_map"] == old["weight_map"]
    sizes = [
        x.numel() * x.element_size()
        for f in out.glob("*.safetensors")
        for x in load_file(f).values()
    ]
    assert new["metadata"]["total_size"] == sum(sizes) < old["metadata"]["total_size"]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"

    kept = ["preprocessor_config.json", "modeling_own.py", "notes/über uns.txt", "modules.json"]
    kept += ["2_Dense/config.json", "2_Dense/model.safetensors", "chat_template.jinja"]
    kept += ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    for name in kept:
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    assert (out / "link.txt").read_text() == "kept" and not (out / "link.txt").is_symlink()
    assert (out / "README.md").read_text() == "---\nlicense: mit\n---\n# Ours\n\nTwo heads fewer.\n"
    outside, stale = "a link to a place outside of the folder", "weights of the model before"
    assert dict(written.left_out) == {
        "leads_out.txt": outside,
        "leads_to_nothing.txt": "a link to nothing",
        "around": "a link to a folder",
        "notes/above": outside,
        "onnx/": f"it holds {stale}",
        "original/": f"it holds {stale}",
        "pytorch_model.bin": stale,
        "pytorch_model.bin.index.json": stale,
    }
    there = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    own = {"config.json", "README.md", "link.txt", "model.safetensors.index.json"}
    assert there == {*kept, *own, *(f for f, _ in now.values())}
    assert all(os.access(file, os.W_OK) and file.stat().st_mode & 0o200 for file in out.rglob("*"))

    on_disk = [
        sum(f.stat().st_size for f in place.glob("*.safetensors")) for place in (folder, out)
    ]
    assert list(written.bytes_on_disk) == on_disk and on_disk[1] < on_disk[0]
    assert written.stored_in == (("bfloat16", "float32"), ("bfloat16", "float32"))
    for name, x in smaller.state_dict().items():  # computed in float32, and so it stays
        assert x.dtype == torch.float32 and torch.equal(x, before[name]), name
    again = multihead.load(out, dtype="float32").state_dict()
    for name, x in before.items():
        kind = torch.float32 if "norm" in name else torch.bfloat16
        assert torch.equal(again[name], x.to(kind).float()), name


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("kind", [pytest.param("uniform", marks=pytest.mark.slow), "any"])
def test_trusted_code_reaches_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = write_llama(tmp_path / "own")
    (folder / "own.py").write_text(OWN_CODE)
    content = json.loads((folder / "config.json").read_text())
    content |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    content["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(content))
    every = {"uniform": (1, 2), "any": {"model.layers.0.self_attn": [1]}}[kind]
    smaller, tokenizer, plain = shrink(folder, every, trust_remote_code=True)
    assert type(smaller).__name__ == "OwnForCausalLM" and bool(plain) == (kind == "uniform")
    written = checkpoint.save(smaller, tokenizer, tmp_path / "out", plain=plain)
    assert not written.has_code and (tmp_path / "out" / "own.py").read_text() == OWN_CODE
    with pytest.raises(ValueError, match="asks to run Python code"):
        multihead.load(tmp_path / "out")
    again = multihead.load(tmp_path / "out", trust_remote_code=True)
    assert type(again).__name__ == "OwnForCausalLM"
    ids = torch.arange(2, 18)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, smaller(ids).logits, rtol=0.1, atol=0.1)


def test_a_gguf_file_is_kept_once_a_fresh_process_gave_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    smaller, tokenizer, plain = shrink(write_llama(tmp_path / "llama"))
    out = tmp_path / "kleiner für uns.gguf"
    options: dict[str, Any] = dict(plain=plain, summary="Two heads fewer.")
    written = checkpoint.save(
        smaller, tokenizer, out, extra={"plan.json": {"remove": ["L0.H1"]}}, **options
    )
    before = sum(file.stat().st_size for file in (tmp_path / "llama").glob("*.safetensors"))
    assert written.bytes_on_disk == (before, out.stat().st_size)
    assert written.stored_in == (("bfloat16", "float32"), ("BF16", "F32"))
    fields = {name: f.contents() for name, f in gguf.GGUFReader(out).fields.items()}
    assert fields["general.description"] == "Two heads fewer."
    assert json.loads(fields["multihead.plan"]) == {"remove": ["L0.H1"]}
    again = load_with_tokenizer(out)
    assert again.tokenizer is not None and again.tokenizer.chat_template == "{{ messages }}"
    with pytest.raises(ValueError, match="there is something already, and nothing is overwritten"):
        checkpoint.save(smaller, tokenizer, out, **options)

    def other(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        save_file({"logits": torch.zeros(1, 16, 300)}, command[5])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", other)
    batch = {"input_ids": torch.arange(2, 18)[None]}
    with pytest.raises(ValueError, match=r"gives logits that differ by .* so it wasn't kept"):
        checkpoint.save(smaller, tokenizer, tmp_path / "other.gguf", batch, **options)
    assert sorted(file.name for file in tmp_path.iterdir()) == [out.name, "llama"]
