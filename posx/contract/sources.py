"""Digests of the code of a user's classes: a run belongs to the code that it was trained with.

The digest of a class covers its source and all code of the user's files that it reaches. These are base classes,
functions that its methods call, with defaults and decorators, and the values that they read. Code that these reach
counts in turn. Comments, docstrings, formatting and unrelated code of the same files do not count. Names that are
looked up as text (`getattr`, `exec`) are not followed, nor is the code of posx, of Python and of installed packages.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Set
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Types that hold a function, and the attributes that say which. Others hold it as `__wrapped__`, such as jax.jit's.
_HOLDERS = {
    property: ("fget",),
    functools.cached_property: ("func",),
    MethodType: ("__func__", "__self__"),
    **dict.fromkeys((functools.partial, functools.partialmethod), ("func", "args", "keywords")),
}

#: Attributes of an object with `__wrapped__` that hold functions: that of jax.custom_vjp has its gradient beside it.
_WRAPPED = ("__wrapped__", "fwd", "bwd", "jvp", "vmap_rule")

#: The digests of the classes seen so far.
_DIGESTS: dict[type, str] = {}


def source_digest(cls: type) -> str:
    """Return 12 hexadecimal digits for the code that `cls` reaches; "" for a class of posx.

    Code and values are read at the first call, so make it when the class is imported. A class without source, such as
    one from `exec`, is digested in its compiled form, which depends on the version of Python.
    """
    if cls not in _DIGESTS:
        own = _top(cls.__module__)
        form = "" if own == _top(__name__) else repr(_Reached(own).form(cls))
        _DIGESTS[cls] = hashlib.sha256(form.encode()).hexdigest()[:12] if form else ""
    return _DIGESTS[cls]


def _top(module: str) -> str:
    return module.partition(".")[0]


class _Reached:
    """The forms of values, equal in every process: code by its syntax, data by its contents."""

    def __init__(self, own: str):
        self.own = own  # the package of the class, followed even if it is installed
        self.seen: dict[int, tuple[int, Any]] = {}  # (number, value) by id, of values kept alive so that ids stay

    def form(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, ModuleType):
            return value.__name__  # attributes are followed when they are read
        if id(value) in self.seen:
            return f"seen {self.seen[id(value)][0]}"
        if isinstance(value, Mapping | list | tuple):
            self.seen[id(value)] = -1, value  # it may hold itself; afterwards equal values may be one object or two
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            form = [(repr(key), self.form(inner)) for key, inner in items]
            del self.seen[id(value)]
            return sorted(form) if isinstance(value, Mapping) else form
        if isinstance(value, Set):
            return sorted(map(repr, value))
        self.seen[id(value)] = len(self.seen), value
        if isinstance(value, type):
            return self._class_form(value)
        if isinstance(value, FunctionType):
            return self._function_form(value)
        return self._object_form(value)

    def _object_form(self, value: Any) -> Any:
        kind = type(value)
        names = _HOLDERS.get(kind) or [
            name for name in _WRAPPED if hasattr(value, "__wrapped__") and hasattr(value, name)
        ]
        if names:
            return [kind.__name__, *(self.form(getattr(value, name)) for name in names)]
        if hasattr(value, "__array__"):
            array = np.asarray(value)
            return [array.dtype.str, array.shape, array.tobytes()]
        if isinstance(value, SimpleNamespace) or self._is_own(kind.__module__):
            return [self.form(kind), self.form(object.__getstate__(value))]  # its dictionary and slots
        return [kind.__qualname__, *self._stored_forms(value)]

    def _stored_forms(self, value: Any) -> list[Any]:
        """Return the forms of what pickle stores of a value; [] for a path, which moves, and if pickle refuses it."""
        with contextlib.suppress(Exception):
            stored = () if isinstance(value, os.PathLike) else value.__reduce_ex__(2)
            parts = (stored,) if isinstance(stored, str) else stored[1:]
            return [self.form(list(part) if isinstance(part, Iterator) else part) for part in parts]
        return []

    def _class_form(self, cls: type) -> Any:
        if not self._is_own(cls.__module__):
            return f"{_top(cls.__module__)} {cls.__qualname__}"
        members = {name: member for name, member in sorted(vars(cls).items()) if _is_written(name, member)}
        return [_source(cls), [self.form(base) for base in cls.__mro__[1:]], self.form(members)]

    def _function_form(self, function: FunctionType) -> Any:
        wrapped = getattr(function, "__wrapped__", None)
        if not self._is_own(str(function.__globals__.get("__name__"))):
            return f"{_top(function.__module__)} {function.__qualname__}" if wrapped is None else self.form(wrapped)
        given = [function.__defaults__, function.__kwdefaults__, wrapped]
        read = [
            (name, self.form(value)) for name, value in sorted(self._read_names(function), key=lambda pair: pair[0])
        ]
        return [_source(function.__code__), [self.form(value) for value in given], read]

    def _read_names(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield the globals, closed-over variables and attributes of the user's modules that a function reads."""
        steps = [step for code in _codes(function.__code__) for step in dis.get_instructions(code)]
        read = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        attributes = {step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")}
        values = {name: function.__globals__[name] for name in read if name in function.__globals__}
        package = str(function.__globals__.get("__package__") or "")
        for name in {step.argval for step in steps if step.opname == "IMPORT_NAME"}:
            if (module := self._import_module(name, package)) is not None:
                values[name] = module
        values |= zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True)
        todo, done = list(values.items()), set()
        while todo:
            name, value = todo.pop()
            yield name, value
            if isinstance(value, ModuleType) and value not in done and self._is_own(value.__name__):
                done.add(value)
                todo += [(f"{name}.{each}", getattr(value, each)) for each in attributes if hasattr(value, each)]

    def _import_module(self, name: str, package: str) -> ModuleType | None:
        """Return a module that a function imports when it runs, None if it is not the user's or cannot be imported."""
        for full in (name, f"{package}.{name}" if package else ""):
            if full in sys.modules:
                return sys.modules[full]
            try:
                spec = importlib.util.find_spec(full) if full else None
                if spec and self._is_own(full, str(spec.origin)):
                    return importlib.import_module(full)
            except Exception:  # the user's code: the import fails again when the function runs
                continue
        return None

    def _is_own(self, module: str, file: str = "") -> bool:
        """Return whether a module is the user's: not of posx, of Python, or of another installed package."""
        if _top(module) in (_top(__name__), "builtins", *(sys.stdlib_module_names - {"__main__"})):
            return False
        file = file or str(getattr(sys.modules.get(module), "__file__", ""))
        return _top(module) == self.own or not ("site-packages" in file or "dist-packages" in file)


def _is_written(name: str, member: Any) -> bool:
    """Return whether the user wrote a member of a class. Python and `dataclass` add others."""
    if not (name.startswith("__") and name.endswith("__")):
        return True
    if not isinstance(member, FunctionType) or member.__module__ == "dataclasses":
        return False
    return inspect.unwrap(member).__code__.co_filename != "<string>"


def _content(cell: CellType) -> Any:
    """Return the content of a cell of a closure, None if it is empty."""
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


def _source(thing: Any) -> Any:
    """Return the syntax of a class or a compiled function, or the compiled form if there is no source."""
    try:
        return _syntax(ast.parse(textwrap.dedent(inspect.getsource(thing))))
    except (OSError, TypeError, SyntaxError):
        codes = _codes(thing) if isinstance(thing, CodeType) else ()  # methods are digested as members
        return [(code.co_code, code.co_names, code.co_varnames, _constants(code.co_consts)) for code in codes]


def _constants(values: Iterable[Any]) -> list[Any]:
    """Return the constants of a compiled function but for inner functions, in a form that all processes share."""
    held = (value for value in values if not isinstance(value, CodeType))
    return [
        _constants(sorted(x, key=repr) if isinstance(x, Set) else x) if isinstance(x, tuple | Set) else repr(x)
        for x in held
    ]


def _syntax(node: Any) -> Any:
    """Return a piece of syntax without docstrings, in a form that all versions of Python share."""
    if isinstance(node, list):
        return [_syntax(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: _syntax(value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind")}
    return type(node).__name__, {name: form for name, form in fields.items() if form not in ("None", [])}


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
