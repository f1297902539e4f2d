"""Targets of the command: `FILE.py:NAME`, and arguments as in a call."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from ..errors import MultiheadError
from ..user_code import load_name


def load_target(where: str, args: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The module, object or function of FILE.py:NAME, and further arguments for its calls.

    A class is instantiated with `args`, written as in a call, `64, num_heads=4`; a function without
    parameters is called; those of another function are passed on with every call.

    Raises:
        FileNotFoundError: there is no such file.
        MultiheadError: the file can't be run or has no such name; the arguments can't be parsed or
            don't fit.
    """
    positional, keyword = _parse_arguments(args)
    target = load_name(where)
    is_factory = inspect.isfunction(target) and not inspect.signature(target).parameters
    if inspect.isclass(target) or is_factory:
        return _instantiate(target, positional, keyword, args), {}
    if positional:
        raise MultiheadError(
            f"--args {args!r}: the inputs of {where.rpartition(':')[2]} come from the check; pass"
            " further arguments by name, as in --args num_heads=4"
        )
    return target, keyword


def _parse_arguments(args: str | None) -> tuple[list[Any], dict[str, Any]]:
    try:
        call = ast.parse(f"f({args or ''})", mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("not the arguments of a call")
        keyword = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
        return [ast.literal_eval(a) for a in call.args], keyword
    except (SyntaxError, ValueError) as error:
        raise MultiheadError(
            f"--args {args!r}: expected arguments as in a call, numbers, strings, lists: --args"
            f" '64, num_heads=4' ({error})"
        ) from None


def _instantiate(
    target: Any, positional: list[Any], keyword: dict[str, Any], args: str | None
) -> Any:
    try:
        return target(*positional, **keyword)
    except (Exception, SystemExit) as error:
        try:
            needed = ", ".join(map(str, inspect.signature(target).parameters.values()))
        except (TypeError, ValueError):
            needed = "..."
        by = "" if args is None else f" with --args {args!r}"
        raise MultiheadError(
            f"{getattr(target, '__name__', target)}({needed}) can't be created{by}:"
            f" {type(error).__name__}: {error}. Pass --args 'its arguments', as in a call"
        ) from error
