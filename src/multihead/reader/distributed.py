"""Reading in several processes: each reads a part of the documents, and their tables are added at
the end.
"""

from __future__ import annotations

import os
import time
from typing import Any

from ..errors import MultiheadError
from .table import Table


class SingleProcess:
    """The only process."""

    rank, size = 0, 1

    def check(self) -> None:
        """Raise if another process has failed."""

    def fail(self, error: BaseException) -> None:
        """Report an error of this process to the others."""

    def add(self, table: Table) -> Table:
        """The sum over all processes, in all of them."""
        return table


class ProcessGroup(SingleProcess):
    """One of the processes of torch.distributed's default group, whatever its backend.

    Each process reports through the group's store that it is ready, or that it failed. So a failure
    ends the others at their next pass, rather than leaving them to wait in a collective.

    Raises:
        MultiheadError: no process group.
    """

    readings = 0  # in this process: each has separate keys in the store

    def __init__(self) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise MultiheadError(
                "distributed=True, but there is no process group: call"
                " torch.distributed.init_process_group() first, or use the command: torchrun"
                " --nproc-per-node=N -m multihead read ..."
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        prefix: Any = dist.PrefixStore  # type: ignore[attr-defined]
        self.store = prefix(
            f"multihead/{ProcessGroup.readings}", dist.distributed_c10d._get_default_store()
        )
        ProcessGroup.readings += 1

    def check(self) -> None:
        if self.store.check(["failed"]):
            raise MultiheadError(f"another process failed: {self.store.get('failed').decode()}")

    def fail(self, error: BaseException) -> None:
        if not self.store.check(["failed"]):
            self.store.set(
                "failed", f"rank {self.rank} of {self.size}: {type(error).__name__}: {error}"
            )

    def add(self, table: Table) -> Table:
        import torch.distributed as dist

        self.store.set(f"ready{self.rank}", "")
        while not self.store.check([f"ready{rank}" for rank in range(self.size)]):
            self.check()
            time.sleep(0.02)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, table.to_json())
        first, *rest = map(Table.from_json, found)
        return sum(rest, first)


def join() -> tuple[int, int, int]:
    """Join the processes that torchrun started: rank, number of processes, rank on this machine;
    (0, 1, 0) without torchrun.

    Tables are in main memory, so the processes communicate by gloo, whatever device their models
    are on.
    """
    rank, size, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    if size > 1:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
    return rank, size, local


def leave() -> None:
    """Leave the group once all processes are done, so that the first has written its files."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
