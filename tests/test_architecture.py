"""The rules of the layout that a reader relies on: who may import whom, and what never happens in an encoding."""

import ast
from pathlib import Path

import posx

ROOT = Path(posx.__file__).parent
FILES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in ROOT.rglob("*.py")
}

#: Lower layers first. A room, which is a folder or a file, imports from itself and from the layers before its own. The
#: library does not know the laboratory, `lab`.
LIBRARY = [
    ("errors", "lazy", "notices"),
    ("parsing",),
    ("machine/",),
    ("contract/",),
    ("encodings/", "attention/"),
    ("evaluation/",),
    ("conformance/",),
]
LABORATORY = [
    ("lab/__init__", "lab/interrupts", "lab/progress", "lab/files/"),
    ("lab/machine/", "lab/exits", "lab/positions", "lab/tasks/"),
    ("lab/config/", "lab/cross_entropy", "lab/layers"),
    ("lab/argv/", "lab/model", "lab/data/", "lab/runs/folder"),
    ("lab/generate", "lab/training/"),
    ("lab/runs/",),
    ("lab/results/",),
    ("lab/sweeps/", "lab/plots/", "__init__"),  # for `posx.load`
    ("lab/report/",),
    ("lab/commands/", "lab/lm_eval"),
    ("lab/cli",),
]
LAYERS = [*LIBRARY, *LABORATORY]
#: Packages that the library must not import. A user of `attend` alone then needs JAX and NumPy.
OF_THE_LABORATORY = {
    "absl", "datasets", "filelock", "flax", "matplotlib", "ml_collections", "optax", "orbax", "pandas", "rich",
    "safetensors",
    "tensorboardX", "tokenizers",
}  # fmt: skip


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


def place(name):
    """The layer of a file and its room there."""
    fits = [(len(room), n, room) for n, rooms in enumerate(LAYERS) for room in rooms if _within(name, room)]
    return max(fits)[1:] if fits else None


def _within(name, room):
    return name == room or (room.endswith("/") and name.startswith(room))


def test_only_the_model_imports_flax():
    users = {name for name, tree in FILES.items() if any(word.split(".")[0] == "flax" for word in imports(tree))}
    assert users == {"lab/model"}


def test_dependencies_point_one_way():
    wrong = []
    for name, tree in FILES.items():
        assert place(name) is not None, f"{name} has no place in LAYERS"
        own, room = place(name)
        below = [(layer, other) for layer in range(own) for other in LAYERS[layer]]
        wrong += [f"{name} imports {other}" for other in targets(tree) if place(other) not in [*below, (own, room)]]
    assert not wrong


def test_the_library_does_without_the_laboratory():
    for name, tree in FILES.items():
        if not name.startswith("lab/"):
            roots = {word.split(".")[0] for word in imports(tree)}
            assert not roots & OF_THE_LABORATORY, f"{name} imports {roots & OF_THE_LABORATORY}"


def test_both_roots_keep_what_has_no_room():
    roots = {name for name in FILES if "/" not in name.removeprefix("lab/")}
    assert roots == {room for rooms in LAYERS for room in rooms if "/" not in room.removeprefix("lab/")}


def test_every_room_gives_its_modules_on_access():
    """`posx.machine.devices` works after `import posx`, whatever `posx.machine` itself imports."""
    rooms = {name for name in FILES if name.removeprefix("lab/").count("/") == 1 and name.endswith("/__init__")}
    silent = {name for name in rooms if "__getattr__" not in ast.dump(FILES[name])}
    assert len(rooms) > 10 and not silent


def test_import_posx_brings_no_checks():
    found, todo = set(), ["__init__"]
    while todo:
        found.add(name := todo.pop())
        todo += set(targets(FILES[name])) - found
    assert "lab/model" in found and not any(name.startswith("conformance/") for name in found)


def test_stored_rows_are_all_that_curves_need():
    """Curves, ratios and tables are drawn from files; only the pictures of the encodings compute anything."""
    for name in ("results/table", "results/columns", "plots/curves", "plots/tables", "plots/points"):
        words = imports(FILES[f"lab/{name}"])
        assert not any(word.startswith(("jax", "posx.lab.training", "posx.lab.model")) for word in words), name


def test_nothing_private_of_jax():
    for name, tree in FILES.items():
        assert not any(word.startswith("jax._src") for word in imports(tree)), name


def test_functions_are_short_and_take_few_arguments():
    """`attend` and `evaluate`, which a user calls with keywords, take what they need."""
    free = {("attention/attend", "attend"), ("evaluation/__init__", "evaluate")}
    for name, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (name, node.name) not in free:
                arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                text = ast.get_docstring(node, clean=False) or ""
                lines = node.end_lineno - node.lineno + 1 - len(text.splitlines())
                where = f"{name}: {node.name}"
                assert len([a for a in arguments if a not in ("self", "cls")]) <= 8, f"{where} takes {arguments}"
                assert lines <= 50, f"{where} has {lines} lines"


def _opens_text_without_encoding(call):
    """Whether a call reads or writes text as the locale has it: UTF-8 on one machine, something else on another."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    words = {word.arg: word.value for word in call.keywords}
    if "encoding" in words:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) <= (name == "write_text")
    if name == "open":
        modes = [value.value for value in [*call.args, words.get("mode")] if isinstance(value, ast.Constant)]
        return not any(isinstance(mode, str) and "b" in mode for mode in modes)
    return "universal_newlines" in words or getattr(words.get("text"), "value", None) is True


def test_text_is_read_and_written_as_utf8():
    for name, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert not _opens_text_without_encoding(node), f"{name}.py, line {node.lineno}: encoding is missing"
