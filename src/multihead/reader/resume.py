"""The progress of a reading in a file: the sums so far, and the documents that are in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..io import ResumeFile
from .table import Table

__all__ = ["ReadingProgress", "file_of"]


class ReadingProgress:
    """The file of one reading, and the state of an earlier one that it holds.

    Args:
        path: the file; see `multihead.io.ResumeFile`.
        settings: what the numbers depend on, by name.

    Raises:
        MultiheadError: the file is damaged, or of another model, other settings or another version
            of this library.
    """

    def __init__(self, path: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        self.file = ResumeFile(path, "reading", settings)
        self.state: dict[str, Any] | None = None  # of the file, None where there is none
        self.table: Table | None = None
        if (saved := self.file.load(_parse)) is not None:
            self.state, self.table = saved

    def verify(self, taken: int, digest: str) -> None:
        """Raise where the documents up to the end of the saved chunk aren't those of the file."""
        assert self.state is not None
        if (taken, digest) != (self.state["taken"], self.state["digest"]):
            raise self.file.error(
                f"was written for other texts (the first {self.state['taken']:,} documents differ,"
                " or there are fewer or more)"
            )

    def is_due(self) -> bool:
        """Whether it is time for another write."""
        return self.file.is_due()

    def save(self, state: dict[str, Any], table: Table) -> None:
        """Write the sums so far."""
        self.file.save({**state, "table": json.loads(table.to_json())})


def _parse(state: dict[str, Any], tensors: object) -> tuple[dict[str, Any], Table]:
    table = Table.from_json(json.dumps(state.pop("table")))
    for name in ("before", "number", "done", "taken"):
        state[name] += 0  # TypeError unless a number
    state["digest"] += ""
    return state, table


def file_of(path: str | os.PathLike[str], rank: int) -> Path:
    """The file of one process: the first has the one that was named, the others one next to it."""
    return Path(f"{os.fspath(path)}.{rank}" if rank else path)
