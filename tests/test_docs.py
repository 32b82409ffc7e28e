"""The texts of each encoding in the documentation are complete and plain, and links open in a plain clone."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from posx.encodings import ENCODINGS
from tests.test_language import MOST_WORDS, OPENINGS, paragraphs, sentences

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs/encodings.toml"
GROUPS = {"Absolute", "Rotary", "Distance bias", "Content-dependent", "Logit scale"}
FIELDS = {"title", "group", "short", "beyond", "formula", "symbols", "intuition"}
#: The longest text of a cell of the comparison of all encodings.
MOST_IN_A_CELL = 8


def unbalanced(latex):
    """Return the braces and environments of a formula that are open at its end, or closed too early."""
    still_open = []
    for token in re.findall(r"\\(?:begin|end)\{\w+\}|\\[{}]|[{}]|\\(?:left|right)(?![a-z])", latex):
        if token in ("{", r"\left") or token.startswith(r"\begin"):
            still_open.append(token)
        elif token not in (r"\{", r"\}"):
            opened = {"}": "{", r"\right": r"\left"}.get(token, token.replace("end", "begin"))
            if not still_open or still_open.pop() != opened:
                return [token]
    return still_open


def test_every_encoding_has_a_formula_and_plain_texts():
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    assert sorted(tables) == sorted(ENCODINGS)
    wrong = []
    for name, table in tables.items():
        assert set(table) == FIELDS and all(text.strip() for text in table.values()), name
        assert table["group"] in GROUPS, name
        wrong += [f"{name}: {x} is long" for x in ("short", "beyond") if len(table[x].split()) > MOST_IN_A_CELL]
        if not 2 <= len(re.findall(r"[.!?](?:\s|$)", table["intuition"].strip())) <= 4:
            wrong.append(f"{name}: intuition must have 2 to 4 sentences")
        wrong += [f"{name}: {x} is not balanced" for x in unbalanced(table["formula"])]
        for field in FIELDS - {"formula"}:
            text = re.sub(r"\$[^$]*\$", " x ", table[field])
            assert "$" not in text and (field == "symbols" or "\\" not in text), (name, field)
            for words in (words for paragraph in paragraphs(text) for words in sentences(paragraph)):
                if words[0] in OPENINGS or len(words) > MOST_WORDS:
                    wrong.append(f"{name}: {field} has {len(words)} words: {' '.join(words[:8])}")
    assert not wrong, "\n".join(wrong)


def slug(heading):
    """Return the anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).replace(" ", "-")


def test_every_link_opens_in_a_plain_clone():
    """A link names a file that git tracks, and a heading of it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders, wrong = {str(parent) for name in listed for parent in Path(name).parents}, []
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in listed if name.endswith(".md")}
    texts = {name: re.sub(r"^(```+).*?^\1", "", page, flags=re.DOTALL | re.MULTILINE) for name, page in pages.items()}
    anchors = {
        name: {slug(found) for found in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
        for name, text in texts.items()
    }
    for page, text in texts.items():
        for link in re.findall(r"\]\(((?!https?:|mailto:)[^)\s]+)\)", text):
            target, _, anchor = link.partition("#")
            name = os.path.normpath(Path(page).parent / target) if target else page
            known = name in folders or name in listed
            if not known or (anchor and name in anchors and anchor not in anchors[name]):
                wrong.append(f"{page}: {link}")
    assert not wrong, "\n".join(wrong)


def test_the_page_of_attention_names_its_files_and_functions():
    """The reading order has every file, and the stages of the formula are functions that are there."""
    page, folder = (ROOT / "docs/design/attention.md").read_text(encoding="utf-8"), ROOT / "posx/attention"
    order = page.partition("## The files in reading order")[2]
    files = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.py")}
    assert set(re.findall(r"`(\w+\.py)`", order)) == files.keys() - {"__init__.py"}
    _, _, stages = page.partition("| stage | function | result |\n")
    named = re.findall(r"`(\w+)`", "".join(row.split("|")[2] for row in stages.partition("\n\n")[0].splitlines()))
    code = files["tiles.py"] + files["decay.py"]
    assert named and [name for name in named if f"\ndef {name}(" not in code] == []
