"""What a fresh interpreter loads: `multihead --help` and a bad argument answer without torch and
transformers.
"""

from __future__ import annotations

import ast
import inspect
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
# Each floor imports only from floors below it.
FLOORS = [
    ("errors",),
    ("ops",),
    ("layers",),
    ("models",),
    ("data",),
    ("reader", "costs"),
    ("pruning",),
    ("report",),
    ("checks",),
    ("testing", "masks"),
    ("cli", "__main__"),
]


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
        ["read", "--out", "/nowhere/x.html"],
        ["read", "--also", "coping"],
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


def test_every_public_name_is_there_and_documented() -> None:
    for name in multihead.__all__:
        assert inspect.getdoc(getattr(multihead, name)), name
    assert set(multihead.__all__) <= set(dir(multihead))
    with pytest.raises(AttributeError, match="attribute raed"):
        _ = multihead.raed


def test_imports_go_downward() -> None:
    floor = {name: n for n, names in enumerate(FLOORS) for name in names}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[0] == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == len(parts):
                target = (node.module or node.names[0].name).partition(".")[0]
                assert floor[target] <= floor[parts[0]], (
                    f"{'/'.join(parts)} imports {target}, which stands above it"
                )
