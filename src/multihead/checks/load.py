"""FILE.py:NAME, as the command takes it: the file is run, and what it calls by that name is
checked.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import MultiheadError


def load(where: str, args: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The module, object or function, and further arguments for its calls.

    `args` are written as in a call, `64, num_heads=4`: those of a class make one of it, those of a
    function go with each call.
    """
    path, colon, name = where.rpartition(":")
    if not colon or not path or not name:
        raise MultiheadError(
            f"{where}: expected FILE.py:NAME, a file and the name in it of a module, class or"
            " function"
        )
    file = Path(path)
    if not file.is_file():
        raise MultiheadError(f"{path}: there is no such file")
    names = _run(file)
    if name not in names:
        public = [
            n
            for n, v in names.items()
            if not n.startswith("_") and not isinstance(v, types.ModuleType)
        ]
        near = difflib.get_close_matches(name, public, 1)
        own = [
            n
            for n in public
            if getattr(names[n], "__module__", "").startswith("_multihead_checked")
            or not callable(names[n])
        ] or public
        raise MultiheadError(
            f"{path} has no {name!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(own[:12])}")
        )
    positional, keyword = _arguments(args)
    target = names[name]
    if inspect.isclass(target) or (
        inspect.isfunction(target) and not inspect.signature(target).parameters
    ):
        return (
            _made(target, positional, keyword, args),
            {},
        )  # a class, or what makes one and takes nothing
    if positional:
        raise MultiheadError(
            f"--args {args!r}: {name} is called with inputs that a check makes, so give further"
            " arguments by name, as in --args num_heads=4"
        )
    return target, keyword


def _run(file: Path) -> dict[str, Any]:
    module = types.ModuleType(f"_multihead_checked_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses look for their module
    sys.path.insert(0, str(file.absolute().parent))
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        line = next(
            (
                f"line {frame.tb_lineno}: "
                for frame in _frames(error.__traceback__)
                if frame.tb_frame.f_code.co_filename == str(file)
            ),
            "",
        )
        raise MultiheadError(
            f"{file} can't be run: {line}{type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(file.absolute().parent))
    return vars(module)


def _frames(trace: types.TracebackType | None) -> list[types.TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found[::-1]


def _arguments(args: str | None) -> tuple[list[Any], dict[str, Any]]:
    try:
        call = ast.parse(f"f({args or ''})", mode="eval").body
        if not isinstance(call, ast.Call):
            raise MultiheadError("not the arguments of a call")
        return [ast.literal_eval(a) for a in call.args], {
            str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg
        }
    except (SyntaxError, ValueError) as error:
        raise MultiheadError(
            f"--args {args!r}: expected arguments as in a call, numbers, strings, lists: --args"
            f" '64, num_heads=4' ({error})"
        ) from None


def _made(
    target: Callable[..., Any], positional: list[Any], keyword: dict[str, Any], args: str | None
) -> Any:
    try:
        return target(*positional, **keyword)
    except Exception as error:
        try:
            needs = ", ".join(map(str, inspect.signature(target).parameters.values()))
        except (TypeError, ValueError):
            needs = "..."
        what = "" if args is None else f" with --args {args!r}"
        name = getattr(target, "__name__", target)
        raise MultiheadError(
            f"{name}({needs}) can't be made{what}: {type(error).__name__}: {error}. Say --args 'its"
            " arguments', as in a call"
        ) from error
