"""The tables that pages in git repeat from the code and from the data of a study.

`python -m docs.tracked` writes them into the README, the catalogue and the contract. A test compares them.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.tables import HERE, Seeds, by_setting, cell, load
from posx.contract import HOOKS, ByDistance, Encoding, Tile, acting_hooks
from posx.contract.facts import METHOD_FACTS, PROMISES, Fact
from posx.contract.hooks import Hook
from posx.encodings import ENCODINGS, Dims, build

DOCS = Path(__file__).parent
#: The sizes of the pictures and facts: those of the leaderboard's models.
DIMS = Dims(model_dim=128, num_heads=4, head_dim=32, num_layers=4, train_len=64)
#: Texts about each encoding that no class needs.
TEXTS = tomllib.loads((DOCS / "encodings.toml").read_text(encoding="utf-8"))
GROUPS = ("Absolute", "Rotary", "Distance bias", "Content-dependent", "Logit scale")
#: The encodings that the README names: the classic ones, and those of the newer ones that most models or papers use.
KNOWN = ("sinusoidal", "learned", "nope", "rope", "t5", "alibi", "kerple", "fire", "fox", "learned_sinks")
#: The encodings of the README's results, and the lengths over L.
MEASURED, FACTORS = ("t5", "alibi", "rope", "nope", "sinusoidal"), (2, 16)


def table(head: list[str] | tuple[str, ...], rows: list[list[str]], numbers: int = 0) -> str:
    """Return a Markdown table. numbers: the count of last columns that are aligned to the right."""
    rule = "|" + "---|" * (len(head) - numbers) + "---:|" * numbers
    first, *rest = ("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in (head, *rows))
    return "\n".join((first, rule, *rest))


def known() -> str:
    """Return the README's table of encodings."""
    rows = []
    for name in KNOWN:
        address = re.sub(r".*\((.*)\)", r"\1", paper(ENCODINGS[name].about.paper))
        rows.append([f"[`{name}`]({address})", TEXTS[name]["short"]])
    return table(("name, paper", "idea"), rows)


def catalogue() -> str:
    """Return the table of all encodings, each with the file of its definition."""
    rows = []
    for name, cls in sorted(ENCODINGS.items(), key=lambda item: GROUPS.index(TEXTS[item[0]]["group"])):
        text = TEXTS[name]
        file = Path(inspect.getfile(cls)).relative_to(HERE.parent).as_posix()
        acts = ", ".join(f"`{hook}`" for hook in acting_hooks(build(name, DIMS))) or "nothing"
        rows.append([text["group"], f"[`{name}`](../{file})", acts, text["short"], paper(cls.about.paper)])
    for n in range(len(rows) - 1, 0, -1):  # a group is named once
        if rows[n][0] == rows[n - 1][0]:
            rows[n][0] = ""
    return table(("group", "name", "acts on", "idea", "paper"), rows)


def results() -> str:
    """Return the README's table of results, from the data of the leaderboard."""
    runs = by_setting(load("leaderboard", "cells"))
    rows = []
    for name in MEASURED:
        seeds = Seeds(runs[name])
        measured = (seeds.values("ppl"), *(seeds.ratios(factor) for factor in FACTORS))
        rows.append([f"`{name}`", *(cell(values, digits=2) for values in measured)])
    return table(("encoding", "PPL at L", *(f"R_{factor}" for factor in FACTORS)), rows, numbers=1 + len(FACTORS))


def paper(text: str) -> str:
    """Return the reference of a class as a link: to a paper by its arXiv number, or to a page by its address."""
    if "/" in text.split()[0]:  # the address of a page
        return f"[{text.rstrip('/').split('/')[-1]}](https://{text.removeprefix('https://')})"
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", text)


def _hooks() -> str:
    """Return the table of hooks. Their meaning is the first paragraph of each default in `Encoding`."""
    rows = [
        [f"`{name}`", ", ".join(hook.takes) or "-", _shape(hook), hook.kind, _first(getattr(Encoding, name))]
        for name, hook in HOOKS.items()
    ]
    return table(("hook", "given, after params", "returns", "acts per", "meaning"), rows)


def _shape(hook: Hook) -> str:
    """Return the shapes of a hook's result, with t for the tokens of a hook that acts on each token."""
    if isinstance(hook.gives, tuple):
        return "; ".join(f"{name} `[{shape}]`" for name, shape in hook.gives._asdict().items())
    shape = re.sub(r"\b[qk]\b", "t", hook.gives) if hook.kind == "token" else hook.gives
    return f"`[{shape}]`" if shape else "named arrays `[t, ...]`, carry"


def _record(cls: type) -> str:
    """Return the table of a record's fields, out of the Attributes of its docstring."""
    listed = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    fields = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", listed, re.MULTILINE)
    rows = [[f"`{name}`", re.sub(r"^(\[[^\]]*\]|\{[^}]*\})", r"`\1`", " ".join(text.split()))] for name, text in fields]
    return table(("field", "holds"), rows)


def _first(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _facts(facts: Mapping[str, Fact]) -> str:
    """Return the table of some facts. Their meaning is the comment above each default in `Encoding`."""
    code = inspect.getsource(Encoding)
    comments = dict(re.findall(r"#: ((?:.*\n\s*#: )*.*)\n\s*(\w+): ", code))
    meaning = {name: " ".join(re.sub(r"\n\s*#: ", " ", text).split()) for text, name in comments.items()}
    rows = []
    for name, fact in facts.items():
        default = getattr(Encoding, name)
        shown = "nothing" if not default and default is not False and default is not None else str(default)
        rows.append([f"`{name}`", fact.allowed.text, shown, meaning.get(name) or _first(default)])
    return table(("fact", "allowed", "default", "meaning"), rows)


def committed() -> dict[Path, str]:
    """Return {page in git: its text with the tables, and the number of encodings, as they must be}.

    A table follows a comment with its name, or in the README its first line.
    """
    readme, index = HERE.parent / "README.md", DOCS / "index.md"
    texts = {page: page.read_text(encoding="utf-8") for page in (readme, index)}
    pages = {page: re.sub(r"\d+(?= position encodings)", str(len(ENCODINGS)), text) for page, text in texts.items()}
    for made in (known(), results()):
        head = re.escape(made.partition("\n")[0])
        pages[readme] = _with_table(pages[readme], rf"(?={head}\n)", made)
    tables_of = {
        "catalogue.md": {"encodings": catalogue()},
        "design/contract.md": {
            "hooks": _hooks(), "by_distance": _record(ByDistance), "tile": _record(Tile),
            "facts": _facts(METHOD_FACTS), "promises": _facts(PROMISES)
        },
    }  # fmt: skip
    for page, tables in tables_of.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        for name, made in tables.items():
            text = _with_table(text, rf"(?<=<!-- {name} -->\n\n)", made)
        pages[DOCS / page] = text
    return pages


def _with_table(page: str, place: str, table: str) -> str:
    """Return the page with the table at `place`, a pattern, in place of the one there. Raises ValueError if none is."""
    found, count = re.subn(rf"{place}(\|.*\n)+", lambda _: f"{table}\n", page)
    if count != 1:
        raise ValueError(f"{place} is in the page {count} times instead of once, with a table after it.")
    return found


if __name__ == "__main__":
    for path, text in committed().items():
        path.write_text(text, encoding="utf-8")
