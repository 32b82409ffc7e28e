"""Sweeps over any setting: what the axes make, what folders are called, and that finished runs are found again."""

import dataclasses
import json
import shlex
import shutil

import pytest

from posx.encodings import Encoding, Shaw
from posx.errors import ConfigError
from posx.lab.argv import split_words
from posx.lab.argv.files import read_config as config_named
from posx.lab.argv.files import read_config_file
from posx.lab.config import RunConfig, base_config, read_sections, run_config
from posx.lab.sweeps.plan import plan
from tests import tiny


@dataclasses.dataclass(frozen=True)
class Listing(Encoding):
    """Fields that hold more than plain numbers."""

    pairs: tuple[tuple[int, int], ...] = ((0, 1),)
    on: tuple[bool, ...] = (True, False)


def config_of(**axes):
    config = base_config("rope")
    config.sweep.update(encodings=("rope",), train_lens=(64,))
    config.sweep.axes = {name.replace("__", "."): values for name, values in axes.items()}
    return config.lock()


def planned(tmp_path, **axes):
    return {job.name: job.run for job in plan(read_sections(config_of(**axes)), tmp_path)}


def test_every_combination_is_a_run_named_by_what_varies(tmp_path):
    runs = planned(
        tmp_path, encoding=("rope(base=500000)+alibi", "t5(max_distance=128)"), train__learning_rate=(1e-3, 4e-3),
        train__seed=(0, 1), train__warmup_steps=(60,),
    )  # fmt: skip
    assert list(runs) == [
        f"{encoding}-L64-s{seed}-learning_rate={rate}"
        for encoding in ("rope-base=500000+alibi", "t5-max_distance=128")
        for rate in ("0.001", "0.004")
        for seed in (0, 1)
    ]
    run = runs["t5-max_distance=128-L64-s1-learning_rate=0.004"]
    assert (run.train.learning_rate, run.train.seed, run.layers[0].max_distance) == (4e-3, 1, 128)
    first = runs["rope-base=500000+alibi-L64-s0-learning_rate=0.001"].layers[0]
    assert [type(part).__name__ for part in first.parts] == ["Rope", "Alibi"] and first.parts[0].base == 5e5


def test_a_run_of_another_task_is_not_taken_for_this_one(tmp_path):
    """Whether or not its items are drawn, as for --dry_run and --status."""
    config = config_of()
    for source, text in (("task:parity", "1f"), ("task:s5", ""), ("stdlib", ""), ("task:parity", "1f")):
        config.data.source = source
        (job,) = plan(read_sections(config), tmp_path)
        if not job.folder.config_file.exists():
            job.folder.path.mkdir()
            job.folder.write_config(dataclasses.replace(job.run, text="1f", held_out="1f"))
        else:
            assert job.run.text == text, source


def test_axes_vary_in_the_order_of_their_names(tmp_path):
    steps, tied = {"train__steps": (100, 200)}, {"model__tied": (True, False)}
    one, other = (list(planned(tmp_path, **first, **second)) for first, second in ((steps, tied), (tied, steps)))
    assert one == other and one[1] == "rope-L64-s0-tied=True-steps=200"


def test_axes_of_layers_and_of_an_encodings_own_field(tmp_path):
    runs = planned(tmp_path, model__layer_policy=("encoding", ("encoding", "nope"), "(alibi(num_heads=4), encoding)"))
    layers = [[type(layer).__name__ for layer in run.layers] for run in runs.values()]
    assert layers == [["Rope"] * 4, ["Rope", "Nope"] * 2, ["Alibi", "Rope"] * 2]
    assert list(runs)[1] == "rope-L64-s0-layer_policy=encoding-nope"
    bases = planned(tmp_path, encoding__base=(100, 10000))
    assert [run.layers[0].base for run in bases.values()] == [100.0, 10000.0]


def test_the_lists_are_short_for_axes_which_override_them(tmp_path):
    config = config_of(train__seed=(3,))
    config.sweep.update(encodings=("rope", "my.module:Mine"), seeds=(0, 1), train_lens=(32, 64))
    with pytest.raises(ConfigError, match=r"encoding 'my.module:Mine' cannot be imported"):
        plan(read_sections(config), tmp_path)
    config.sweep.encodings = ("rope", "alibi")
    assert [job.name for job in plan(read_sections(config), tmp_path)] == [
        f"{encoding}-L{length}-s3" for length in (32, 64) for encoding in ("rope", "alibi")
    ]


def test_name_alone_means_the_encoding_the_config_chose(tmp_path):
    config = base_config("rope(base=50)")
    config.sweep.axes = {"encoding": ("rope", "rope(base=10000)", "alibi")}
    runs = {job.name: job.run.layers[0] for job in plan(read_sections(config), tmp_path)}
    assert list(runs) == ["rope-base=50-L64-s0", "rope-L64-s0", "alibi-L64-s0"]
    assert [runs[name].base for name in list(runs)[:2]] == [50.0, 10000.0]


def test_values_may_be_texts_lists_and_ranges(tmp_path):
    runs = planned(
        tmp_path, train__learning_rate=["1e-3"], model__tied=("True", "false"), train__seed=range(2),
        model__layer_policy=(["encoding", "nope"],),
    )  # fmt: skip
    assert [(run.model.tied, run.train.seed) for run in runs.values()] == [
        (t, s) for t in (True, False) for s in (0, 1)
    ]
    untied = planned(tmp_path, encoding=("tupe",), encoding__untied=("(0, 3)", "1"))
    assert [run.layers[0].untied for run in untied.values()] == [(0, 3), (1,)]


def test_names_that_would_be_too_long_or_the_same_are_told_apart(tmp_path):
    parts = [f"rope(base={base})" for base in range(2, 14)]
    long = list(planned(tmp_path, encoding=("+".join(parts), "+".join(parts[::-1]))))
    assert max(map(len, long)) < 130 and len(set(long)) == 2
    both = list(planned(tmp_path, data__text_column=("a b", "ab")))
    assert len(set(both)) == 2 and all("text_column=ab-" in name for name in both)


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        ({"train__learnin_rate": (1e-3,)}, "Nearest: train.learning_rate"),
        ({"sweep__seeds": (1,)}, "config key 'sweep.seeds' is unknown in sweep.axes"),
        ({"train__seed": ()}, "sweep.axes.train.seed is empty"),
        ({"train__seed": 3}, "must be a tuple of values"),
        ({"train__learning_rate": (1e-3, 0.001)}, "names a value twice"),
        ({"encoding": ("rope", "rope(base=10000)")}, "names a value twice"),
        ({"encoding": ("rope", "rope(bas=3)")}, "Did you mean 'base'"),
        ({"encoding": ("RoPE",)}, "Did you mean 'rope'"),
        ({"encoding": ("chain",)}, "encoding. Write the parts of a chain with +"),
        ({"encoding__slope": (1, 2)}, "encoding 'rope' has no field 'slope'"),
        ({"train__steps": (100, "many")}, "sweep.axes.train.steps=many: not a whole number"),
        ({"encoding__base": (int("9" * 400),)}, "9999: not a finite number"),
        ({"train__length": (64, 1)}, "train.length=1 must be at least 2"),
        ({"eval__stride": (8, 16)}, "eval.stride=8 and 16 are the same run: eval.protocols has no sliding"),
        (
            {"data__vocab_size": (300, 400)},
            "data.vocab_size=300 and 400 are the same run: data.tokenizer=bytes has its",
        ),
        ({"train__position_lr_multiplier": (1.0, 3.0)}, "are the same run: the encoding has no parameters"),
        ({"eval__protocols": (("sliding",), "sliding")}, "names a value twice"),
        ({"train__weight_decay": (-0.0, 0.0)}, "names a value twice"),
        ({"encoding": ("t5", "t5(num_buckets=30)")}, "encoding=t5 and t5(num_buckets=30) are the same run"),
        ({"train__seed": tuple(range(1001))}, "has 1001 runs, more than 1000"),
    ],
)
def test_one_line_for_axes_that_make_no_sense(tmp_path, axes, wanted):
    with pytest.raises(ConfigError) as error:
        planned(tmp_path, **axes)
    assert wanted in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["rope(base=500000)+alibi", "tupe(untied=(0, 3))", "t5(max_distance=128)"])
def test_a_run_of_any_spec_is_stored_and_read_again(tmp_path, spec):
    (run,) = planned(tmp_path, encoding=(spec,), model__layer_policy=(("encoding", "rope(base=50)"),)).values()
    again = RunConfig.from_json(json.loads(json.dumps(run.to_json())))
    assert again == run and again.hash == run.hash and len(set(run.layers)) == 2


def test_finished_runs_are_found_whatever_their_folder_name(capsys, site, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "of-another-day")
    words = [
        "sweep", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path}", "--dry_run",
        "--config.sweep.encodings=t5, t5(max_distance=5)", "--config.sweep.axes.train.learning_rate=2e-3,1e-3",
    ]  # fmt: skip
    code, out, err = tiny.call(capsys, *words)
    assert code == 0 and "4 runs, 1 of them finished" in out and "as measured in runs here" in out, err
    header, *rows = [line.split() for line in out.split("\n\n")[0].splitlines()]
    assert header[:3] == ["run", "encoding", "train.learning_rate"]
    assert [row[0] for row in rows] == [
        "of-another-day", "t5-L16-s0-learning_rate=0.001", "t5-max_distance=5-L16-s0-learning_rate=0.002",
        "t5-max_distance=5-L16-s0-learning_rate=0.001",
    ]  # fmt: skip
    assert [row[-1] for row in rows] == ["finished", "new", "new", "new"]
    assert {path.name for path in tmp_path.iterdir()} == {"of-another-day"}


def started(workdir, **axes):
    """The folder's name of a run of one job that has begun."""
    (job,) = plan(read_sections(config_of(**axes)), workdir)
    job.folder.path.mkdir(parents=True, exist_ok=True)
    job.folder.write_config(job.run)
    return job.name


def test_settings_that_a_sweep_does_not_use_are_named(capsys, site):
    words = ["sweep", f"--config={site / 'tiny.py'}", "--dry_run", "--config.sweep.encodings=rope"]
    code, _, err = tiny.call(
        capsys, *words, "--config.train.length=32", "--config.train.seed=0", "--config.train.steps=9"
    )
    assert code == 0 and [line.split()[1] for line in err.splitlines()] == ["--config.train.length=32"]
    code, _, err = tiny.call(capsys, *words, "--config.encoding=rope(base=50)")  # the rope that is meant
    assert code == 0 and "rope(base=50)" not in err
    field = ["--config.encoding=rope", "--config.encoding.base=50"]
    code, out, err = tiny.call(capsys, *words, *field)
    assert code == 0 and not err and "rope(base=50," in out
    code, _, err = tiny.call(capsys, *words, *field, "--config.sweep.axes.encoding=t5,alibi")
    assert code == 2 and "about the same setting" in err
    code, _, err = tiny.call(capsys, *words[:-1], *field, "--config.sweep.encodings=t5,alibi")
    assert code == 0 and [line.split()[1] for line in err.splitlines()] == field


def test_an_argument_that_changes_no_run_is_refused(capsys, site):
    """The encodings of a sweep are those of its axis; an argument says the fields of one of them, or nothing."""
    for encoding in ("rope", "alibi", "nope"):
        code, _, err = tiny.call(capsys, "sweep", f"--config={site / 'tiny.py'}:{encoding}", "--dry_run")
        assert code == 2 and f"without '{encoding}'" in err and f"--config.sweep.encodings={encoding}\n" in err
    code, out, err = tiny.call(capsys, "sweep", f"--config={site / 'tiny.py'}:rope(base=50)", "--dry_run")
    assert code == 0 and not err and "rope(base=50," in out


def test_a_mistake_of_all_runs_is_said_once(capsys, site):
    words = [f"--config={site / 'tiny.py'}", "--dry_run", "--config.sweep.seeds=0,1"]
    code, _, err = tiny.call(capsys, "sweep", *words, "--config.train.warmup_steps=99")
    steps = tiny.STEPS
    wanted = f"train.warmup_steps=99 must be below train.steps={steps}. Lower --config.train.warmup_steps"
    assert code == 2 and err == f"posx: {wanted} (4 runs, rope-L16-s0 is the first)\n"


def test_value_that_only_some_runs_use_makes_no_equal_runs(tmp_path):
    runs = planned(tmp_path, data__tokenizer=("bytes", "bpe"), data__vocab_size=(300, 400))
    assert [(run.data.tokenizer, run.data.vocab_size) for run in runs.values()] == [
        ("bytes", 300), ("bpe", 300), ("bpe", 400),
    ]  # fmt: skip


def test_settings_that_no_run_uses_are_named(capsys, site, whole):
    words = ["--config.eval.stride=4", "--config.data.vocab_size=999", "--config.data.subset=x"]
    more = ["--config.train.position_lr_multiplier=3", "--config.train.steps=9"]
    code, _, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:rope", "--dry_run", *words, *more)
    assert code == 0 and [line.split()[1] for line in err.splitlines()] == [*words, more[0]]
    code, _, err = tiny.call(capsys, "sweep", f"--config={site / 'tiny.py'}", "--dry_run", *words, *more)
    assert code == 0 and [line.split()[1] for line in err.splitlines()] == [*words, more[0]]
    used = ["--config.eval.protocols=sliding", "--config.eval.stride=4"]
    code, _, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:t5", "--dry_run", *used, more[0])
    assert code == 0 and not err
    none = ["--config.model.layer_policy=nope", "--config.encoding.num_buckets=8"]
    code, _, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:t5", "--dry_run", *none)
    assert code == 0 and f"{none[1]} is not used: no layer of model.layer_policy is 'encoding'" in err
    for name, positions, why in (
        ("nope", "randomised(longest=99)", "no encoding reads positions"),
        ("t5", "offset(longest=99)", "the encodings see distances alone, which offsets do not change"),
        ("t5", "randomised(longest=99)", ""),
    ):
        word = f"--config.train.positions={positions}"
        code, _, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:{name}", "--dry_run", word)
        assert code == 0 and err.strip() == (f"notice: {word} is not used: {why}" if why else "")
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={whole}", "--dry_run", "--stride=4")
    assert code == 0 and "--stride=4 is not used: eval.protocols has no sliding" in err
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={whole}", "--dry_run", "--stride=4", "--protocol=sliding")
    assert code == 0 and "not used" not in err


def test_a_config_files_argument_may_be_no_encoding(capsys, site, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        f"import runpy\n\ndef get_config(arg):\n    return runpy.run_path({str(site / 'tiny.py')!r})['get_config']()\n"
    )
    code, _, err = tiny.call(capsys, "sweep", f"--config={path}:tuning", "--dry_run", "--config.sweep.encodings=rope")
    assert code == 0 and "notice" not in err


def test_no_two_jobs_share_a_folder_whatever_was_there_before(tmp_path, capsys):
    first, second = (started(tmp_path, train__learning_rate=(rate,)) for rate in (1e-3, 2e-3))
    assert first == "rope-L64-s0" and second.startswith("rope-L64-s0-")
    assert f"the new runs go to {second} (train.learning_rate: 0.001 -> 0.002)" in capsys.readouterr().err
    assert started(tmp_path, train__learning_rate=(2e-3,)) == second
    names = list(planned(tmp_path, train__learning_rate=(2e-3, 1e-3, 3e-3)))
    assert names == [second, first, "rope-L64-s0-learning_rate=0.003"]


def test_a_run_in_a_folder_named_as_another_of_the_same_sweep(tmp_path):
    started(tmp_path, encoding=("rope(base=50)",))
    (tmp_path / "rope-base=50-L64-s0").rename(tmp_path / "rope-L64-s0")
    rope, other = planned(tmp_path, encoding=("rope", "rope(base=50)"))
    assert other == "rope-L64-s0" and rope.startswith("rope-L64-s0-")


def test_flags_take_any_spec(capsys, site):
    words = ["train", f"--config={site / 'tiny.py'}", "--dry_run"]
    code, out, _ = tiny.call(capsys, *words, "--config.encoding.name=t5")  # whose fields are not those of alibi
    assert code == 0 and "T5(num_buckets=" in out
    code, out, _ = tiny.call(capsys, *words, "--config.encoding=rope(base=50)+alibi")
    assert code == 0 and "Rope(base=50.0" in out and "Alibi(" in out
    code, out, _ = tiny.call(
        capsys, *words, "--config.encoding=t5(max_distance=5)", "--config.encoding.max_distance=auto"
    )
    assert code == 0 and "max_distance=8" in out
    code, out, _ = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:rope(base=50)+alibi", "--dry_run")
    assert code == 0 and "Rope(base=50.0" in out
    code, out, _ = tiny.call(
        capsys, *words, "--config.model.num_layers=2", "--config.model.layer_policy=encoding,t5(max_distance=5)"
    )
    assert code == 0 and "Alibi(" in out and "max_distance=5" in out
    own = "tests.lab.sweeps.test_axes:Listing"
    code, out, _ = tiny.call(
        capsys,
        *words,
        f"--config.encoding={own}",
        "--config.encoding.pairs=(1, 2), (3, 4)",
        "--config.encoding.on=False,",
    )
    assert code == 0 and "pairs=((1, 2), (3, 4)), on=(False,)" in out
    code, _, err = tiny.call(capsys, *words, "--config.encoding=rope(bse=50)")
    assert code == 2 and "Did you mean 'base'" in err


AXES = """
from posx.lab.config import base_config

def get_config(arg: str = "tests.lab.sweeps.test_axes:Listing"):
    config = base_config(arg).lock()
    config.sweep.axes = {
        "encoding": [{"name": "rope", "base": 5}, ["rope", "alibi"], arg],
        "model.layer_policy": (("encoding", "nope"), ["encoding"], "encoding, rope(base=7, layout=interleaved)"),
        "train.learning_rate": (1, "2e-3"), "data.text_column": ("a, b", "c"), "train.seed": range(2),
    }
    return config
"""


def test_axes_are_printed_as_they_can_be_typed(capsys, site, tmp_path):
    (tmp_path / "axes.py").write_text(AXES)
    words = ["sweep", f"--config={tmp_path / 'axes.py'}", "--print_config"]
    _, printed, _ = tiny.call(capsys, *words)
    typed = [shlex.split(line)[0] for line in printed.splitlines() if line.startswith(("-", "'"))]
    first = read_config_file(str(tmp_path / "axes.py")).sections()
    again = config_named(split_words(["--config", str(site / "tiny.py"), *typed], {})[0])
    assert [job.point for job in plan(again, tmp_path)] == [job.point for job in plan(first, tmp_path)]
    assert run_config(again) == run_config(first)
    assert "--config.sweep.axes.encoding=rope(base=5),rope+alibi," in printed


def test_axes_of_a_config_file_that_are_no_mapping(tmp_path):
    (tmp_path / "none.py").write_text(
        AXES.replace("    return config", "    config.sweep.axes = None\n    return config")
    )
    with pytest.raises(ConfigError, match="sweep.axes must map settings to their values"):
        read_config_file(str(tmp_path / "none.py")).sections()


@pytest.mark.parametrize("values", ["3", "'1e-3,2e-3'", "{1e-3: 2e-3}", "{1e-3, 2e-3}", "None", "len"])
def test_axis_of_a_file_that_is_no_tuple_is_one_line(capsys, tmp_path, values):
    path = tmp_path / "own.py"
    path.write_text(
        "from posx.lab.config import base_config\n\ndef get_config():\n    config = base_config('rope')\n"
        f"    config.sweep.axes = {{'train.learning_rate': {values}}}\n    return config\n"
    )
    for word in ("--print_config", "--dry_run"):
        code, _, err = tiny.call(capsys, "sweep", f"--config={path}", word)
        assert code == 2 and "sweep.axes.train.learning_rate=" in err and "must be a tuple of values" in err
        assert len(err.splitlines()) == 1


def test_sweep_of_config_json_is_that_run_at_given_axes(capsys, whole, tmp_path):
    words = ["sweep", f"--config_json={whole / 'config.json'}", f"--workdir={tmp_path}", "--dry_run"]
    code, out, err = tiny.call(capsys, *words, "--config.sweep.axes.train.seed=(3, 4)")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:3]] == ["t5-L16-s3", "t5-L16-s4"], err


def sweep_of(site, workdir, *words):
    """The words of a dry run of one encoding."""
    return [
        "sweep", f"--config={site / 'tiny.py'}", f"--workdir={workdir}", "--config.sweep.encodings=rope", "--dry_run",
        *words,
    ]  # fmt: skip


WIDTHS = ("--config.sweep.axes.model.model_dim=32,64,64", "--config.sweep.axes.model.num_heads=2,4,8")


def test_zipped_axes_advance_together_as_one_axis(capsys, site, tmp_path):
    together = ["--config.sweep.zip=model.model_dim+model.num_heads", "--config.sweep.seeds=0,1"]
    code, out, err = tiny.call(capsys, *sweep_of(site, tmp_path, *WIDTHS, *together))
    assert code == 0 and not err, err
    header, *rows = [line.split() for line in out.split("\n\n")[0].splitlines()]
    assert header[:4] == ["run", "model.model_dim", "model.num_heads", "train.seed"]
    assert [row[0] for row in rows] == [
        f"rope-L16-s{seed}-model_dim={width}-num_heads={heads}"
        for width, heads in ((32, 2), (64, 4), (64, 8))
        for seed in (0, 1)
    ]
    _, printed, _ = tiny.call(capsys, *sweep_of(site, tmp_path, *WIDTHS, *together), "--print_config")
    typed = [shlex.split(line)[0] for line in printed.splitlines() if line.startswith(("-", "'"))]
    assert together[0] in typed
    code, again, _ = tiny.call(capsys, "sweep", f"--config={site / 'tiny.py'}", "--dry_run", *typed)
    assert code == 0 and [line.split()[0] for line in again.splitlines()[1:7]] == [row[0] for row in rows]


def test_zip_takes_lists_by_short_and_long_names(tmp_path):
    config = config_of(train__learning_rate=(1e-3, 2e-3), data__source=("a", "b"), data__tokenizer=("bytes", "bpe"))
    config.sweep.encodings = ("rope", "alibi")
    found = []
    for name in ("encoding", "encodings"):
        config.sweep.zip = (f"{name} + train.learning_rate", "data.source+data.tokenizer")
        found.append([job.run for job in plan(read_sections(config), tmp_path)])
    told = [(r.encoding, r.train.learning_rate, r.data.source, r.data.tokenizer) for r in found[0]]
    assert told == [
        (*pair, *text) for pair in (("rope", 1e-3), ("alibi", 2e-3)) for text in (("a", "bytes"), ("b", "bpe"))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["model.model_dim+model.num_heads"], "model.model_dim has 3 values, model.num_heads has 2 values"),
        (["model.model_dim+train.learnin_rate"], "Nearest: train.learning_rate"),
        (["model.model_dim+train.steps"], "train.steps has no axis. Add --config.sweep.axes.train.steps=VALUES"),
        (["model.model_dim"], "one axis"),
        (["model.model_dim+model.model_dim"], "model.model_dim is joined twice"),
        (["model.model_dim+encodings,seeds+model.model_dim"], "is joined twice"),
    ],
)
def test_axes_that_cannot_be_zipped_are_one_line(capsys, site, tmp_path, words, wanted):
    axes = ["--config.sweep.axes.model.model_dim=32,64,96", "--config.sweep.axes.model.num_heads=2,4"]
    more = ["--config.sweep.encodings=rope,alibi,t5", "--config.sweep.axes.train.seed=0,1,2"]
    words = ["sweep", f"--config={site / 'tiny.py'}", "--dry_run", *axes, *more, f"--config.sweep.zip={words[0]}"]
    code, _, err = tiny.call(capsys, *words)
    assert code == 2 and wanted in err and len(err.splitlines()) == 1, err


def test_two_equal_steps_of_zipped_axes_are_refused(tmp_path):
    config = config_of(model__model_dim=(64, 128, 64), model__num_heads=(4, 8, 4))
    config.sweep.zip = ("model.model_dim+model.num_heads",)
    with pytest.raises(ConfigError, match=r"model.model_dim\+model.num_heads names a value twice: 64 with 4"):
        plan(read_sections(config), tmp_path)


@pytest.mark.slow
def test_zipped_sweep_runs_and_resumes(capsys, site, tmp_path):
    words = [
        "sweep", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'zip'}", "--config.sweep.encodings=rope",
        "--config.sweep.axes.model.model_dim=32,64", "--config.sweep.axes.model.num_heads=2,4",
        "--config.sweep.zip=model.model_dim+model.num_heads", "--config.train.steps=3",
        "--config.eval.lengths=16", "--config.eval.protocols=nonoverlapping", "--config.eval.num_targets=32",
    ]  # fmt: skip
    code, out, err = tiny.call(capsys, *words)
    assert code == 0, err
    names = ["rope-L16-s0-model_dim=32-num_heads=2", "rope-L16-s0-model_dim=64-num_heads=4"]
    assert sorted(path.parent.name for path in (tmp_path / "zip").glob("*/DONE")) == names
    assert "| rope, model_dim=32, num_heads=2 |" in out and "| rope, model_dim=64, num_heads=4 |" in out
    code, _, err = tiny.call(capsys, *words)
    assert code == 0 and "2 of 2 runs are finished already" in err
    one = RunConfig.from_json(json.loads((tmp_path / "zip" / names[1] / "config.json").read_text()))
    assert (one.model.model_dim, one.model.num_heads) == (64, 4)


def test_multiples_of_a_rate_at_which_nothing_learns_are_one_run(tmp_path):
    rates = (1.0, 3.0, 10.0)
    found = list(planned(tmp_path, encoding=("rope", "t5"), train__position_lr_multiplier=rates))
    assert found == [
        "rope-L64-s0-position_lr_multiplier=1",
        *(f"t5-L64-s0-position_lr_multiplier={n:.0f}" for n in rates),
    ]
    runs = planned(tmp_path, encoding=("shaw",), train__position_lr_multiplier=(0.0, Shaw.about.lr_multiplier))
    assert len(runs) == 1, "what the class says, asked for by number"
