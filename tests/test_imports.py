"""Imports: `multihead --help` and a bad argument answer without torch and transformers; modules import
only from floors below, and no two of them each other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import multihead

SOURCE = Path(multihead.__file__).parent
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "jinja2",
    "rich",
    "tokenizers",
    "safetensors",
    "pandas",
    "matplotlib",
    "numba",
}
# Each floor imports only from the floors below it; two folders of one floor don't import each other.
FLOORS = [
    ("outside", "version"),
    ("errors",),
    ("io", "terminal", "user_code"),
    ("ops",),
    ("masks",),
    ("layers",),
    ("models",),
    ("data",),
    ("reader",),
    ("pruning", "costs", "checks"),
    ("report", "testing"),
    ("cli",),
    ("__main__",),
]
FLOOR = {name: n for n, names in enumerate(FLOORS) for name in names}
# The checks judge attention from outside, so they know as little of the library as possible.
FOR_CHECKS = {
    "errors",
    "outside",
    "io",
    "terminal",
    "user_code",
    "ops",
    "layers",
    "models.names",
    "checks",
}


def modules() -> dict[str, Path]:
    """Modules of the package by name, without "multihead." in front."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path, known: dict[str, Path], code: str = "") -> set[str]:
    """Modules of the package that a module imports anywhere: relative or absolute, at its top, in a
    function, or under TYPE_CHECKING.
    """
    package = ("multihead." + name).rstrip(".").split(".")
    if path.name != "__init__.py":
        package.pop()
    targets = set()
    for node in ast.walk(ast.parse(code or path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{target}.{alias.name}"
                is_module = inner.removeprefix("multihead.") in known
                targets.add(inner if is_module else target)
    inside = {t for t in targets if t.partition(".")[0] == "multihead"}
    return {t.removeprefix("multihead").removeprefix(".") for t in inside} - {name}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports_of(name, path, known) for name, path in known.items()}


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of two or more modules each of which reaches all the others by imports."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    reached = {name: reach(name) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
        if name in reached[name]
    }
    return [set(group) for group in groups]


def loaded(code: str) -> set[str]:
    """Top-level packages that some code loads."""
    code = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint(*{{m.partition('.')[0]"
        " for m in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["read", "--help"],
        ["read", "--oops"],
        ["nothing"],
        ["read", "--page", "/nowhere/x.html"],
        ["check", "a.py:f", "--page", "/nowhere/x.html"],
        ["read", "--statistic", "coping"],
        ["statistics"],
    ],
    ids=" ".join,
)
def test_help_and_bad_arguments_load_nothing_heavy(arguments: list[str]) -> None:
    found = loaded(
        f"sys.argv = ['multihead', *{arguments}]; from multihead.cli import main; main()"
    )
    assert "typer" in found and not found & HEAVY


def test_the_front_door_loads_nothing() -> None:
    assert not loaded("import multihead") & (HEAVY | {"typer"})


@pytest.mark.parametrize(
    "name", ["ops.functional", "layers.attention", "reader.table", "reader.statistics"]
)
def test_transformers_is_only_for_models(name: str) -> None:
    assert "transformers" not in loaded(f"import multihead.{name}")


def upward(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Imports that the floors don't allow, as pairs of modules."""
    wrong = set()
    for name, targets in graph.items():
        here = name.partition(".")[0]
        for target in targets if here else ():
            there = target.partition(".")[0]
            is_down = target and (there == here or FLOOR[there] < FLOOR[here])
            is_known = target in FOR_CHECKS or there in FOR_CHECKS
            if not is_down or (here == "checks" and not is_known):
                wrong.add((name, target))
    return wrong


def test_imports_go_downward(graph: dict[str, set[str]]) -> None:
    assert upward(graph) == set()


def test_no_two_modules_import_each_other(graph: dict[str, set[str]]) -> None:
    assert cycles(graph) == []


@pytest.mark.parametrize(
    ("name", "code", "wrong"),
    [
        ("ops.masks", "from ..reader.read import read", "reader.read"),
        ("ops.masks", "def f():\n    from ..reader import read", "reader.read"),
        ("ops.masks", "from multihead.reader.read import read", "reader.read"),
        ("ops.masks", "import multihead.reader.read", "reader.read"),
        ("ops.masks", "if TYPE_CHECKING:\n    from ..models.site import Site", "models.site"),
        ("ops.masks", "from multihead import attention", ""),
        ("pruning.prune", "from ..costs.cost import cost", "costs.cost"),
        ("checks.run", "from ..models.site import Site", "models.site"),
    ],
)
def test_an_import_upward_is_seen(name: str, code: str, wrong: str) -> None:
    known = modules()
    assert (name, wrong) in upward({name: imports_of(name, known[name], known, code)})


def test_a_cycle_is_seen() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [{"a", "b", "c"}]


def test_no_bare_value_errors() -> None:
    """A `ValueError` of ours would look like a bug of ours on the command line."""
    places = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ValueError"
    ]
    assert len(places) <= 1, places  # one is raised and caught in checks/load.py
