"""The layout of the package: short files, one place for a name, and a test file for every module.

The lists of exceptions only get shorter: an entry that is no longer needed fails the test too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import multihead

SOURCE = Path(multihead.__file__).parent
TESTS = Path(__file__).parent
LONGEST = 500  # lines of a file
SHORT = 40  # lines up to which a module needs no test file of its name

LONG_FILES: set[str] = set()
WITHOUT_TESTS: set[str] = set()


def files() -> dict[str, str]:
    """Source of every module by path, such as "reader/table"."""
    return {
        path.relative_to(SOURCE).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


def require(found: Iterable[str], exceptions: set[str], what: str) -> None:
    """Fail with the names that are new, and with exceptions that have become unnecessary."""
    new, gone = sorted(set(found) - exceptions), sorted(exceptions - set(found))
    assert not new, f"{what}: {new}"
    assert not gone, f"no longer: {gone}; take them off the list of exceptions"


def test_files_are_short() -> None:
    long = [name for name, text in files().items() if text.count("\n") > LONGEST]
    require(long, LONG_FILES, f"files of more than {LONGEST} lines; split them by topic")


def test_public_names_are_defined_once() -> None:
    places: dict[str, set[str]] = defaultdict(set)  # overloads are one function
    for name, text in files().items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                places[node.name].add(name)
    twice = {
        f"{name}: {', '.join(sorted(where))}"
        for name, where in places.items()
        if len(where) > 1 and not name.startswith("_") and name != "main"
    }
    assert not twice, f"names that are defined twice: {sorted(twice)}"


def test_every_module_has_a_docstring() -> None:
    bare = [
        name
        for name, text in files().items()
        if not (ast.get_docstring(ast.parse(text)) or "").strip()
    ]
    assert bare == []


def test_every_module_has_a_test_file_of_its_name() -> None:
    """`tests/reader/.../test_table.py` for `reader/table.py`."""
    missing = set()
    for name, text in files().items():
        area, _, module = name.rpartition("/")
        folder = TESTS / area.partition("/")[0]
        if module.startswith("__") or text.count("\n") <= SHORT:
            continue
        if not any(folder.rglob(f"test_{module}.py")):
            missing.add(name)
    require(missing, WITHOUT_TESTS, "modules without a test file of their name")


def test_every_test_file_is_about_something_that_exists() -> None:
    """The folders of tests are those of the package, and a few more."""
    more = {"conformance", "fixtures", "oracles", "benchmarks", "scripts", "sweep", "fuzz"}
    folders = {
        path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert folders - more <= packages
