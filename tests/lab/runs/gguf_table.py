"""Print the table of GGUF's keys in docs/guides/models.md, and write the names that the package gguf knows.

python -m tests.lab.runs.gguf_table          print the table
python -m tests.lab.runs.gguf_table --write  write gguf_keys.json again, with the names of the installed package
"""

import importlib.metadata
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from posx.lab.runs.gguf_keys import ARCHITECTURES, CONFIG_KEYS, IRRELEVANT, NEUTRAL, READ, key_kind, neutral_values

FILE = Path(__file__).parent / "gguf_keys.json"
#: Keys that the package does not name: of older files, of other tools, and of the reader itself.
MORE = ("{arch}.rope.scale_linear", "general.source.huggingface.repository", "quantize.imatrix.file", "GGUF.version")
KINDS = ("read", "neutral", "irrelevant", "refused")


def installed():
    """Return the names of keys in the installed package gguf, sorted."""
    import gguf

    def names(group):
        for name, value in vars(group).items():
            if isinstance(value, type):
                yield from names(value)
            elif isinstance(value, str) and not name.startswith("__"):
                yield value

    return sorted(set(names(gguf.constants.Keys)))


def known():
    """Return the names of keys that are stored."""
    return json.loads(FILE.read_text(encoding="utf-8"))["keys"]


def kinds(key):
    """Return the kind of a key in files of each architecture."""
    return tuple(key_kind(key.replace("{arch}", architecture), architecture) for architecture in ARCHITECTURES)


def counts():
    """Return {architecture: {kind: how many keys have it}}."""
    every = [kinds(key) for key in (*known(), *MORE)]
    return {
        architecture: {kind: [row[n] for row in every].count(kind) for kind in KINDS}
        for n, architecture in enumerate(ARCHITECTURES)
    }


def table():
    """Return the lines of the table: keys of equal kinds share a row, and the refused ones are counted."""
    rows = {}
    for key in (*known(), *MORE):
        rows.setdefault(kinds(key), []).append(key)
    lines = [f"| keys | {' | '.join(ARCHITECTURES)} |", "|---" * (1 + len(ARCHITECTURES)) + "|"]
    for found in sorted(rows, key=lambda row: [KINDS.index(kind) for kind in row]):
        keys = dict.fromkeys(_shown(key) for key in rows[found])
        text = f"{len(keys)} others" if set(found) == {"refused"} else ", ".join(keys)
        lines.append(f"| {text} | {' | '.join(found)} |")
    for kind in KINDS:
        lines.append(f"| count: {kind} | {' | '.join(str(one[kind]) for one in counts().values())} |")
    return lines


def _shown(key):
    """Return a key with its neutral values, or the pattern that makes it irrelevant."""
    name = key.removeprefix("{arch}.")
    if set(kinds(key)) == {"irrelevant"}:
        return next(f"`{one.removeprefix('{arch}.')}`" for one in IRRELEVANT if fnmatchcase(key, one))
    if "neutral" not in kinds(key):
        return f"`{name}`"
    fits = {
        neutral_values(key.replace("{arch}", one), one)
        for one, kind in zip(ARCHITECTURES, kinds(key), strict=True)
        if kind == "neutral"
    }
    return f"`{name}` ({', '.join(' or '.join(map(str, values)) for values in sorted(fits))})"


def main(words):
    if words == ["--write"]:
        found = {"gguf": importlib.metadata.version("gguf"), "keys": installed()}
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table()))


#: Every name in the tables, so that a test can find those that no file has.
NAMED = {*READ, *NEUTRAL} | {f"{{arch}}.{key}" for keys in CONFIG_KEYS.values() for key in keys}

if __name__ == "__main__":
    main(sys.argv[1:])
