"""What the reading tap shows watchers, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multihead
from multihead.errors import ReadingError
from multihead.models import Tap, instrument
from small import IDS, llama


class Watcher:
    """Rows of weights that were seen, by site, and the passes around them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin_pass(self) -> None:
        self.log.append("begin")

    def end_pass(self) -> None:
        self.log.append("end")

    def at(self, site: Any, call: Any, text: Any) -> Any:
        if site.label == "L1":
            return None
        self.log.append(site.label)
        return lambda block: self.log.append(f"{block.rows.stop - block.rows.start} rows")


def test_watchers_see_blocks_of_the_sites_that_they_ask_for() -> None:
    model = llama()
    with torch.no_grad(), multihead.reading(model) as reading:
        reading.watchers.append(watcher := Watcher())
        model(IDS)
        with reading.aside():
            model(IDS)  # no watcher sees it
    assert watcher.log == ["begin", "L0", "12 rows", "end"]


def test_passes_that_do_not_count_are_watched() -> None:
    model = llama()
    with torch.no_grad(), multihead.reading(model) as reading:
        reading.watchers.append(watcher := Watcher())
        with reading.passes(counting=False):
            model(IDS)
        table = reading.table()
    assert watcher.log.count("12 rows") == 1
    assert table.meta["documents"] == 0 and not table.sums


def test_settings_are_as_before_after_an_error() -> None:
    model = llama()
    with multihead.reading(model) as reading:
        with pytest.raises(ZeroDivisionError), reading.passes(counting=False, prefix="probe:"):
            raise ZeroDivisionError
        assert reading.settings.counting and reading.settings.prefix == ""


def test_a_tap_inside_a_reading_that_hides_the_attention_is_refused() -> None:
    """It doesn't call `compute`, so there are no weights that the reading could see."""

    class Hide(Tap):
        def attend(self, site: Any, call: Any, compute: Any) -> torch.Tensor:
            return call.q.new_zeros(call.q.shape)

    model = llama()
    with (
        torch.no_grad(),
        pytest.raises(ReadingError, match=r"model\.layers\.0\.self_attn .* its weights can't be"),
        multihead.reading(model, verify=False),
        instrument(model, Hide()),
    ):
        model(IDS)
