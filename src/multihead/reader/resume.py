"""Progress of a reading in a file, so that one that was killed goes on: the sums so far, and which
documents are in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import MultiheadError
from ..version import __version__
from .table import Table

FORMAT, VERSION = "multihead-progress", 1
# between two writes at least; and so long that writing takes a twentieth of the time at most
SECONDS = 20.0
SAMPLE = 64  # numbers of each parameter by which a model is known again
ASIDE = {
    "dtype",
    "torch_dtype",
    "transformers_version",
}  # of a config: what its model computes is said elsewhere


class Progress:
    """The file of one reading. What it was written for must be what it is gone on with, or it is
    refused.

    Args:
        path: the file; written beside it and renamed, so that it is whole at any moment.
        settings: what the numbers depend on, by name.

    Raises:
        ValueError: the file is damaged, or of another model, other settings or another version;
            says what to do.
    """

    def __init__(self, path: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir():
            raise MultiheadError(
                f"resume={str(path)!r}: the folder {str(self.path.absolute().parent)!r} doesn't"
                " exist; make it first"
            )
        if self.path.is_dir():
            raise MultiheadError(f"resume={str(path)!r} is a folder; give the name of a file in it")
        self.settings = json.loads(json.dumps({"multihead": __version__} | settings))
        self.state: dict[str, Any] | None = None  # of the file found, None: there is none
        self.table: Table | None = None
        self._written, self._took = time.monotonic(), 0.0
        if self.path.exists():
            self._load()

    def _refuse(self, why: str) -> ValueError:
        return ValueError(
            f"resume={str(self.path)!r} {why}, so the reading can't go on from it; delete that file"
            " to begin anew"
        )

    def _load(self) -> None:
        try:
            checksum, _, body = self.path.read_bytes().partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != checksum:
                raise MultiheadError("its checksum is not that of its content")
            data = json.loads(body)
            if (data["format"], data["version"]) != (FORMAT, VERSION):
                raise MultiheadError(f"format {data['format']!r}, version {data['version']}")
            given, state, table = (
                data["settings"],
                data["state"],
                Table.from_json(json.dumps(data["table"])),
            )
            _ = (
                [state[name] + 0 for name in ("before", "number", "done", "taken")],
                state["digest"] + "",
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._refuse(f"is damaged or not a progress file ({error})") from error
        odd = [
            name
            for name in self.settings.keys() | given.keys()
            if self.settings.get(name) != given.get(name)
        ]
        if odd:
            told = ", ".join(
                f"{name} {_short(given.get(name))}, now {_short(self.settings.get(name))}"
                for name in sorted(odd)
            )
            raise self._refuse(
                f"was written for another reading ({told}); give what was given then, or it is"
                " no use"
            )
        self.state, self.table = state, table

    def verify(self, taken: int, digest: str) -> None:
        """The documents up to the end of the chunk in which the reading was: the same?"""
        assert self.state is not None
        if (taken, digest) != (self.state["taken"], self.state["digest"]):
            raise self._refuse(
                f"was written for other texts (the first {self.state['taken']:,} documents aren't"
                " those of then, or there are fewer or more)"
            )

    def due(self) -> bool:
        """Whether it is time for another write."""
        return time.monotonic() - self._written >= max(SECONDS, 20 * self._took)

    def save(self, state: dict[str, Any], table: Callable[[], Table]) -> None:
        """Write what was read so far."""
        start = time.monotonic()
        body = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "settings": self.settings,
                "state": state,
                "table": json.loads(table().to_json()),
            },
            allow_nan=False,
        ).encode()
        part = self.path.with_name(f"{self.path.name}.part")
        with part.open("wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path)
        self._written = time.monotonic()
        self._took = self._written - start


def file_of(path: str | os.PathLike[str], rank: int) -> Path:
    """Each process keeps its own progress: the first in the file named, the others beside it."""
    return Path(f"{os.fspath(path)}.{rank}" if rank else path)


def fingerprint(model: nn.Module) -> str:
    """By which a model is known again: its parameters' names, shapes, types and some of their
    numbers, and its config.
    """
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().flatten()
        if (
            type(flat) is Tensor and not flat.is_meta
        ):  # of what lies elsewhere (offloaded, in shards) the shape must do
            found.update(
                flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].double().cpu().numpy().tobytes()
            )
    found.update(told(getattr(model, "config", None)).encode())
    return found.hexdigest()[:16]


def told(config: Any) -> str:
    """What a config says of how its model computes: the same for the same model, wherever it was
    loaded from and by whom.
    """

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                str(k): bare(v)
                for k, v in value.items()
                if k not in ASIDE and not str(k).startswith("_")
            }
        return [bare(v) for v in value] if isinstance(value, (list, tuple)) else value

    return (
        json.dumps(bare(config.to_dict()), sort_keys=True, default=str)
        if hasattr(config, "to_dict")
        else ""
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
