"""Digests of the source code of a user's own encodings: a run belongs to the code that it was trained with.

The digest of a class covers its statement and, from there on, every module-level statement of the user's own files that
it reaches by name: base classes, functions, constants, and what these use in turn. Comments, docstrings, formatting and
unrelated code in the same files do not count.

Python can do what no reader of source can follow: names that are looked up as text (getattr, globals, exec), values
read from files or environment variables, compiled extensions. Changes of such things are not seen, and neither are
those of installed packages (other than the one that holds the class) and of posx.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import sys
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

#: The first word of posx's own modules.
_POSX = __name__.partition(".")[0]

#: Of the classes that were seen.
_DIGESTS: dict[type, str] = {}

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def source_digest(cls: type) -> str:
    """Return 12 hexadecimal digits for the code of `cls`; "" for a class of posx itself.

    The files are read at the first call, so the earlier it comes after the import, the surer they are what was loaded.
    A class without a file is read as `inspect` finds it, alone. If there is no source at all, the compiled methods are
    digested; that digest changes with the version of Python.
    """
    if cls not in _DIGESTS:
        _DIGESTS[cls] = _digest(cls)
    return _DIGESTS[cls]


def _digest(cls: type) -> str:
    if _top(cls.__module__) == _POSX:
        return ""
    try:
        found: Any = _reached(cls)
    except (OSError, TypeError, SyntaxError, ValueError):
        found = None
    if not found:
        found = [_compiled(part) for part in cls.__mro__ if _top(part.__module__) not in (_POSX, "builtins")]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _reached(cls: type) -> dict[str, list[Any]]:
    """{"module.name": forms of the statements that bind it} of all that `cls` reaches in the user's own files."""
    files = _Files(_top(cls.__module__))
    todo = [place for part in cls.__mro__ for place in files.places_of(part)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    found: dict[str, list[Any]] = {}
    while todo:
        if (place := todo.pop()) in seen:
            continue
        seen.add(place)
        module, chain = place
        file, (name, *rest) = files.get(module), chain or ("",)
        if name and _may_be_package(module):
            todo.append((f"{module}.{name}", tuple(rest)))
        if file is None:
            continue
        if not name:  # the module as a whole
            todo += [(module, (each,)) for each in file.bound]
        elif name not in file.bound:
            todo += [(origin, chain) for origin in file.stars]
        else:
            found[f"{module}.{name}"] = [form for form, _ in file.bound[name]]
            todo += [(module, used) for _, chains in file.bound[name] for used in chains]
            todo += [(origin, (*filter(None, [there]), *rest)) for origin, there in file.imports.get(name, ())]
    return found


class _Files:
    """The user's own files, by the names of their modules. own: the package of the class, followed where installed."""

    def __init__(self, own: str):
        self.own = own
        self.known: dict[str, _File | None] = {}

    def get(self, module: str) -> _File | None:
        """Return the file of `module`; None if it is not the user's own."""
        if module not in self.known:
            path = None if _is_given(module) else _path(module)
            installed = path is not None and {"site-packages", "dist-packages"} & set(path.parts)
            if path is None or path.suffix != ".py" or (installed and _top(module) != self.own):
                self.known[module] = None
            else:
                with tokenize.open(path) as text:
                    self.known[module] = _File(module, path.stem == "__init__", ast.parse(text.read()))
        return self.known[module]

    def places_of(self, cls: type) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield where `cls` is bound: by its own name, or by the names of what a function made."""
        module, (name, *inner) = cls.__module__, cls.__qualname__.split(".")
        if _is_given(module):
            return
        if self.get(module) is None:  # a notebook, or typed in
            self.known[module] = _File(module, False, ast.parse(textwrap.dedent(inspect.getsource(cls))))
        yield module, (name,)
        if "<locals>" in inner and module in sys.modules:
            yield from ((module, (alias,)) for alias, value in vars(sys.modules[module]).items() if value is cls)


def _is_given(module: str) -> bool:
    """Whether a module is of posx or of Python."""
    return module != "__main__" and _top(module) in (_POSX, *sys.stdlib_module_names)


def _may_be_package(module: str) -> bool:
    return not _is_given(module) and (module not in sys.modules or hasattr(sys.modules[module], "__path__"))


class _File:
    """The statements of one file.

    bound: {name: [(form, chains of names that it uses)]} of the module-level statements that bind or change the name.
    imports: {name: [(module, name there or "")]}. stars: modules imported whole.
    """

    def __init__(self, module: str, is_package: bool, tree: ast.Module):
        self.bound: dict[str, list[tuple[Any, set[tuple[str, ...]]]]] = defaultdict(list)
        self.imports: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.stars: list[str] = []
        package = module if is_package else module.rpartition(".")[0]
        for node in ast.walk(tree):  # those within functions too
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._add_import(node, package)
        for statement in tree.body:
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                uses = _Uses()
                uses.visit(statement)
                for name in _bound_by(statement):
                    self.bound[name].append((_form(statement), uses.chains))

    def _add_import(self, node: ast.Import | ast.ImportFrom, package: str) -> None:
        """Each name of an import counts alone: others beside it may come and go."""
        origin = ""
        if isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            origin = importlib.util.resolve_name(dots + (node.module or ""), package) if dots else node.module or ""
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(origin)
                continue
            whole = isinstance(node, ast.Import)
            name = alias.asname or (_top(alias.name) if whole else alias.name)
            place = (alias.name if alias.asname else name, "") if whole else (origin, alias.name)
            self.imports[name].append(place)
            self.bound[name].append((["import", *place], set()))


def _path(module: str) -> Path | None:
    loaded = sys.modules.get(module)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return Path(file) if file else None
    try:  # imported within a function that has not run yet
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def _bound_by(statement: ast.stmt) -> set[str]:
    """The names that a module-level statement binds, or whose values it may change."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.If) and "__name__" in _names(statement.test):
        return set()  # not run where the file is imported
    names: set[str] = set()
    for node in _own_scope(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Expr) or isinstance(getattr(node, "ctx", None), ast.Store):
            names |= _names(node)
    return names


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _own_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node`, those within functions, classes and comprehensions left out."""
    for inner in ast.iter_child_nodes(node):
        yield inner
        if not isinstance(inner, (*_SCOPES, *_COMPREHENSIONS)):
            yield from _own_scope(inner)


class _Uses(ast.NodeVisitor):
    """The chains of names that a statement takes from its module: ("helper", "slope") of helper.slope(x)."""

    def __init__(self) -> None:
        self.chains: set[tuple[str, ...]] = set()
        self.local: list[set[str]] = []

    def visit_Name(self, node: ast.Name) -> None:
        self._add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self._add(inner.id, *reversed(names))
        else:
            self.visit(inner)

    def _add(self, root: str, *names: str) -> None:
        if not any(root in local for local in self.local):
            self.chains.add((root, *names))

    def visit_FunctionDef(self, node: Any) -> None:
        arguments = node.args
        for outside in (*getattr(node, "decorator_list", ()), *arguments.defaults, *arguments.kw_defaults):
            if outside is not None:
                self.visit(outside)
        own = {inner.arg for inner in ast.walk(arguments) if isinstance(inner, ast.arg)}
        free: set[str] = set()
        for inner in _own_scope(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                own.add(inner.id)
            elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(inner.name)
            elif isinstance(inner, ast.Global | ast.Nonlocal):
                free |= set(inner.names)
        self.local.append(own - free)
        for inner in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(inner)
        self.local.pop()

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef


def _form(node: Any) -> Any:
    """Return what a piece of syntax says, the same in all versions of Python, without docstrings."""
    if isinstance(node, list):
        return [_form(item) for item in node if not (isinstance(item, ast.Pass) or _is_text(item))]
    if not isinstance(node, ast.AST):
        return repr(node)
    skipped = ("ctx", "kind", "type_comment")
    fields = {name: _form(value) for name, value in ast.iter_fields(node) if name not in skipped}
    return [type(node).__name__, {name: form for name, form in fields.items() if form not in ("None", [])}]


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _compiled(cls: type) -> list[Any]:
    """Return the compiled methods of `cls`, and its other members as they print."""

    def told(thing: Any) -> Any:
        code = thing if isinstance(thing, CodeType) else getattr(thing, "__code__", None)
        if code is None:
            return repr(thing) if isinstance(thing, bool | int | float | str | tuple | None) else type(thing).__name__
        return [code.co_code.hex(), code.co_names, [told(constant) for constant in code.co_consts]]

    members = sorted(vars(cls).items())
    return [(name, told(member)) for name, member in members if hasattr(member, "__code__") or name[:2] != "__"]
