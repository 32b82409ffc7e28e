"""The rules of the layout that a reader relies on: who may import whom, and what never happens in an encoding."""

import ast
from pathlib import Path

import posx

ROOT = Path(posx.__file__).parent
FILES = {path.relative_to(ROOT).with_suffix("").as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}

#: Lower layers first; a file imports only from its own layer and those before it.
LAYERS = [
    ("errors", "fields", "interrupts", "compiler"), ("encodings/",), ("attention/", "positions"),
    ("model_config", "cross_entropy", "parallel", "testing/"),
    ("model", "data/", "progress"), ("compile_cache",),
    ("evaluation/", "config"), ("schema_1",), ("stored",),
    ("training/board", "training/checkpoints", "training/optimizer", "training/step", "training/ceiling"),
    ("training/__init__",),
    ("runs", "generate"), ("training/loop", "evaluation/run"), ("runner",),
    ("plots/", "flags", "sweep", "doctor", "__init__"), ("cli",),
]  # fmt: skip


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def targets(tree):
    """Files of posx that are imported."""
    for word in imports(tree):
        target = "/".join(word.split(".")[1:]) if word.startswith("posx.") else ""
        target = target if target in FILES else f"{target}/__init__"
        if target in FILES:
            yield target


def layer(name):
    fits = [(len(prefix), n) for n, names in enumerate(LAYERS) for prefix in names if _within(name, prefix)]
    return max(fits)[1] if fits else None


def _within(name, prefix):
    return name == prefix or (prefix.endswith("/") and name.startswith(prefix))


def test_only_the_model_imports_flax():
    users = {name for name, tree in FILES.items() if any(word.split(".")[0] == "flax" for word in imports(tree))}
    assert users == {"model"}


def test_dependencies_point_one_way():
    wrong = []
    for name, tree in FILES.items():
        assert layer(name) is not None, f"{name} has no place in LAYERS"
        wrong += [f"{name} imports {target}" for target in targets(tree) if layer(target) > layer(name)]
    assert not wrong


def test_import_posx_brings_no_checks():
    found, todo = set(), ["__init__"]
    while todo:
        found.add(name := todo.pop())
        todo += set(targets(FILES[name])) - found
    assert "model" in found and not any(name.startswith("testing/") for name in found)


def test_stored_rows_are_all_that_curves_need():
    """Curves, ratios and tables are drawn from files; only the pictures of the encodings compute anything."""
    for name in ("plots/rows", "plots/curves", "plots/tables", "plots/positions"):
        assert not any(word.startswith(("jax", "posx.training", "posx.model")) for word in imports(FILES[name])), name


def test_nothing_private_of_jax():
    for name, tree in FILES.items():
        assert not any(word.startswith("jax._src") for word in imports(tree)), name
