"""The tables in the READMEs of the studies are those of their data files."""

import collections
import itertools
import json
import math
import re
import shutil
import statistics
import tomllib

import numpy as np
import pytest

from experiments import tables
from experiments.encoders import encoders
from experiments.intervals import coverage, unpaired, verdicts
from experiments.leaderboard import leaderboard
from experiments.pictures import pictures
from experiments.recipe import recipe
from experiments.scale import scale
from experiments.scaling import cells, scaling
from experiments.tables import Seeds, by_setting, cells_of, load, over_nope, row_tables
from experiments.tasks import places, tasks
from experiments.train_short_test_long.gates import gates
from posx.encodings import ENCODINGS
from posx.lab.files import rows
from posx.lab.files.checksums import with_checksum
from tests.experiments.readme import bodies, of_markdown

TEN = "t5 learned shaw deberta transformer_xl tupe rope alibi sinusoidal nope".split()
STUDY = "train_short_test_long"
DOCS = tables.HERE.parent / "docs"


def same(study, number, expected):
    """The table of that number in a study's README has these lines, in whatever order."""
    assert sorted(bodies(study)[number]) == sorted(expected)


def test_collected_lines_give_the_rows_back(tmp_path):
    facts = {"run_id": "rope-L64-s0", "hash": "1a2b3c4d", "settings": {"train.seed": 0}, "seed": 0}
    facts |= {"encoding": "rope", "protocol": "nonoverlapping", "train_len": 64, "eval_len": 64}
    blocks = {"num_targets": 6, "block_len": 2, "block_nll": [1.0, 2.0, 6.0]}
    rows = [facts | {"nll": 1.5, "ppl": math.exp(1.5), **blocks}, facts | {"eval_len": 128, "status": "oom"}]
    speed = {"attempt": 1, "attempt_start": 0, "tokens_per_second": 32}
    log = [{"step": step, "tokens": 64 * step, "loss": 4.0 - step / 7} | speed for step in (20, 40)]
    files = {
        "config.json": '{"num_params": 9}',
        "env.json": "{}",
        "DONE": "",
        "eval.jsonl": "".join(map(tables.as_line, rows)),
        "metrics.jsonl": "".join(json.dumps(with_checksum(row)) + "\n" for row in log),
    }
    (tmp_path / "run").mkdir()
    for name, text in files.items():
        (tmp_path / "run" / name).write_text(text)
    (tmp_path / "run@window").mkdir()
    (tmp_path / "run@window" / "eval.jsonl").write_text(files["eval.jsonl"])
    (tmp_path / "run@window" / "weights.txt").write_text("../run")
    run, window = tables.collect(tmp_path, "study")
    assert window == {name: run[name] for name in run if name != "log"} | {"part": "study-window"}
    shutil.rmtree(tmp_path / "run@window")
    assert tables.rows_of([run]) == rows and (run["part"], run["num_params"]) == ("study", 9)
    assert run["log"] == [[20, 1.14286, 1280, 40], [40, -1.71429, 2560, 80]]
    tables.unpack([run], tmp_path / "again")
    again = (tmp_path / "again" / run["run_id"] / "eval.jsonl").read_text()
    assert list(map(json.loads, again.splitlines())) == list(map(json.loads, files["eval.jsonl"].splitlines()))
    (run,) = tables.collect(tmp_path, block=4)
    assert run["rows"][0]["block_nll"] == [3.0, 6.0] and "part" not in run
    (tmp_path / "run" / "eval.jsonl").write_text(again.replace('"nll": 1.5', '"nll": 1.4'))
    with pytest.raises(SystemExit, match=r"line 1: ppl is 4.48\d*, but exp\(nll\) is 4.05"):
        tables.collect(tmp_path)


@pytest.mark.parametrize("study", sorted(file.parent.name for file in tables.HERE.glob("*/runs.jsonl")))
def test_every_study_unpacks_into_a_folder_per_run(study, tmp_path):
    """The older lines have a run_id, the newer have none. All rows agree with themselves, as a reader of rows asks."""
    runs = load(study)
    tables.main(["unpack", f"{tables.HERE / study}/runs.jsonl", str(tmp_path)])
    files = list(tmp_path.rglob("eval.jsonl"))
    assert len(files) == len(runs) and all(rows.read_row_file(file, tables.refuse) for file in files)
    stored = (rows.read_row_file(file, tables.refuse) for file in files)
    assert list(map(tables.named, tables.rows_of(runs[:1]))) in [list(map(tables.named, one)) for one in stored]


def test_unpack_writes_one_part_and_names_the_parts_there_are(tmp_path):
    path, folder = f"{tables.HERE}/leaderboard/runs.jsonl", tmp_path / "drawn"
    tables.main(["unpack", path, str(folder), "source"])
    assert [place.name for place in folder.iterdir()] == ["source"]
    with pytest.raises(SystemExit, match=r"has no part 'sources'. Its parts: .*source"):
        tables.main(["unpack", path, str(folder), "sources"])


@pytest.mark.parametrize("study", ["quick", "variants"])
def test_small_sweeps(study):
    same(study, 0, cells_of(*row_tables(load(study))))


def test_perplexities_of_the_study():
    made = row_tables(load(STUDY, "study"))
    assert bodies(STUDY)[:2] == list(map(cells_of, made)), [one.panel.protocol for one in made]


def test_gates_of_the_study():
    assert bodies(STUDY)[2] == gates(load(STUDY, "study"))


def test_answers_to_the_tasks():
    cells, others = load("tasks", "cells"), load("tasks", "rates")
    assert bodies("tasks")[0] == of_markdown(tasks.table(tasks.read_cells(cells)))
    assert bodies("tasks")[1] == of_markdown(tasks.rates([*cells, *others]))
    published = tomllib.loads(tasks.GATES.read_text())["gate"]
    assert bodies("tasks")[2] == of_markdown(tasks.gates(load("tasks"), published))
    measured = load("tasks", file="places.jsonl")
    assert bodies("tasks")[3] == of_markdown(tasks.table(tasks.read_cells(tasks.catalogue())))
    assert bodies("tasks")[4] == of_markdown(places.table(load("tasks"), measured))
    assert bodies("tasks")[5] == of_markdown(tasks.table(tasks.read_cells(load("tasks", "recall"))))
    assert bodies("tasks")[6] == of_markdown(tasks.rates(load("tasks", "more")))
    assert bodies("tasks")[7] == of_markdown(tasks.weights(tasks.read_cells(load("tasks", "weights"))))
    assert bodies("tasks")[8] == of_markdown(tasks.zeros(tasks.read_cells(load("tasks", "zeros"))))


def test_hidden_tokens_of_encoders():
    cells, others, causal = (load("encoders", part) for part in ("cells", "rates", "causal"))
    assert bodies("encoders")[0] == of_markdown(encoders.table(cells))
    assert bodies("encoders")[2] == list(map(list, encoders.claims(cells, causal)))
    assert bodies("encoders")[3] == of_markdown(encoders.rates([*cells, *others]))


def test_sizes():
    page = (tables.HERE / "scaling" / "README.md").read_text()
    assert scaling.filled(page, cells.load_runs()) == page
    assert all(f"scaling.scaling {name}\n" in page for name in scaling.TABLES)


def test_hidden_patches_of_pictures():
    assert bodies("pictures")[0] == of_markdown(pictures.table(load("pictures")))


def test_rates_changed_the_study():
    without, now = (by_setting(runs) for runs in (load("recipe", "without"), load(STUDY, "study")))

    def cell(runs, factor):
        seeds = Seeds(runs)
        values = seeds.values("ppl") if factor == 1 else seeds.ratios(factor)
        return f"{statistics.fmean(values):.2f}" if values else seeds.failed(factor)

    same(STUDY, 3, [[name, *(cell(runs[name], k) for k in (1, 8, 32) for runs in (without, now))] for name in TEN])


def multiplier_of(encoding):
    """Return the multiplier that a class states, that of the last part of a chain."""
    return ENCODINGS[re.match(r"\w+", encoding.split("+")[-1])[0]].about.lr_multiplier


def losses(study, part="tuning", rate=4e-3):
    """Return {encoding: {multiplier: mean loss}} at a base rate."""
    cells = recipe.cells_of([row for row in recipe.records(study, part) if row["learning_rate"] == rate])
    found = {}
    for cell, values in cells.items():
        found.setdefault(cell.encoding, {})[cell.multiplier] = statistics.fmean(values)
    return found


def by_multiplier(encoding, values, multipliers, bold):
    """Return a line with a cell for each multiplier, "" if it was not run."""
    texts = (f"{values[m]:.3f}" if m in values else "" for m in multipliers)
    return [f"`{encoding}`", *(f"**{t}**" if m == bold else t for m, t in zip(multipliers, texts, strict=True))]


def test_recipe_at_2_million_bytes():
    cells = recipe.cells_of(recipe.records("recipe"))
    chosen = recipe.choose(cells, recipe.base_rate(cells, recipe.noise_of(cells)), recipe.noise_of(cells))
    means, fast = losses("recipe"), {}
    for row in recipe.records("recipe"):
        if (row["learning_rate"], row["seed"]) == (8e-3, 0):
            fast[row["encoding"]] = min(row["nll"], fast.get(row["encoding"], math.inf))
    expected = [
        [*by_multiplier(name, means[name], (1, 3, 10, 30, 100), chosen[name].multiplier), f"{fast[name]:.3f}"]
        for name in TEN[:6]
    ]
    for a, b in (("rope", "alibi"), ("sinusoidal", "nope")):
        pairs = (f"{values[a]:.3f}, {values[b]:.3f}" for values in ({n: v[1] for n, v in means.items()}, fast))
        expected.append([f"`{a}`, `{b}`", next(pairs), "", "", "", "", next(pairs)])
    same("recipe", 0, expected)
    assert f"{recipe.noise_of(cells):.3f}" == "0.006"


def test_recipe_at_5_million_bytes():
    means, slow = losses("recipe", "confirm"), losses("recipe", "confirm", 2e-3)
    tuned = {"t5": 10, "learned": 10, "shaw": 10, "deberta": 3, "tupe": 1, "transformer_xl": 1}
    expected = []
    for name, multiplier in tuned.items():
        (other,) = means[name].keys() - {multiplier}
        shown = [
            f"**{means[name][m]:.4f}**" if m == multiplier_of(name) else f"{means[name][m]:.4f}"
            for m in (multiplier, other)
        ]
        expected.append(
            [f"`{name}`", f"x {multiplier}: {shown[0]}", f"x {other:g}: {shown[1]}", f"{slow[name][multiplier]:.4f}"]
        )
    for a, b in (("rope", "alibi"), ("sinusoidal", "nope")):
        pairs = [f"{values[a][1]:.4f}, {values[b][1]:.4f}" for values in (means, slow)]
        expected.append([f"`{a}`, `{b}`", pairs[0], "", pairs[1]])
    same("recipe", 1, expected)


def test_recipe_says_what_choosing_gained():
    means = losses("recipe")
    names = ["t5", "learned", "shaw", "deberta", "tupe", "transformer_xl"]
    lines = {"over the worst": max, "over the median": statistics.median}
    expected = [
        [title, *(f"{pick(means[name].values()) - means[name][multiplier_of(name)]:.3f}" for name in names), "0"]
        for title, pick in lines.items()
    ]
    same("recipe", 2, expected)


def test_recipe_beyond_the_training_length():
    found = {}
    for row in recipe.records("recipe", "beyond"):
        found.setdefault(row["encoding"], {})[row["position_lr_multiplier"]] = row["r_8"]
    names = ("t5", "deberta", "shaw", "transformer_xl")
    same("recipe", 3, [by_multiplier(n, found[n], (1, 3, 10, 30, 100), multiplier_of(n)) for n in names])


def test_recipe_at_four_times_the_budget():
    seed0 = by_setting(run for run in load(STUDY, "study") if run["seed"] == 0)
    budget = by_setting(load("recipe", "budget"))

    def cells(name):
        for factor in (1, 2, 8, 32):
            for runs in (seed0, budget):
                seeds = Seeds(runs[name])
                (value,) = seeds.values("ppl") if factor == 1 else seeds.ratios(factor)
                # RoPE and NoPE differ in the second decimal beyond 2 L, the table's third says nothing there.
                yield f"{value:.2f}" if factor > 2 and name in ("rope", "nope") else f"{value:.3f}"

    same("recipe", 4, [[f"`{name}`", *cells(name)] for name in budget])


def test_leaderboard():
    cells = load("leaderboard", "cells")
    times = over_nope(load("leaderboard", file="steps.jsonl"))
    assert bodies("leaderboard")[0] == of_markdown(leaderboard.table(cells, times))
    published = tomllib.loads(leaderboard.CLAIMS.read_text())["claim"]
    lines = of_markdown(leaderboard.claims(cells, published))
    assert bodies("leaderboard")[1] == lines
    count = collections.Counter(verdict for *_, verdict in lines)
    pages = (tables.HERE / "leaderboard/README.md", DOCS / "design/numbers.md", DOCS / "guides/choose.md")
    study, numbers, guide = (" ".join(page.read_text().split()) for page in pages)
    told = "{confirmed} confirmed, {contradicted} contradicted and {open} open".format_map(count)
    assert told in study and told in numbers and f"{count['contradicted']} of {len(lines)} published claims" in guide


def test_rates_of_the_leaderboard():
    columns = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100, "parts")
    means = losses("leaderboard")
    tuned = [name for name in means if len(means[name]) > 1]
    for row in recipe.records("leaderboard", "class"):
        means[row["encoding"]]["parts"] = row["nll"]
    bold = {name: "parts" if "parts" in means[name] else multiplier_of(name) for name in tuned}
    same("leaderboard", 2, [by_multiplier(n, means[n], columns, bold[n]) for n in tuned])


def test_scale():
    found = json.loads((tables.HERE / "scale" / "measured.json").read_text())
    for number, made in enumerate((scale.sweeps_table(found), scale.processes_table(found))):
        assert bodies("scale")[number] == of_markdown(made)


def test_faults():
    outcomes = json.loads((tables.HERE / "faults" / "outcomes.json").read_text())
    expected = [
        [f"F{o['number']}", *(" ".join(o[name].split()) for name in ("what", "expected", "got"))] for o in outcomes
    ]
    assert bodies("faults")[1] == expected


@pytest.mark.slow
def test_coverage_of_simulated_texts():
    assert bodies("intervals")[0] == of_markdown("\n".join(coverage.simulated()))


@pytest.mark.slow
def test_coverage_of_several_seeds():
    """One line of the table, which takes minutes."""
    found = coverage.of_seeds(3, "normal", "equal", 2000, np.random.default_rng([0, 3]))
    (line,) = (row for row in bodies("intervals")[1] if row[:3] == ["normal", "equal", "3"])
    assert line[3:] == [f"{share:.1%}" for share in found.values()]


@pytest.mark.slow
def test_verdicts_on_unpaired_seeds():
    for number, lines in ((2, unpaired.wrong()), (3, unpaired.detected())):
        assert bodies("intervals")[number] == of_markdown("\n".join(lines))


@pytest.mark.slow
def test_verdicts_on_methods():
    """The first lines of the tables, which take a minute and a half."""
    for number, lines, count in ((4, verdicts.equal(), 3), (5, verdicts.unequal(), 2), (6, verdicts.erratic(), 4)):
        made = of_markdown("\n".join(itertools.islice(lines, count + 2)))
        assert bodies("intervals")[number][:count] == made


def test_every_table_of_a_readme_is_covered():
    """A table without a test is named here with its reason."""
    beside = {
        "faults": "exit codes", "scale": "printed by posx train --dry_run", "intervals": "of runs that are not kept",
    }  # fmt: skip
    tested = {
        "quick": 1,
        "variants": 1,
        STUDY: 5,
        "recipe": 5,
        "leaderboard": 4,
        "scale": 2,
        "faults": 1,
        "intervals": 7,
    }
    for study, count in tested.items():
        assert len(bodies(study)) == count + (study in beside), study
