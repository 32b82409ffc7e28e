"""The tables of a study's README."""

import functools

from experiments.tables import HERE


def of_markdown(text):
    """Return the cells of a Markdown table, without its head."""
    return [split(line) for line in text.splitlines()[2:]]


@functools.cache
def bodies(study):
    """Return the cells of each table of a study's README, without their heads."""
    return tables_of((HERE / study / "README.md").read_text())


def tables_of(text):
    """Return the cells of each table in a text of Markdown, without their heads."""
    tables, lines = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            tables.append([split(line) for line in lines[2:]])
            lines = []
    return tables


def split(line):
    """Return the cells of a line of Markdown."""
    return [cell.strip() for cell in line.strip()[1:-1].replace("\\|", "\0").split("|")]
