"""Generate the pages that repeat what the code and the studies say: the book of encodings, the results, the tables.

`write` makes `docs/encodings` and `docs/results` anew at each build. Git does not track them. A page of the book is
made from the class (definition, fields, facts, picture), from `encodings.toml` (formula in LaTeX, one phrase) and from
the leaderboard's data (measured results, published claims).

Pages that git tracks hold tables of the code too: see `tracked`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from docs.tracked import DIMS, GROUPS, TEXTS, paper, table
from experiments import tables
from experiments.leaderboard import leaderboard
from experiments.tables import HERE, Run, load, over_nope
from posx.contract import Encoding, parts
from posx.encodings import ENCODINGS, build, encoding_name, from_spec
from posx.lab import plots, report
from posx.lab.commands.encodings import column_texts, walk_fields
from posx.machine.guard import start_devices

#: The columns of the leaderboard that the comparison repeats.
COMPARED = ("PPL at L", "R_2", "R_8", "R_16", "1 % horizon", "step")
STUDIES = {
    "train_short_test_long": "The classic ten, to 32 L",
    "leaderboard": "Most of the catalogue, to 16 L",
    "stretch": "Trained RoPE models beyond their length",
    "layers": "RoPE in some layers, windows in some",
    "recipe": "Learning rates of position parameters",
    "variants": "RoPE's base, alone and beside ALiBi",
    "tasks": "Right answers to longer items",
    "encoders": "Encoders on masked tokens",
    "pictures": "Pictures with rows and columns",
    "scaling": "Twelve encodings at two widths: what a smaller model tells",
    "golden": "Other libraries on the golden vectors",
    "cost": "Speed and memory",
    "scale": "One run over several processes",
    "intervals": "Coverage of the intervals",
    "faults": "Provoked faults and their outcomes",
    "quick": "The quickstart's figure",
}
#: The studies that have an interactive page, and the part of their data that it shows.
REPORTS = {"train_short_test_long": "study", "leaderboard": "cells", "variants": ""}
#: {a file of the clone that pages link to: the page of the site that is made of it}.
OWN_PAGES = {
    r"posx/encodings/(\w+)\.py": r"encodings/\1.md",
    r"experiments/(\w+)/README\.md": r"results/\1.md",
    r"catalogue\.md": "encodings/index.md",
}
MEASURED = (
    "Every entry has 4 layers, width 128 and 4 heads, and was trained on windows of L = 64 bytes of novels. "
    "Perplexities are of 262,144 targets in non-overlapping windows: the mean over seeds ± one standard deviation. "
    "R_k = PPL(kL) / PPL(L). The step is its time over NoPE's. [The study](../results/leaderboard.md) has the protocol."
)


def write(docs: Path) -> None:
    """Write the generated pages below `docs`."""
    for name in ("encodings", "results"):
        shutil.rmtree(docs / name, ignore_errors=True)
        (docs / name).mkdir()
    _write_book(docs / "encodings")
    _write_results(docs / "results")


def link(_: Any, page: str, source: list[str]) -> None:
    """Lead the links of a page to the site's own pages of encodings and studies, which a clone does not have."""
    up = "../" * page.count("/")
    for pattern, own in OWN_PAGES.items():
        source[0] = re.sub(rf"\]\((?:\.\./)*{pattern}", rf"]({up}{own}", source[0])


def untyped(_: Any, what: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    """Begin the text of an attribute with an empty line: napoleon takes words before its first colon for a type."""
    if what in ("attribute", "property"):
        lines.insert(0, "")


def plain(_: Any, __: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring, which is plain text.

    Formulas are escaped, indented code is literal, and lists stay.
    """
    found: list[str] = []
    code = False
    for before, line in zip(["", *lines], lines, strict=False):
        starts = line.startswith("    ") and not before.strip() and not line.lstrip().startswith("* ")
        if starts and not code:
            found += ["::", ""]
        code = starts or (code and (line.startswith("    ") or not line.strip()))
        found.append(line if code else _escaped(line))
    lines[:] = found


def _escaped(line: str) -> str:
    pieces = re.split(r"(`[^`]*`)", line)
    return "".join(
        piece if n % 2 else re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", piece) for n, piece in enumerate(pieces)
    )


@functools.cache
def _cells() -> list[Run]:
    return load("leaderboard", "cells")


@functools.cache
def _board() -> dict[str, list[str]]:
    """Return the cells of the leaderboard's table by entry, under "" its headings."""
    text = leaderboard.table(_cells(), over_nope(load("leaderboard", file="steps.jsonl")))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {"": rows[0], **{row[0].strip("`"): row for row in rows[2:]}}


def _write_book(folder: Path) -> None:
    start_devices()
    for name in ENCODINGS:
        encoding = build(name, DIMS)
        (folder / f"{name}.md").write_text(_page(name, encoding), encoding="utf-8")
        for path in plots.picture(name, encoding, DIMS, folder / "pictures"):
            path.rename(path.with_name(name + path.suffix))
    (folder / "index.md").write_text(_index(), encoding="utf-8")


def _page(name: str, encoding: Encoding) -> str:
    text, cls = TEXTS[name], ENCODINGS[name]
    facts = column_texts(encoding, DIMS)
    about = [
        ["type it as", f"`{name}`"],
        ["idea", text["short"]],
        *([label, cell] for label, cell in (facts | {"paper": paper(cls.about.paper)}).items()),
    ]
    sections = [
        f"# {text['title']}",
        table(("", ""), about),
        "## Formula",
        f"```{{math}}\n{text['formula'].strip()}\n```",
        text["symbols"].strip(),
        f"![{text['title']}, drawn from its own code](pictures/{name}.png)",
        f"The picture is computed from the class for {DIMS.num_heads} heads of {DIMS.head_dim} and L = "
        f'{DIMS.train_len}. Draw your own with `posx encodings "{name}" --workdir FOLDER`.',
        "## Why it works, or does not",
        text["intuition"].strip(),
        "## Definition",
        _definition(cls),
        "## Fields",
        _fields(name, encoding),
        "## Measured",
        _measured(name),
        "## Published claims, and what we found",
        _claims(name),
    ]
    return "\n\n".join(sections) + "\n"


def _definition(cls: type) -> str:
    """Return the docstring of a class as Markdown: formulas as code, its last paragraphs under bold headings."""
    text = re.sub(r"\n+(Reference|Differs|Sensitive):", r"\n\n**\1:**", inspect.getdoc(cls) or "")
    return "\n".join(line if line.startswith("    ") else _markdown(line) for line in text.splitlines())


def _markdown(line: str) -> str:
    """Escape the characters of a line of plain text that Markdown gives a meaning."""
    pieces = re.split(r"(`[^`]*`|\*\*\w+:\*\*)", line)
    return "".join(piece if n % 2 else re.sub(r"([*<>$\[\]_])", r"\\\1", piece) for n, piece in enumerate(pieces))


def _fields(name: str, encoding: Encoding) -> str:
    rows = [[f"`{path}`", value] for path, value in walk_fields(encoding, from_spec(name))]
    where = f"at {DIMS.num_heads} heads of {DIMS.head_dim}, L = {DIMS.train_len}"
    if not rows:
        return "It has no fields."
    typed = f"Type a field as `{name}({rows[0][0].strip('`')}=...)`." if dataclasses.fields(encoding) else ""
    return table(("field", f"value {where}"), rows) + f"\n\n{typed}"


def _uses(entry: str, name: str) -> bool:
    """Decide whether an entry of the leaderboard holds an encoding, alone or in a chain."""
    return name in {encoding_name(part) for part in parts(from_spec(entry))}


def _measured(name: str) -> str:
    board = _board()
    rows = [row for entry, row in board.items() if entry and _uses(entry, name)]
    if not rows:
        return "It is not on the leaderboard yet."
    columns = [0, *(board[""].index(column) for column in COMPARED)]
    cells = [[row[n] for n in columns] for row in rows]
    return f"{table([board[''][n] for n in columns], cells, numbers=len(COMPARED))}\n\n{MEASURED}"


def _claims(name: str) -> str:
    published = tomllib.loads(leaderboard.CLAIMS.read_text())["claim"]
    own = [claim for claim in published if _uses(claim["encoding"], name)]
    if not own:
        return "The study holds no published claim about it."
    text = leaderboard.claims(_cells(), own)
    note = (
        "The third column is the measured ratio of perplexities with its 95 % interval over text and seeds. "
        'The verdict "open" means that the interval holds both answers.'
    )
    return f"{text.replace('| claim | source | here | |', '| claim | source | here | verdict |')}\n\n{note}"


def _index() -> str:
    board = _board()
    columns = [board[""].index(column) for column in COMPARED]
    rows = []
    for name in ENCODINGS:
        text, facts = TEXTS[name], column_texts(build(name, DIMS), DIMS)
        own = board.get(name)
        cells = [own[n] for n in columns] if own else ["-"] * len(columns)
        rows.append([
            f"[`{name}`]({name}.md)", text["group"], *cells, text["short"], text["beyond"], facts["acts on"],
            facts["kernels"],
        ])  # fmt: skip
    head = ("name", "group", *COMPARED, "idea", "beyond L", "acts on", "kernels")
    trees = []
    for group in GROUPS:
        names = "\n".join(name for name in ENCODINGS if TEXTS[name]["group"] == group)
        trees.append(f"```{{toctree}}\n:caption: {group}\n:hidden:\n\n{names}\n```")
    return "---\nhtml_theme.sidebar_secondary.remove: true\n---\n" + "\n\n".join([
        "# The book of encodings",
        f"{len(ENCODINGS)} methods, each with its formula, a picture, its fields and its measured results. "
        "Click on a heading to sort. [Which encoding should I use?](../guides/choose.md) says what the numbers carry.",
        f":::{{div}} sortable\n{table(head, rows)}\n:::",
        MEASURED,
        *trees,
    ]) + "\n"  # fmt: skip


def _write_results(folder: Path) -> None:
    for study in STUDIES:
        text = (HERE / study / "README.md").read_text(encoding="utf-8")
        for picture in (HERE / study).glob("*.png"):
            (folder / study).mkdir(exist_ok=True)
            shutil.copy(picture, folder / study / picture.name)
        text = re.sub(r"\]\((\w+\.png)\)", rf"]({study}/\1)", text)
        text = re.sub(r"\]\(\.\./(\w+)/README\.md(#[\w-]+)?\)", r"](\1.md\2)", text)
        text = re.sub(r"\[([^\]]*)\]\(([^)]*)\)", _site_link, text)
        if study in REPORTS:
            text = text.replace("\n\n", f"\n\n{_report(study, folder)}\n\n", 1)
        (folder / f"{study}.md").write_text(text, encoding="utf-8")
    names = "\n".join(STUDIES)
    rows = [[f"[{title}]({study}.md)", _question(study)] for study, title in STUDIES.items()]
    index = (
        "# Results\n\nEach study is a question, a command, a table that a test recomputes from its committed data, and "
        f"what may be concluded.\n\n{table(('study', 'question'), rows)}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    )
    (folder / "index.md").write_text(index, encoding="utf-8")


def _report(study: str, folder: Path) -> str:
    """Write the interactive page of a study from its committed rows, and return the link to it."""
    page = folder / study / "report.html"
    with tempfile.TemporaryDirectory() as place:
        part = Path(place) / study
        tables.unpack([run for run in load(study) if run.get("part", "") == REPORTS[study]], part)
        report.write_report([part], page)
    return f"The curves, tables and verdicts with switches: [one interactive page]({study}/report.html), a single file."


def _site_link(link: re.Match[str]) -> str:
    """Return a link to a page or picture of the site, or to another site, as it is, else its text alone."""
    target = link[2].partition("#")[0]
    return link[0] if not target or target.startswith("https:") or target.endswith((".png", ".md")) else link[1]


def _question(study: str) -> str:
    """Return the question that a study's README asks, or its first paragraph."""
    text = (HERE / study / "README.md").read_text(encoding="utf-8")
    asked, first = r"\*\*Question\.\*\*\s+(.*?)\n\n", r"^# .*\n\n(.*?)\n\n"
    found = re.search(asked, text, re.DOTALL) or re.search(first, text, re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(found[1].split())) if found else ""
