"""Tabulate the keys of the configs that posx imports, for `docs/guides/keys.md`. `python -m docs.keys` prints them."""

from __future__ import annotations

from collections.abc import Iterable

from posx.lab.runs.families import FAMILIES, FOREIGN
from posx.lab.runs.family import Family
from posx.lab.runs.keys import IRRELEVANT, NEEDED, REASONS


def tables() -> str:
    """Return the generated part of the page: counts, the keys of each family, and those of all families."""
    counts = [[f"`{name}`", *map(str, _counts(family))] for name, family in FAMILIES.items()]
    own = [
        [f"`{name}`", _read(family), _needed(family), _listed(family.keys.irrelevant)]
        for name, family in FAMILIES.items()
    ]
    shared = [[about, _listed(keys.split())] for about, keys in IRRELEVANT.items()]
    asked = [[why, _listed(keys.split())] for why, keys in REASONS.items()]
    return "\n\n".join([
        _table(("`model_type`", "read", "irrelevant", "refused by name"), counts),
        "## Keys of each family",
        _table(("`model_type`", "read", "read, with one value", "irrelevant"), own),
        "## Irrelevant in every family",
        _table(("about", "keys"), shared),
        "## Refused in every family that does not read them",
        _table(("the key asks for", "keys"), asked),
    ])  # fmt: skip


def _counts(family: Family) -> tuple[int, int, int]:
    """Return how many keys a family reads, holds for irrelevant, and refuses by name."""
    kinds = {**dict.fromkeys(FOREIGN, "refused"), **family.keys.kinds}
    read, irrelevant, refused = ([*kinds.values()].count(kind) for kind in ("read", "irrelevant", "refused"))
    return read, irrelevant, refused


def _read(family: Family) -> str:
    return ", ".join(
        [_listed(["model_type", *family.keys.reads]), *(f"`{key}` if it agrees" for key in family.keys.repeats)]
    )


def _needed(family: Family) -> str:
    return ", ".join(f"`{key}={value!r}`" for key, value in {**NEEDED, **family.keys.needed}.items())


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys) or "-"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    rows = [list(row) for row in (head, *rows)]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(tables())
