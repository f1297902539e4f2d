"""Models open in several threads at once, and only the thread that opens one is silenced."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import logging as settings

import multihead
from multihead.models.quiet import quiet


def in_threads(work: Callable[[int], object], count: int = 3) -> list[object]:
    """The results of as many threads that begin at the same moment."""
    gate = threading.Barrier(count)

    def one(number: int) -> object:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_models_open_in_three_threads_at_once(llama: Path) -> None:
    alone = multihead.load().state_dict(), multihead.load(llama).state_dict()
    for _ in range(2):
        opened = in_threads(lambda n: multihead.load(llama if n == 1 else None).state_dict())
        for number, weights in enumerate(opened):
            for name, weight in alone[number == 1].items():
                assert torch.equal(weights[name], weight), name  # type: ignore[index]


def test_models_are_read_in_three_threads_at_once() -> None:
    text = "The cat sat on the mat and the cat sat on the hat."

    def read(_: int) -> multihead.Table:
        model, tokenizer = multihead.load_builtin()
        return multihead.read(model, text, tokenizer=tokenizer)

    first, *rest = [read(0), *in_threads(read)]
    for table in rest:
        for column in first.columns:
            np.testing.assert_array_equal(table.value(column), first.value(column))


def test_other_threads_still_write(capsys: pytest.CaptureFixture[str]) -> None:
    logger = settings.get_logger("transformers.models.x")
    before = settings.get_verbosity()
    done = threading.Event()

    def other() -> None:
        logger.warning("from another thread")
        print("standard error", file=sys.stderr)
        done.set()

    handler = logging.StreamHandler(sys.stderr)
    settings.add_handler(handler)
    try:
        with quiet():
            logger.warning("from this thread")
            threading.Thread(target=other).start()
            assert done.wait(10)
        logger.warning("afterwards")
    finally:
        settings.remove_handler(handler)
    err = capsys.readouterr().err
    assert "from another thread" in err and "standard error" in err and "afterwards" in err
    assert "from this thread" not in err
    assert settings.get_verbosity() == before and not handler.filters


def test_it_nests_and_restores() -> None:
    bars = settings.is_progress_bar_enabled()
    with quiet(), quiet():
        assert not settings.is_progress_bar_enabled()
    assert settings.is_progress_bar_enabled() == bars
