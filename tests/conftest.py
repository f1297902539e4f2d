"""What all tests share: the real checkpoints, a browser, and draws that repeat."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

if os.environ.get(
    "PYTEST_XDIST_WORKER"
):  # a process a core, so one thread each; before torch is there
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
REQUIRE_BROWSER = os.environ.get("MULTIHEAD_REQUIRE_BROWSER") == "1"

# The same draws in every CI run: a change is judged by what it does, not by luck. No deadline
# anywhere, because a
# first call loads libraries and a shared machine stalls.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The marks say what a test needs; whoever uses a fixture that needs it gets the mark."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "browser" in fixtures:
            item.add_marker("browser")
        if {"minilm_dir", "smollm2_gguf"} & set(fixtures):
            item.add_marker("models")
    # Slow tests first, so that the last minute isn't one process's alone.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", ()) if "browser" in r.keywords]
    if skipped and not CHROMIUM:
        terminalreporter.write_line(
            f"NOT TESTED IN A BROWSER: {len(skipped)} tests skipped, because there is no Chromium"
            " on this machine (Debian, Ubuntu: apt-get install chromium).",
            red=True,
            bold=True,
        )


def _model(name: str) -> Path:
    path = Path(os.environ.get("MULTIHEAD_MODELS", ROOT / "models")) / name
    if not path.exists():
        # Not a skip: these tests would otherwise run only where somebody remembered to fetch the
        # models.
        pytest.fail(
            f"{path} is missing; run: python scripts/fetch_models.py (`make test` does)",
            pytrace=False,
        )
    return path


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The folder of all-MiniLM-L6-v2: a BERT of 6 layers of 12 heads, safetensors."""
    return _model("all-MiniLM-L6-v2")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct: 30 layers, 9 query heads over 3 key/value heads."""
    return _model("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium, driven by playwright; `browser.new_context(offline=True).new_page()` has
    no network.
    """
    if not CHROMIUM:
        message = "no Chromium on this machine (Debian, Ubuntu: apt-get install chromium)"
        pytest.fail(message, pytrace=False) if REQUIRE_BROWSER else pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, which is what a container usually runs as.
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def made() -> SimpleNamespace:
    """Makers of synthetic tables and maps."""
    import made_tables

    return SimpleNamespace(
        table=made_tables.make_table,
        maps=made_tables.make_maps,
        heads=made_tables.make_heads,
        hostile=made_tables.HOSTILE,
    )
