"""Runs position encodings of released libraries on the golden vectors, and writes the table of README.md.

python -m experiments.golden.audit          # writes outcomes.jsonl, prints the table; README.md lists the packages
python -m experiments.golden.audit table    # prints the table of the stored outcomes
"""

import importlib.metadata
import json
import math
import pathlib
import sys
import tempfile

OUTCOMES = pathlib.Path(__file__).with_name("outcomes.jsonl")
DTYPES = ("float32", "bfloat16")
#: Families whose vectors are rotated by the library itself, so that their type matters.
ROTATED = ("rope", "mrope")


def audit():
    """Return (library, version, implementation, dtype, family, case, error, passed) of every case as dictionaries."""
    import torch

    from experiments.golden import layouts, of_lucidrains, of_others, of_transformers
    from golden import build, run

    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        build.write(folder)
        vectors = run.load(folder)
    rows = []
    for library, implementation, adapters in of_transformers.PEERS + of_lucidrains.PEERS + of_others.PEERS:
        facts = {"library": library, "version": importlib.metadata.version(library), "implementation": implementation}
        for layouts.given.dtype in DTYPES:
            for family, adapter in adapters.items():
                if layouts.given.dtype == "float32" or family.startswith(ROTATED):
                    found = run.check({family: vectors[family]}, adapter, layouts.given.dtype)
                    rows += [facts | outcome(layouts.given.dtype, *row) for row in found]
    return rows


def outcome(dtype, family, case, error, passed, catches):
    """Return a row of `golden.run.check` as a dictionary. An error that is not finite is None."""
    error = float(f"{error:.2e}") if math.isfinite(error) else None
    return {"dtype": dtype, "family": family, "case": case, "error": error, "passed": bool(passed)}


def load():
    """Return the stored outcomes."""
    return [json.loads(line) for line in OUTCOMES.read_text(encoding="utf-8").splitlines()]


def failures(rows):
    """Return the failures of an implementation in words: whole families, then cases with their families."""
    families = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    lost = [name for name, own in families.items() if not any(row["passed"] for row in own)]
    by_case = {}
    for row in rows:
        if not row["passed"] and row["family"] not in lost:
            by_case.setdefault(row["case"], []).append(row["family"])
    words = [f"all of `{name}`" for name in lost]
    words += [f"`{case}`" + (f" ({len(own)} families)" if len(own) > 1 else "") for case, own in by_case.items()]
    return ", ".join(words)


def table(rows):
    """Return the table of outcomes as lines of Markdown."""
    lines = ["| library | implementation | float32 | bfloat16 | fails in float32 | fails in bfloat16 |"]
    lines.append("|---|---|---:|---:|---|---|")
    groups = {}
    for row in rows:
        groups.setdefault((f"{row['library']} {row['version']}", row["implementation"]), []).append(row)
    for names, own in groups.items():
        by_dtype = [[row for row in own if row["dtype"] == dtype] for dtype in DTYPES]
        passed = [f"{sum(row['passed'] for row in part)} / {len(part)}" if part else "" for part in by_dtype]
        lines.append(f"| {' | '.join([*names, *passed, *map(failures, by_dtype)])} |")
    return lines


def main(words):
    """Write the outcomes unless only the table is asked for, and print the table."""
    if words not in ([], ["table"]):
        sys.exit("Write python -m experiments.golden.audit, or python -m experiments.golden.audit table.")
    if not words:
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in audit())
        OUTCOMES.write_text(text, encoding="utf-8")
    print("\n".join(table(load())))


if __name__ == "__main__":
    main(sys.argv[1:])
