"""How posx is written, as far as a machine can see it: docstrings, comments, names of types and tests."""

import ast
import functools
import importlib
import re
import tokenize
from collections import Counter
from pathlib import Path

import posx

ROOT = Path(posx.__file__).parent
#: No sentence begins with one of these: they stand for a noun that a reader must guess.
OPENINGS = {"What", "Who", "Whoever", "Whatever", "Of", "Where", "Wherever", "Those", "Such"}
#: The first word of a function's docstring, an instruction.
VERBS = set(
    """Add Apply Append Attend Build Call Cast Check Choose Collect Combine Compare Compose Compute Concatenate Convert
    Copy Count Cut Decode Differentiate Divide Draw Embed Evaluate Fill Find Fold Give Hash Hide
    Import Join List Look Make Map Mark Mask Measure Merge Mirror Move Multiply Name Normalise Pack Pad Parse Print
    Project Read Record Refuse Remember Repeat Replace Report Return Rotate Round Run Sample Scale Scan Set Shard Shift
    Show Skip Slice Sort Stack Split Start Stretch Sum Tabulate Take Test Trace Turn Visit Walk Write Yield Raise Follow
    Invert Decide Send Exchange Express Format Describe Recompute Keep Acquire Ask Discard Cancel Close Connect Delete
    Disconnect End Export Hold Leave Load Lock Pass Plan Probe Report Restore Say Simulate Spread Stop Submit Tell Train
    Wait Change Compile Flip Kill Put
    Place Save Score Tokenise Remove Flush""".split()
)
ARTICLES = {"A", "An", "The", "One", "Two", "Every", "Each", "All", "No", "Whether"} - {"Whether"}
MOST_WORDS, LONGEST_LINE, LONGEST_NAME = 25, 120, 60


def files_of(folder):
    """Return {path without its end: file} of the Python files below a folder of the repository."""
    return {path.relative_to(ROOT.parent).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.py"))}


FOLDERS = [ROOT.parent / name for name in ("posx", "benchmarks", "golden", "tests/faults")]
FILES = {name: path for folder in FOLDERS for name, path in files_of(folder).items()}
TEST_FILES = files_of(ROOT.parent / "tests")
REPOSITORY = ROOT.parent
#: Pages that are written by hand: git does not track those that `docs/book.py` makes.
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/[sgtd]*/*.md", "experiments/*/README.md")
    for path in REPOSITORY.glob(pattern)
)


#: Full stops that end no sentence.
ABBREVIATED = re.compile(r"\b(e\.g|i\.e|cf|vs|al|etc)\.")
#: The end of a sentence, of a list's item or of a paragraph; a colon that opens a list, a block or a paragraph.
END = re.compile(r"[.!?]\)?(?:\s+|$)|\n\s*\n|\n\s*(?:[-*]|\d+\.) | · |:(?=\s*$|\n\s*\n|\n\s*[-*] |\n {4})")
#: A block of code in a docstring, after an empty line.
CODE_BLOCK = re.compile(r"\n\s*\n(?: {4}.*(?:\n|$))+")
LABEL = re.compile(r"^\s*(?:[-*] )?(?:\S+ ){0,2}\S+:\s")


def sentences(text):
    """Yield the words of each sentence of a docstring, comment or page, as a reader meets them.

    A word is a run without spaces that has a letter or a digit, in brackets and in code too. `x.y(z)` is one word,
    `posx train --config quick` are three, and a shape such as [q, h, d] is one.

    A full stop, a list's item or an empty line ends a sentence. A colon inside a sentence does not. A label is no part
    of the sentence: up to three words and a colon at its start (`name: meaning`, "Reference: ..."). A colon before a
    list, a block of code or an empty line ends the words that introduce it.
    """
    text = re.sub(r"`[^`]*`", lambda code: re.sub(r"[.!?:*-](?=[\s`])", "", code[0]), text)
    text = ABBREVIATED.sub(r"\1", re.sub(r"\[[^\]]*\]", " x ", text))
    for part in END.split(CODE_BLOCK.sub("\n\n", text)):
        words = [word for word in LABEL.sub("", part, count=1).split() if re.search(r"[A-Za-z0-9]", word)]
        if words:
            yield words


def comments(path):
    """Yield (line, text) of the comments of a file, those on neighbouring lines together."""
    groups = []
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT and not re.match(r"#\s*(type:|noqa|fmt:)", token.string):
                text, alone = token.string.lstrip("#: "), token.line.lstrip().startswith("#")
                if groups and alone and groups[-1][2] and groups[-1][0] + groups[-1][3] == token.start[0]:
                    line, before, _, count = groups.pop()
                    groups.append((line, f"{before} {text}", True, count + 1))
                else:
                    groups.append((token.start[0], text, alone, 1))
    for line, text, *_ in groups:
        yield line, text


def documented(path):
    """Yield (node, line, docstring) of a module, its classes and functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node, getattr(node, "lineno", 1), text


def for_each(values):
    """Make one test of a test of each value: a thousand tests of a file each took longer to report than to run."""

    def decorate(test):
        @functools.wraps(test)
        def run():
            problems = []
            for value in values:
                try:
                    test(value)
                except AssertionError as problem:
                    problems.append(f"{value}: {problem}")
            assert not problems, "\n".join(problems)

        del run.__wrapped__  # pytest would ask it for its arguments
        return run

    return decorate


@for_each(FILES)
def test_sentences_are_short_and_plain(name):
    texts = [(line, text) for _, line, text in documented(FILES[name])] + list(comments(FILES[name]))
    wrong = []
    for line, text in texts:
        for words in sentences(text):
            if words[0] in OPENINGS:
                wrong.append(f"{name}:{line} begins with {words[0]!r}: {' '.join(words[:6])}")
            if len(words) > MOST_WORDS:
                wrong.append(f"{name}:{line} has {len(words)} words: {' '.join(words[:6])} ...")
    assert not wrong, "\n".join(wrong)


def records(path):
    """Yield (class, its fields) of the named tuples and data classes of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            made = " ".join(map(ast.unparse, [*node.bases, *node.decorator_list]))
            if "NamedTuple" in made or "dataclass" in made:
                lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
                yield node, [line.target.id for line in lines if "ClassVar" not in ast.unparse(line.annotation)]


@for_each([name for name in FILES if not name.startswith("posx/encodings/")])
def test_records_list_a_field_a_line(name):
    """A docstring that explains two or more fields lists them below "Attributes:". Encodings state formulas instead."""
    wrong = []
    for node, fields in records(FILES[name]):
        text = ast.get_docstring(node) or ""
        named = [field for field in fields if re.search(rf"`{field}`|\b{field}: ", text)]
        listed = re.findall(r"^  (\w+(?:, \w+)*): ", text.partition("Attributes:\n")[2], re.MULTILINE)
        if len(named) > 1 and set(fields) - set(", ".join(listed).split(", ")):
            wrong.append(f"{name}:{node.lineno} {node.name} explains {', '.join(named)} in a paragraph")
    assert not wrong, "\n".join(wrong)


@for_each(FILES)
def test_functions_list_an_argument_a_line(name):
    """A docstring that explains two or more arguments by `name: meaning` lists them below "Args:"."""
    wrong = []
    for node, line, text in documented(FILES[name]):
        if isinstance(node, ast.FunctionDef):
            prose = text.partition("Args:\n")[0]
            arguments = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
            named = [each for each in arguments if re.search(rf"(?:^|[.;] ){each}: ", prose, re.MULTILINE)]
            if len(named) > 1:
                wrong.append(f"{name}:{line} {node.name} explains {', '.join(named)} in a paragraph")
    assert not wrong, "\n".join(wrong)


#: The head of a page and its blocks of code.
CODE_OF_PAGES = re.compile(r"\A---\n.*?\n---\n|^(```+|~~~).*?^\1$", flags=re.DOTALL | re.MULTILINE)


def paragraphs(markdown):
    """Yield the prose of a page: no tables, pictures or headings, no code, and no quoted output of a command."""
    markdown = CODE_OF_PAGES.sub("", markdown)
    markdown = re.sub(r"^:.*$|\$[^$]*\$|\{\w+\}(?=`)", " x ", markdown, flags=re.MULTILINE)
    lines = ["" if re.match(r"[|#>]|!\[|    ", line) else line for line in markdown.splitlines()]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines)).replace("**", "")
    for paragraph in re.split(r"\n\s*\n|\n *\* ", text):
        yield re.sub(r"\[([^\]]*)\]", r"\1", paragraph)


@for_each(PAGES)
def test_pages_are_short_and_plain(path):
    wrong = []
    for words in (
        words for paragraph in paragraphs(path.read_text(encoding="utf-8")) for words in sentences(paragraph)
    ):
        if words[0] in OPENINGS or len(words) > MOST_WORDS:
            wrong.append(f"{len(words)} words: {' '.join(words[:8])}")
    text = re.sub(r"^(```+).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    wrong += [title for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE) if title.split()[0] in OPENINGS]
    assert not wrong, "\n".join(wrong)


@for_each(PAGES)
def test_no_line_of_a_page_begins_with_percent(path):
    """The site takes the rest of the line for a comment, in a list too."""
    text = CODE_OF_PAGES.sub("", path.read_text(encoding="utf-8"))
    assert not re.findall(r"^\s*%.*", text, re.MULTILINE)


#: Calls that show a text to a person, by the end of their name.
SHOWN = ("Error", "say", "warning", "Stopped", "Interrupted", "UndefinedLength", "PartialFailure")
#: Messages that break the rule, by file and first words. The list may only shrink.
EXCUSED: dict[str, set[str]] = {
    "posx/evaluation/published": {"the document at place x of"},
}


def literals(node):
    """Yield the text of each string and f-string below a node, a value in it as "x"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
    elif not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from literals(child)


def messages(path):
    """Yield (line, text) of the literal texts that a person reads: of errors, notices, warnings and problem lists."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            listed = name == "append" and ast.unparse(node.func).split(".")[0] in ("advice", "damaged", "problems")
            if name.endswith(SHOWN) or listed:
                for text in (text for argument in node.args for text in literals(argument)):
                    yield node.lineno, text


@for_each(files_of(ROOT))
def test_messages_are_short_and_plain(name):
    wrong, excused = [], EXCUSED.get(name, set())
    unused = set(excused)
    for line, text in messages(FILES[name]):
        for words in sentences(text):
            start = " ".join(words[:6])
            if words[0] in OPENINGS or len(words) > MOST_WORDS:
                unused.discard(start)
                if start not in excused:
                    wrong.append(f"{name}:{line} has {len(words)} words: {start} ...")
    assert not wrong, "\n".join(wrong)
    assert not unused, f"no longer needed: {unused}"


def is_property(node):
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


@for_each(FILES)
def test_docstrings_begin_with_a_verb_or_an_article(name):
    """Functions with a verb, properties and classes with an article; a class of the catalogue with its formula."""
    wrong = []
    for node, line, text in documented(FILES[name]):
        word = re.split(r"\W", text, maxsplit=1)[0]
        if isinstance(node, ast.FunctionDef) and not is_property(node) and word not in VERBS:
            wrong.append(f"{name}:{line} {node.name}: {text.splitlines()[0][:80]}")
    assert not wrong, "\n".join(wrong)


#: Words that make a name of a function a phrase about a place or a relation, as in `rows_of` and `by_stride`.
PREPOSITIONS = set(
    """about above across after against along among around at before behind below beneath beside between beyond by for
    in inside into of on onto outside over past per since through till toward under until upon via within""".split()
)
#: Converters such as `from_json` and `with_checksum` may begin with one of these, and end with none of them.
CONVERTERS = {"as", "from", "to", "with", "without"}
#: Participles that do not end in -ed. Words that are verbs too, such as "read" and "set", are none.
IRREGULAR = set(
    """begun bound broken built chosen dealt done drawn driven fallen forgotten found given gone got grown heard held
    hidden kept known laid led left lost made meant met seen sent shown sold spent spoken stolen sworn taken taught told
    torn thought thrown understood unheard unknown unseen woken won worn written""".split()
)
NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed"}
#: Names by which JAX, Python, a library or the field calls the same thing.
IDIOMS = {
    "at_least_float32",
    "fold_in",
    "fused",
    "generate_until",
    "on_all",
    "on_first",
    "per_position",
    "zero_outside",
}


def is_participle(word):
    return word in IRREGULAR or (word.endswith("ed") and len(word) > 3 and word not in NO_PARTICIPLES)


def public_names():
    """Return the names that users call: of `posx`, its encodings and evaluation, and the members of their classes."""
    packages = map(importlib.import_module, ("posx", "posx.encodings", "posx.evaluation"))
    exported = {name for package in packages for name in package.__all__}
    members = {
        member.name
        for path in ROOT.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in exported
        for member in node.body
        if isinstance(member, ast.FunctionDef)
    }
    return exported | {name for name in members if not name.startswith("_")}


PUBLIC = public_names()


def is_fact(node):
    return is_property(node) and (ast.unparse(node.returns or ast.Constant(None)) == "bool")


def name_problem(name):
    """Return why a function's name is neither a verb nor a noun, "" if nothing shows it.

    A participle may describe a noun (`saved_tokenizer`), but is no name alone, before a preposition, or before another.
    """
    first, *rest = name.strip("_").split("_")
    if is_participle(first) and (not rest or rest[0] in PREPOSITIONS | CONVERTERS or is_participle(rest[0])):
        return "a participle"
    if first in PREPOSITIONS or (first in CONVERTERS and not rest):
        return "begins with a preposition"
    if rest and rest[-1] in PREPOSITIONS | CONVERTERS:
        return "ends with a preposition"
    return ""


def test_rule_of_names_tells_verbs_and_nouns():
    good = "read_rows saved_tokenizer from_json embed run_name".split()
    bad = "told checked kept named_by_user rows_of by_stride _of_keys at_hand restored_as with_".split()
    assert [name for name in (*good, *bad) if not name_problem(name)] == good


@for_each(files_of(ROOT))
def test_names_of_functions_are_verbs_or_nouns(name):
    wrong = [
        f"{name}:{node.lineno} {node.name}: {problem}"
        for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name not in PUBLIC | IDIOMS and not is_fact(node)
        if (problem := name_problem(node.name))
    ]
    assert not wrong, "\n".join(wrong)


@for_each(files_of(ROOT))
def test_no_variable_is_called_found(name):
    """It tells nothing: a variable is called by what was found."""
    lines = [
        getattr(node, "lineno", 0)
        for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8")))
        if (isinstance(node, ast.Name) and node.id == "found" and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.arg) and node.arg == "found")
    ]
    assert not lines, f"{name}: lines {lines}"


def test_public_functions_of_modules_have_unique_names():
    """A name says in every module of posx which function or class is meant."""
    owners = {}
    for name, path in files_of(ROOT).items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, []).append(name)
    twice = {name: modules for name, modules in owners.items() if len(modules) > 1}
    assert not twice, twice


def test_names_of_types_are_unique():
    owners = Counter(
        node.name
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    here = {
        node.name
        for path in FILES.values()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    assert not sorted(name for name in here if owners[name] > 1)


@for_each(TEST_FILES)
def test_names_of_tests_are_short(name):
    tree = ast.parse(TEST_FILES[name].read_text(encoding="utf-8"))
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"]
    assert not [each for each in names if len(each) > LONGEST_NAME]
