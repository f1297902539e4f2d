"""transformers, one thread at a time and without its messages."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

__all__ = ["quiet"]

# While transformers opens, builds or saves a model it replaces initialisers and the default dtype
# of the whole process: of two threads that open models at once, one finds weights missing.
_ALONE = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' messages in this thread and its progress bars, and keep other threads from
    entering: `load` reports what matters in them.
    """
    from transformers.utils import logging as settings

    with _ALONE:
        settings.get_verbosity()  # which sets the handlers up
        roots = [settings.get_logger("transformers"), *map(logging.getLogger, ("huggingface_hub",))]
        handlers = [h for logger in (*roots, logging.getLogger()) for h in logger.handlers]
        this_thread = _Hide(threading.get_ident())
        bars = settings.is_progress_bar_enabled()
        for handler in handlers:
            handler.addFilter(this_thread)
        settings.disable_progress_bar()
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(this_thread)
            if bars:
                settings.enable_progress_bar()


class _Hide(logging.Filter):
    """Drop the records of one thread."""

    def __init__(self, thread: int) -> None:
        super().__init__()
        self.thread = thread

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread
