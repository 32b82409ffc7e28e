"""The table of the study of pictures.

python -m experiments.tables collect runs/pictures_cpu > experiments/pictures/runs.jsonl
python -m experiments.pictures.pictures
"""

from collections.abc import Sequence

from experiments.tables import Run, by_setting, cell, load, markdown, rows_of

#: Lengths in patches: sides of 8, 16 and 24.
LENGTHS = (64, 256, 576)


def table(runs: Sequence[Run]) -> str:
    """Return the right share of hidden patches and their loss by encoding and side, as Markdown."""
    body = []
    for name, members in by_setting(runs).items():
        rows = rows_of(members)
        line = [f"`{name}`", str(len(members))]
        for metric in ("accuracy", "nll"):
            for length in LENGTHS:
                values = [row[metric] for row in rows if row["eval_len"] == length and row["status"] == "ok"]
                line.append(cell(values) if values else "undefined")
        body.append(line)
    head = [f"{what}, {round(length**0.5)} x {round(length**0.5)}" for what in ("right", "nll") for length in LENGTHS]
    return markdown(["encoding", "seeds", *head], sorted(body, key=lambda line: line[2], reverse=True))


if __name__ == "__main__":
    print(table(load("pictures")))
