"""Digests of the code of a user's own encodings: a run belongs to the code that it was trained with.

The digest of a class covers its source and all that it reaches in the user's own files: base classes, functions that
its methods call, the values of constants that they read, and what these reach in turn. Comments, docstrings, formatting
and unrelated code of the same files do not count. Names that are looked up as text (`getattr`, `exec`) are not
followed, nor is the code of posx, of Python and of installed packages.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


#: The digests of the classes seen so far.
_DIGESTS: dict[type, str] = {}


def source_digest(cls: type) -> str:
    """Return 12 hexadecimal digits for the code that `cls` reaches; "" for a class of posx.

    Code and values are read at the first call: make it when the class is imported. A class without source, as one made
    by `exec`, is digested in its compiled form, which changes with the version of Python.
    """
    if cls not in _DIGESTS:
        _DIGESTS[cls] = _digest(cls)
    return _DIGESTS[cls]


def _digest(cls: type) -> str:
    own = _top(cls.__module__)
    if own == _top(__name__):
        return ""
    found: dict[str, Any] = {}
    todo: list[Any] = [cls]
    while todo:
        thing = _unwrapped(todo.pop())
        name = f"{thing.__module__}.{thing.__qualname__}"
        file = str(getattr(sys.modules.get(thing.__module__), "__file__", ""))
        if name not in found and _is_own(thing.__module__, own, file):
            found[name], reached = _code(thing)
            todo += reached
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:12]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_own(module: str, own: str, file: str) -> bool:
    """Whether a module is the user's, and not of posx, of Python, or of an installed package other than `own`."""
    if _top(module) in (_top(__name__), "builtins", *(sys.stdlib_module_names - {"__main__"})):
        return False
    return _top(module) == own or not ("site-packages" in file or "dist-packages" in file)


def _unwrapped(thing: Any) -> Any:
    """Return the function behind `functools.wraps`, `jax.jit` and the like."""
    return inspect.unwrap(thing) if callable(thing) else thing


def _code(thing: Any) -> tuple[Any, list[Any]]:
    """Return what a function or class says, and the functions and classes that it reaches."""
    reached: list[Any] = []
    said: list[Any] = []
    for function in _functions(thing):
        for name, value in _names_read(function):
            said.append((name, _said(value, reached)))
    if isinstance(thing, type):
        reached += thing.__mro__[1:]
        said += [(name, _said(value, reached)) for name, value in vars(thing).items() if not name.startswith("__")]
    return (_source(thing), sorted(said, key=repr)), reached


def _functions(thing: Any) -> Iterator[FunctionType]:
    """Yield the functions that a function or class is made of."""
    if isinstance(thing, FunctionType):
        yield thing
    for member in vars(thing).values() if isinstance(thing, type) else ():
        for function in (member, *(getattr(member, name, None) for name in ("fget", "func", "__func__"))):
            function = _unwrapped(function)
            if isinstance(function, FunctionType) and not _is_generated(function):
                yield function


def _is_generated(function: FunctionType) -> bool:
    """Whether a method is one that `dataclass` adds, which differs between versions of Python."""
    written = function.__name__.startswith("__") and function.__code__.co_filename == "<string>"
    return written or function.__module__ == "dataclasses"


def _names_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals, closed-over variables and attributes of modules that a function reads, with their values."""
    instructions = [step for code in _codes(function.__code__) for step in dis.get_instructions(code)]
    read = {step.argval for step in instructions if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = {step.argval for step in instructions if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")}
    imported = {step.argval for step in instructions if step.opname == "IMPORT_NAME"}
    values = {name: function.__globals__[name] for name in read if name in function.__globals__}
    package = str(function.__globals__.get("__package__") or "")
    values |= {name: module for name in imported if (module := _imported(name, package)) is not None}
    yield from values.items()
    yield from zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True)
    for name, module in values.items():
        if isinstance(module, ModuleType):
            yield from ((f"{name}.{each}", getattr(module, each)) for each in attributes if hasattr(module, each))


def _imported(name: str, package: str) -> ModuleType | None:
    """Return a module that a function imports when it runs; None if it is not the user's, or cannot be imported."""
    for full in (name, f"{package}.{name}" if package else ""):
        if full in sys.modules:
            return sys.modules[full]
        try:
            spec = importlib.util.find_spec(full) if full else None
            if spec and _is_own(full, "", str(spec.origin)):
                return importlib.import_module(full)
        except Exception:  # the user's own code: the import fails when the function runs, or is caught there
            continue
    return None


def _content(cell: CellType) -> Any:
    """Return what a cell of a closure holds, None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a compiled function and those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _said(value: Any, reached: list[Any]) -> Any:
    """Return a form of `value` that is the same in every process. Adds functions and classes in it to `reached`."""
    value = _unwrapped(value)
    if isinstance(value, FunctionType | type):
        reached.append(value)
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, dict):
        return sorted((repr(key), _said(inner, reached)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return [_said(inner, reached) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, functools.partial):
        return [_said(inner, reached) for inner in (value.func, value.args, value.keywords)]
    if hasattr(value, "__array__") and not isinstance(value, ModuleType):
        array = np.asarray(value)
        return [array.dtype.str, array.shape, array.tobytes()]
    return type(value).__qualname__


def _source(thing: Any) -> Any:
    """Return the syntax of a function or class, or its compiled form if it has no source."""
    try:
        return _syntax(ast.parse(textwrap.dedent(inspect.getsource(thing))))
    except (OSError, TypeError, SyntaxError):
        codes = [code for function in _functions(thing) for code in _codes(function.__code__)]
        return [(code.co_code, code.co_names, [c for c in code.co_consts if isinstance(c, _PLAIN)]) for code in codes]


def _syntax(node: Any) -> Any:
    """Return what a piece of syntax says, without docstrings: the same in all versions of Python."""
    if isinstance(node, list):
        return [_syntax(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: _syntax(value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind")}
    return type(node).__name__, {name: form for name, form in fields.items() if form not in ("None", [])}


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
