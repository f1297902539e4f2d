"""Two processes read what one does: torchrun with gloo, in one start, since a start takes
seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import multihead
from multihead.reader.distributed import SingleProcess

TEXTS = ["the cat and the dog " * n for n in (1, 7, 2, 40, 3, 1, 2)]  # 5 units over 2 processes
SCRIPT = """
import runpy, sys
import multihead
from multihead.data import batching
from multihead.reader.distributed import join

folder, texts = sys.argv[1], {texts!r}
rank, size, local = join()
assert (size, local) == (2, rank)
model, tokenizer = multihead.load_builtin()
options = dict(tokenizer=tokenizer, batch_size=2, context=48, distributed=True)
batching.CHUNK = 2
asked = iter(range(10**9))
stopped = multihead.read(model, iter(texts), resume=f"{{folder}}/many.progress", stop=lambda: next(asked) >= 1, **options)
assert 0 < stopped.meta["documents"] < len(texts) and "partial" in stopped.meta
for name, part in (("many", texts), ("one", texts[:1])):
    table = multihead.read(model, iter(part), resume=f"{{folder}}/{{name}}.progress", **options)
    table.save(f"{{folder}}/{{name}}.{{rank}}.json")
    if rank == 0:
        multihead.read(model, part, **(options | {{"distributed": False}})).save(f"{{folder}}/{{name}}.alone.json")

def failing():
    yield from texts
    if rank == 1:
        raise OSError("the disk is gone")
    yield from texts

try:
    multihead.read(model, failing(), **options)
except (OSError, ValueError) as error:
    open(f"{{folder}}/error.{{rank}}", "w").write(str(error))
batching.CHUNK = 64
sys.argv = ["multihead", "read", "--text", f"{{folder}}/texts", "--json", f"{{folder}}/heads.json", "--batch-size", "2"]
runpy.run_module("multihead", run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("two")
    (found / "texts").mkdir()
    for n, text in enumerate(TEXTS):
        (found / "texts" / f"{n}.txt").write_text(text)
    (found / "script.py").write_text(SCRIPT.format(texts=TEXTS))
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--master-port=0",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            str(found / "script.py"),
            str(found),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (found / "stdout").write_text(done.stdout)
    return found


def test_the_table_is_that_of_one_process(folder: Path) -> None:
    """Also where the processes were stopped in between and went on."""
    for name, number in (
        ("many", 7),
        ("one", 1),
    ):  # no multiple of the processes, and fewer than they are
        want = multihead.load_table(folder / f"{name}.alone.json")
        assert want.meta["documents"] == number
        for rank in (0, 1):
            got = multihead.load_table(folder / f"{name}.{rank}.json")
            assert got.meta == want.meta and got.reasons == want.reasons and got.heads == want.heads
            assert got.sums.keys() == want.sums.keys()
            for column in want.sums:
                np.testing.assert_allclose(
                    got.sums[column], want.sums[column], rtol=1e-12, atol=1e-300, err_msg=column
                )


def test_one_that_fails_ends_all_with_its_message(folder: Path) -> None:
    assert (folder / "error.1").read_text() == "the disk is gone"
    assert (
        folder / "error.0"
    ).read_text() == "another process failed: rank 1 of 2: OSError: the disk is gone"


def test_only_the_first_prints_and_writes(folder: Path) -> None:
    printed = (folder / "stdout").read_text()
    assert printed.count("wrote") == 1 and printed.count("7 documents") == 1
    assert multihead.load_table(folder / "heads.json").meta["documents"] == 7
    left = sorted(path.name for path in folder.iterdir() if "progress" in path.name)
    assert left == [
        "many.progress",
        "many.progress.1",
        "one.progress",
        "one.progress.1",
    ]  # those of the command are gone


def test_words() -> None:
    model, tokenizer = multihead.load_builtin()
    with pytest.raises(
        ValueError,
        match=r"distributed=True, but there is no process group.*torchrun --nproc-per-node",
    ):
        multihead.read(model, "a text", tokenizer=tokenizer, distributed=True)
    SingleProcess().check()
