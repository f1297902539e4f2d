"""Killed at any moment and started again, a reading ends with the same table; a file that isn't its
own is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multihead
from data.test_tokenizing import small_tokenizer
from multihead.io import ResumeFile
from multihead.models.introspect import fingerprint
from multihead.reader.table import Table
from small import llama

# Forks, so that only one process pays for the imports: each child reads, and is killed for good at
# some moment.
DRIVER = """
import json, os, random, signal, sys, time
import multihead
from multihead.data import batching
from multihead.io import ResumeFile

folder, draw = sys.argv[1], random.Random(int(sys.argv[2]))
ResumeFile.is_due = lambda self: True
batching.CHUNK = 3
model, tokenizer = multihead.load_builtin()
words = "the cat and the dog sat on a hat . It is what a man said to the cat".split()
texts = [" ".join(draw.choice(words) for _ in range(draw.choice([3, 9, 20, 70, 200]))) for _ in range(24)]

def start(name):
    child = os.fork()
    if child:
        return child
    try:
        table = multihead.read(model, iter(texts), tokenizer=tokenizer, batch_size=2, context=48, stride=30,
                               resume=f"{folder}/{name}.progress")
        table.save(f"{folder}/{name}.json")
    finally:
        os._exit(0)

def done():
    try:
        return json.loads(open(f"{folder}/killed.progress").read().partition("\\n")[2])["state"]["done"]
    except FileNotFoundError:
        return 0

os.waitpid(start("whole"), 0)
kills = 0
for further in (0, 1, 0, 2, 1):
    before, child, limit = done(), start("killed"), time.monotonic() + 60
    while done() < before + further and time.monotonic() < limit:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    kills += os.waitpid(child, 0)[1] == signal.SIGKILL
    print(done(), flush=True)
assert kills > 3, kills
os.waitpid(start("killed"), 0)
"""


def equal(a: Table, b: Table) -> None:
    assert (
        a.meta == b.meta
        and a.reasons == b.reasons
        and a.heads == b.heads
        and a.sums.keys() == b.sums.keys()
    )
    for column in a.sums:
        np.testing.assert_allclose(
            a.sums[column], b.sums[column], rtol=1e-12, atol=1e-300, err_msg=column
        )


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_table(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(seed)],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    assert done.returncode == 0, (seed, done.stderr)
    steps = list(map(int, done.stdout.split()))
    assert steps == sorted(steps) and steps[-1] >= 4, (seed, steps)  # it went on each time
    equal(
        multihead.load_table(tmp_path / "killed.json"),
        multihead.load_table(tmp_path / "whole.json"),
    )


TEXTS = ["a b c " * n for n in (3, 30, 1, 7, 2, 5, 30, 4, 1, 1)]


def read(
    path: Path | None,
    stop_after: int = 10**9,
    texts: list[str] = TEXTS,
    model: Any = None,
    **options: Any,
) -> Table:
    asked = iter(range(10**9))
    options = {
        "batch_size": 2,
        "context": 20,
        "tokenizer": small_tokenizer(pad_token="c"),
    } | options
    return multihead.read(
        model or llama(),
        iter(texts),
        resume=path,
        probe=True,
        stop=lambda: next(asked) >= stop_after,
        **options,
    )


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a reading that was stopped in its second chunk."""
    monkeypatch.setattr("multihead.data.batching.CHUNK", 3)
    monkeypatch.setattr(ResumeFile, "is_due", lambda self: True)
    table = read(tmp_path / "p", 9)
    assert "partial" in table.meta and 0 < table.meta["documents"] < len(TEXTS)
    return tmp_path / "p"


def test_a_stopped_reading_goes_on_and_a_finished_one_gives_its_table_again(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = read(None)
    monkeypatch.setattr(
        "multihead.reader.run.run_probe", lambda *_: pytest.fail("the probe ran again")
    )
    for _ in range(3):
        equal(read(stopped), want)
    assert [path.name for path in stopped.parent.iterdir()] == ["p"]


def test_nothing_of_a_document_is_kept_before_its_end(stopped: Path) -> None:
    stopped.unlink()
    partial = read(stopped, 2)  # within the windows of a long one
    kept = (
        json.loads(stopped.read_text().partition("\n")[2])["state"]["table"]["meta"]
        if stopped.exists()
        else {"documents": 0}
    )
    assert partial.meta["documents"] == 1 and not kept["documents"]
    equal(read(stopped), read(None))


def test_the_last_units_are_not_lost_to_the_clock(tmp_path: Path) -> None:
    """A stop within twenty seconds keeps what was read, though the clock hasn't asked for it
    yet.
    """
    read(tmp_path / "p", 1, texts=["a b", "b c", "a c"], batch_size=1)
    assert json.loads((tmp_path / "p").read_text().partition("\n")[2])["state"]["done"] == 1


def edit(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = json.loads(path.read_text().partition("\n")[2])
        change(data)
        body = json.dumps(data)
        path.write_text(hashlib.sha256(body.encode()).hexdigest() + "\n" + body)

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "checksum"),
        (lambda p: p.write_bytes(p.read_bytes()[: len(p.read_bytes()) // 2]), "checksum"),
        (lambda p: p.write_bytes(b""), "checksum"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b'"done": ', b'"done": 1', 1)), "checksum"),
        (lambda p: p.write_bytes(b"\xff\xfe"), "checksum"),
        (edit(lambda d: d.update(version=9)), "version 9"),
        (edit(lambda d: d.pop("state")), "'state'"),
        (edit(lambda d: d["state"].pop("digest")), "'digest'"),
        (edit(lambda d: d["state"]["table"]["sums"].update(strange=[])), "sums strange is"),
        (edit(lambda d: d["settings"].update(multihead="0.0.1")), 'multihead "0.0.1", now "0.1.0"'),
        (edit(lambda d: d["state"].update(digest="0")), "other texts"),
    ],
)
def test_a_damaged_file_is_refused_and_stays(
    stopped: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(stopped)
    content = stopped.read_bytes()
    with pytest.raises(ValueError, match=r"resume='.*p' (is damaged|was written for)") as caught:
        read(stopped)
    assert words in str(caught.value) and "delete that file to start again" in str(caught.value)
    assert stopped.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 3}, "batch_size 2, now 3"),
        ({"context": 19}, "context 20, now 19"),
        ({"stride": 3}, "stride null, now 3"),
        ({"special_ids": [1]}, "special_ids"),
        ({"generate": 3, "context": None}, "generate"),
        ({"texts": ["b", *TEXTS[1:]]}, "other texts"),
        ({"texts": TEXTS[:6]}, "other texts"),
        ({"texts": ["a"]}, "other texts"),
        ({"model": "other"}, "model"),
    ],
)
def test_another_reading_is_refused(stopped: Path, change: dict[str, Any], words: str) -> None:
    if "model" in change:
        change = {"model": llama()}
        change["model"].lm_head.weight.data[0] += 1
    with pytest.raises(ValueError) as caught:
        read(stopped, **change)
    assert words in str(caught.value) and "delete that file" in str(caught.value), str(caught.value)


def test_words(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"resume='.*nowhere.p': the folder .* doesn't exist; create it first"
    ):
        read(tmp_path / "nowhere" / "p")
    with pytest.raises(ValueError, match="only a reading of texts can be resumed"):
        multihead.read(llama(), [{"input_ids": np.zeros((1, 2))}], resume=tmp_path / "p")


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}},
        {"attention_bias": False, "rms_norm_eps": 0.1},
        {"hidden_act": "relu"},
    ],
)
def test_a_model_of_the_same_weights_that_computes_otherwise_is_another(
    stopped: Path, change: dict[str, Any]
) -> None:
    other = llama(**change)
    other.load_state_dict(llama().state_dict())
    assert fingerprint(other) != fingerprint(llama())
    with pytest.raises(ValueError, match=r"was written for another reading \(model "):
        read(stopped, model=other)


def test_texts_cut_elsewhere_are_another_reading(tmp_path: Path) -> None:
    """The tokenizer may bound texts too, and gives the same tokens all the same."""
    read(tmp_path / "p", 1, context=None)
    tokenizer = small_tokenizer(pad_token="c", model_max_length=5)
    with pytest.raises(ValueError, match=r"was written for another reading \(limit 64, now 5\)"):
        read(tmp_path / "p", context=None, tokenizer=tokenizer)


def test_what_generating_hangs_on_is_part_of_the_reading(tmp_path: Path) -> None:
    read(tmp_path / "p", 1, context=None, generate=3)
    other = llama()
    other.generation_config.repetition_penalty = 1.5
    with pytest.raises(ValueError, match=r"was written for another reading \(generate "):
        read(tmp_path / "p", context=None, generate=3, model=other)
