"""The public names: documented, with errors, shapes and an example that runs (pytest runs them all).

A public name is one that an `__init__.pyi` lists, or `multihead.masks` and the other modules that
are meant to be imported from.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

import multihead

PLACES = [
    "",
    "masks",
    "errors",
    "testing",
    "ops",
    "layers",
    "models",
    "data",
    "reader",
    "pruning",
    "costs",
    "checks",
    "data",
]
SHAPE = re.compile(r"\[[\w*./+ -]+(, ?[\w*./+ -]+)*\]")

# Functions without arguments that could be wrong.
RAISE_NOTHING = {
    *("errors.did_you_mean", "models.register_attention", "models.suspend"),
    *("reader.list_statistics",),
}


def public() -> dict[str, Any]:
    """Classes, functions and objects that are called, by the shortest name under which they are public."""
    found: dict[int, tuple[str, Any]] = {}
    for place in PLACES:
        module = importlib.import_module(f"multihead.{place}".rstrip("."))
        for name in sorted(module.__all__):
            value = getattr(module, name)
            is_called = callable(value) and type(value).__module__.startswith("multihead.")
            if inspect.isclass(value) or inspect.isfunction(value) or is_called:
                found.setdefault(id(value), (f"{place}.{name}".lstrip("."), value))
    return dict(found.values())


PUBLIC = public()


def docs(value: Any) -> str:
    """The docstring of a function, or of a class with its constructor and public methods."""
    texts = [inspect.getdoc(value) or ""]
    if inspect.isclass(value):
        texts += [
            inspect.getdoc(member) or ""
            for name, member in vars(value).items()
            if name == "__init__" or (not name.startswith("_") and callable(member))
        ]
    return "\n".join(texts)


def takes_tensors(value: Any) -> bool:
    """Whether an argument or the result of a function, or of a module's forward, is a tensor."""
    target = value.__dict__.get("forward") if inspect.isclass(value) else value
    target = target if inspect.isclass(value) or inspect.isfunction(value) else value.__call__
    if target is None:
        return False
    return any("Tensor" in str(hint) for hint in getattr(target, "__annotations__", {}).values())


def test_the_front_door_is_small() -> None:
    modules = {name for name in multihead.__all__ if inspect.ismodule(getattr(multihead, name))}
    assert len(set(multihead.__all__) - modules) <= 25
    assert set(multihead.__all__) <= set(dir(multihead))


def test_a_typo_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="attribute raed"):
        _ = multihead.raed


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_documented(name: str) -> None:
    value, text = PUBLIC[name], docs(PUBLIC[name])
    first = (inspect.getdoc(value) or "").partition("\n")[0]
    assert first and not re.match(r"(What|That|Which|So|Such)\b", first), f"first line: {first!r}"
    assert ">>> " in text, "an example is missing"
    if inspect.isfunction(value) and name not in RAISE_NOTHING:
        assert "Raises:" in text, "a section 'Raises:' is missing"
    if takes_tensors(value):
        assert SHAPE.search(text), "shapes, such as [B, H, L, E], are missing"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_classes_that_a_public_function_takes_or_returns_are_public(name: str) -> None:
    value = PUBLIC[name]
    if not inspect.isfunction(value):
        return
    known = {v.__name__ for v in PUBLIC.values() if inspect.isclass(v)}
    module = inspect.getmodule(value)
    assert module is not None
    own = {
        word
        for hint in value.__annotations__.values()
        for word in re.findall(r"[A-Z]\w+", str(hint))
        if getattr(getattr(module, word, None), "__module__", "").startswith("multihead.")
        and inspect.isclass(getattr(module, word))
        and not getattr(getattr(module, word), "_is_protocol", False)
    }
    assert own <= known, f"not public: {sorted(own - known)}"
