"""Collect the stages of `benchmarks/accelerator.sh` in one file: python -m benchmarks.stages FOLDER.

FOLDER/results.jsonl gets a line for each stage: its name, status, seconds, report and the end of its output.
FOLDER/summary.md gets a table of the stages and the text that each of them printed. A stage that was cut has the table
of what it had measured, and the tests that had failed. Exit code 1: a stage failed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.__main__ import BENCHES
from benchmarks.measure import stored
from benchmarks.report import rows

#: Characters of a stage's output and of its log that are kept.
KEPT = 20_000
#: The line of pytest's -v for a test that failed.
FAILED = re.compile(r"(?:FAILED|ERROR) (tests/\S+)|(tests/\S+) (?:FAILED|ERROR)")


def stages(folder: Path) -> list[dict[str, Any]]:
    """Return all stages that were begun, in that order."""
    found = []
    for path in sorted(folder.glob("*.status"), key=lambda path: path.stat().st_mtime):
        (status, seconds), name = path.read_text().splitlines(), path.stem
        printed, log = (path.with_suffix(suffix).read_text(errors="replace") for suffix in (".txt", ".log"))
        row = {"stage": name, "status": status, "seconds": int(seconds)}
        report = stored(path.with_suffix(".json"))
        if status != "done":
            row |= {"failed": sorted({f"FAILED {a or b}" for a, b in FAILED.findall(printed)}), "log": log[-KEPT:]}
            printed = "\n".join([*row["failed"], table(report) or printed[-KEPT:]])
        found.append(row | {"printed": printed[-KEPT:], "report": report})
    return found


def table(report: dict[str, Any]) -> str:
    """Return the table of a report, also of one that was cut; "" if nothing was measured."""
    measured = report.get("results") or any(group["results"] for group in report.get("groups", ()))
    return BENCHES[report["bench"]].table(report) if measured else ""


def main(folder: Path) -> None:
    found = stages(folder)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    head = rows(["stage", "status", "seconds"], [[row["stage"], row["status"], str(row["seconds"])] for row in found])
    parts = [f"## {row['stage']}\n\n{row['printed'].strip()}\n" for row in found]
    (folder / "summary.md").write_text("\n".join([*head, "", *parts]))
    print("\n".join(head))
    if failed := [row["stage"] for row in found if row["status"] != "done"]:
        raise SystemExit(f"failed: {', '.join(failed)}; {folder}/NAME.log has the reasons")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
