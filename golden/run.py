"""Run your attention on the vectors: python -m golden.run FOLDER MODULE:NAME [float32 or bfloat16].

NAME is a function of a case, or a dictionary of functions by family. A function returns the outputs. It may return a
dictionary of outputs, weights, grad_q and grad_k, or None for a case that it does not compute. The guide
docs/guides/golden.md lists the keys of a case.
"""

import importlib
import json
import pathlib
import sys

import numpy as np

#: Keys with one row for each query on this axis. Rows of queries that see nothing are not compared.
ROWS = {"outputs": 0, "weights": 1, "grad_q": 0}
WHOLE = {"q_pos", "k_pos", "q_idx", "k_idx", "q_segment", "k_segment"}
WORDS = {"name", "catches", "tolerance", "mask"}
RESULTS = ("outputs", "weights", "grad_q", "grad_k")


def load(folder):
    """Return the cases of each family, {family: [case]}, with NumPy arrays and the keys of the file in each case."""
    files = sorted(pathlib.Path(folder).glob("*.json"))
    return {path.stem: cases(json.loads(path.read_text(encoding="utf-8"))) for path in files}


def cases(file):
    """Return the cases of a file that was read as JSON."""
    head = {key: each for key, each in file.items() if key != "cases"}
    head["arrays"] = {name: np.array(array, np.float64) for name, array in file["arrays"].items()}
    return [head | {key: as_array(key, each) for key, each in case.items()} for case in file["cases"]]


def as_array(key, given):
    """Return lists of a case as an array of the key's type, and its words as they are."""
    kind = bool if key == "visible" else np.int64 if key in WHOLE else np.float64
    return given if key in WORDS else np.array(given, kind)


def error(case, computed):
    """Return the largest difference from a case, over all arrays that it has.

    It is infinity for NaN, for another shape, and without outputs.
    """
    computed = computed if isinstance(computed, dict) else {"outputs": computed}
    if unknown := [key for key in computed if key not in RESULTS]:
        sys.exit(f"{case['name']}: the result {unknown[0]!r} is unknown. A function may return {', '.join(RESULTS)}.")
    worst = 0.0 if "outputs" in computed else np.inf
    for key in computed.keys() & case.keys():
        wanted, array = case[key], np.asarray(computed[key], np.float64)
        if array.shape != wanted.shape:
            return np.inf
        if key in ROWS:
            seeing = np.flatnonzero(case["visible"].any(axis=1))
            wanted, array = (np.take(each, seeing, ROWS[key]) for each in (wanted, array))
        worst = max(worst, float(np.nan_to_num(np.abs(array - wanted), nan=np.inf).max()))
    return worst


def check(families, attention, dtype="float32"):
    """Return (family, case, error, passed, faults that the case catches) of each case that `attention` computes."""
    if unknown := [name for name in (attention if isinstance(attention, dict) else ()) if name not in families]:
        sys.exit(f"there is no family {unknown[0]!r}. The folder has {', '.join(families)}.")
    rows = []
    for family, of_family in families.items():
        function = attention.get(family) if isinstance(attention, dict) else attention
        for case in of_family if function else ():
            computed = function(case)
            if computed is not None:
                worst = error(case, computed)
                rows.append((family, case["name"], worst, worst <= case["tolerance"][dtype], case["catches"]))
    return rows


def main(folder, target, dtype="float32"):
    """Print a line for each case. Return 0 if all passed, else 1."""
    module, _, name = target.partition(":")
    rows = check(load(folder), getattr(importlib.import_module(module), name), dtype)
    for family, case, worst, passed, catches in rows:
        line = f"{'passed' if passed else 'FAILED'}  {family:24}{case:14}{worst:9.1e}"
        print(line if passed else f"{line}  {catches}")
    failed = sum(not row[3] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} cases passed" if rows else "No case was computed.")
    return int(failed > 0 or not rows)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("Write python -m golden.run FOLDER MODULE:NAME [float32 or bfloat16].")
    sys.exit(main(*sys.argv[1:]))
