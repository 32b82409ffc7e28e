"""Runs stay what they were: by the files they left, whatever today's defaults and rules are.

`old_runs/t5-L48-s0` is a run made when config.json was of schema 1, `old_runs/configs` are the settings of others.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import posx
from posx import encodings
from posx.config import RunConfig, base_config, flags, run_config, stored
from posx.config.model import ModelConfig
from posx.encodings import Alibi, Chain, Dims, Encoding, Rope, from_spec, spec_of
from posx.encodings.rates import Rate
from posx.runs.describe import count, model_of
from posx.runs.folder import RunFolder
from posx.sweeps import plan as sweep
from tests import tiny

ROOT = Path(__file__).parent
OLD = ROOT / "old_runs" / "t5-L48-s0"
CONFIGS = [*sorted((ROOT / "old_runs" / "configs").glob("*.json")), OLD / "config.json"]
COMMITTED = sorted(ROOT.parents[1].glob("experiments/*/**/config.json"))
DIMS = Dims(model_dim=32, num_heads=2, head_dim=16, num_layers=2, train_len=16)

#: Other rules than those of any version: what open fields are resolved to.
OTHER_RULES = {
    "t5": {"num_buckets": 6, "max_distance": 11},
    "shaw": {"max_distance": 3},
    "rope": {"rotary_dim": 2},
    "deberta": {"max_distance": 5},
    "learned": {"num_positions": 7},
    "tupe": {"num_positions": 7},
    "alibi": {"num_heads": 1},
}

#: The command's settings that made the old run.
SETTINGS = """
from posx.config import base_config

def get_config(arg: str = "t5"):
    config = base_config(arg)
    config.data.update(source="text", cache_dir="cache")
    config.model.update(num_layers=2, model_dim=4, num_heads=2, layer_policy=("encoding", "shaw"))
    config.train.update(
        length=48, batch_size=4, steps=3, warmup_steps=1, log_steps=1, checkpoint_steps=3, keep_checkpoints=1
    )
    config.eval.update(lengths=(48, 96), protocols=("nonoverlapping",), num_targets=192, sliding_targets=16384)
    config.sweep.update(encodings=("t5",), train_lens=(48,))
    return config.lock()
"""


@pytest.fixture
def other_rules(monkeypatch):
    """posx as it may be one day: every field that was left open is resolved otherwise, and sizes as well."""
    for name, fields in OTHER_RULES.items():
        monkeypatch.setattr(encodings.ENCODINGS[name], "resolve", lambda self, dims, f=fields: self.fill_open(**f))
        monkeypatch.setattr(encodings.ENCODINGS[name], "about", posx.About(lr_multiplier=7.0))
    monkeypatch.setattr(ModelConfig, "hidden_dim", property(lambda self: self.mlp_dim or 3 * self.model_dim))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the old run in `runs`, its text and the settings of its command."""
    monkeypatch.chdir(tmp_path)
    tiny.write_text(tmp_path / "text")
    (tmp_path / "old.py").write_text(SETTINGS)
    (tmp_path / "cache" / "machine").mkdir(parents=True)
    tiny.write_ceilings(tmp_path / "cache" / "machine")
    shutil.copytree(OLD, tmp_path / "runs" / OLD.name)
    return tmp_path


def unfinished(place: Path) -> list[sweep.Job]:
    """What the sweep that made the old run would have to run, its text read anew."""
    return sweep.unfinished(sweep.plan(flags.load_config({"config": str(place / "old.py")}), place / "runs"))


def layers(config: Path) -> list[str]:
    return [repr(encoding) for encoding in stored.from_stored(json.loads(config.read_text())).resolution.layers]


def same_numbers(folder) -> None:
    """Log-probabilities of the old run as the posx of then gave them."""
    apply, params, _ = posx.load(folder)
    found = jax.nn.log_softmax(apply(params, (np.arange(120, dtype=np.int32) * 7 % 257)[None]))
    np.testing.assert_allclose(found[0, [10, 50, 119], 5], [-5.544507, -5.5578012, -5.5604253], atol=2e-6)
    np.testing.assert_allclose(found[0, :, 3].mean(), -5.572976589202881, atol=2e-6)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_settings_of_schema_1_give_the_encodings_they_were_resolved_to(other_rules, path):
    written = json.loads(path.read_text())
    run = stored.from_stored(written)
    wanted = [
        text.replace("head_dim=32", "head_dim=0").replace(", stretched_to=0", "")  # nothing read either of them
        for text in written["resolved"]["encodings"]
    ]
    assert layers(path) == wanted
    assert count(model_of(run, 257)) == written["resolved"]["num_params"]
    again = stored.from_stored(json.loads(json.dumps(stored.to_stored(run))))
    assert again == run and stored.digest(again) == stored.digest(run)


def test_a_field_that_is_gone_is_dropped_but_keeps_the_name():
    """`stretched_to` was 0 in every run, and its digest is in the rows of committed runs."""
    folder = ROOT.parents[1] / "experiments/train_short_test_long/results/learned-L64-s0"
    values = json.loads((folder / "config.json").read_text())
    assert values["resolved"]["layers"][0]["stretched_to"] == 0
    text, row = values["resolved"]["data"]["digest"], json.loads((folder / "eval.jsonl").read_text().splitlines()[0])
    run = stored.from_stored(values)
    assert stored.identity(run, text) == row["digest"]
    assert "stretched_to" not in json.dumps(stored.to_stored(run))
    values["resolved"]["layers"][0]["stretched_to"] = 96
    with pytest.raises(posx.errors.ConfigError, match="no field 'stretched_to'"):
        stored.from_stored(values)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.parent.name)
def test_every_committed_run_is_read(path):
    run = stored.from_stored(json.loads(path.read_text()))
    assert count(model_of(run, 257)) == json.loads(path.read_text())["resolved"]["num_params"]


def test_an_old_run_trains_its_positions_like_all_else_unless_another_multiplier_is_asked_for(other_rules):
    """What its class says today, and what decays today, is nothing to it; a multiplier changes that alone."""
    held = stored.from_stored(json.loads((OLD / "config.json").read_text()))
    assert {rate for layer in held.resolution.rates for _, rate in layer} == {Rate()}
    new = dataclasses.replace(held, stored=None)

    def asked(multiplier: float) -> RunConfig:
        train = dataclasses.replace(new.train, position_lr_multiplier=multiplier)
        return stored.like(dataclasses.replace(new, train=train), held)

    assert stored.identity(asked(0.0)) == stored.identity(asked(1.0)) == stored.identity(held)
    assert not stored.differences(held, asked(1.0)) and asked(3.0).resolution.layers == held.resolution.layers
    assert {rate for layer in asked(3.0).resolution.rates for _, rate in layer} == {Rate(3.0)}
    assert stored.identity(asked(3.0)) != stored.identity(held)
    told = "; ".join(stored.differences(held, asked(3.0)))
    assert "rates.0.table: None -> Rate(lr_multiplier=3.0, decays=False)" in told, told


@pytest.mark.slow
def test_an_old_run_is_found_loaded_and_resumed_as_it_was(capsys, place, other_rules):
    folder = RunFolder(place / "runs" / OLD.name)
    same_numbers(folder.path)
    words = [f"--config={place / 'old.py'}", f"--workdir={place / 'runs'}"]
    code, out, err = tiny.call(capsys, "sweep", *words, "--dry_run")
    assert code == 0 and "t5(num_buckets=24, max_distance=24" in out and "1 runs, 1 of them finished" in out, err
    assert unfinished(place) == []
    code, _, err = tiny.call(capsys, "train", words[0], f"--workdir={folder.path}")
    assert code == 0, err
    written = json.loads(folder.config_file.read_text())
    assert written["schema_version"] == 2 and layers(folder.config_file) == layers(OLD / "config.json")
    row = tiny.rows(folder.eval_file)[-1]
    assert row["schema_version"] == 3 and row["encoding"] == "t5" and row["layers"] == ["t5", "shaw"]
    assert unfinished(place) == []
    same_numbers(folder.path)
    code, out, _ = tiny.call(capsys, "train", words[0], f"--workdir={place / 'new'}", "--dry_run")
    assert code == 0 and "T5(num_buckets=6, max_distance=11" in out  # a run that starts now follows the rules of now


def test_only_what_was_left_open_is_taken_from_the_stored_run(capsys, place, other_rules):
    def resumed(*words: str) -> tuple[int, str]:
        folder = place / "runs" / OLD.name
        code, _, err = tiny.call(capsys, "train", f"--config={place / 'old.py'}", f"--workdir={folder}", *words)
        return code, err

    code, err = resumed("--config.encoding.num_buckets=8")
    assert code == 4 and "layers.0.num_buckets: 24 -> 8" in err and "T5" not in err
    code, err = resumed("--config.model.layer_policy=encoding,nope")
    assert code == 4 and "layers.1.name: 'shaw' -> 'nope'" in err
    code, err = resumed("--config.model.mlp_dim=20")
    assert code == 4 and "model.mlp_dim: 16 -> 20" in err
    before = (place / "runs" / OLD.name / "eval.jsonl").read_bytes()
    assert resumed("--config.encoding.num_buckets=24", "--config.model.mlp_dim=16")[0] == 0
    # Its rows stay; today's targets are others, so they are scored beside them.
    assert (place / "runs" / OLD.name / "eval.jsonl").read_bytes().startswith(before)
    # What was asked for first is kept: left open once more, it is still this run.
    assert resumed()[0] == 0


def test_a_value_that_was_given_is_not_taken_for_one_left_open(other_rules):
    """The run was given 24 buckets by hand; asked for whatever is best, today's answer is another."""
    values = json.loads((OLD / "config.json").read_text())
    values["encoding"]["num_buckets"] = 24
    held = stored.from_stored(values)
    asked = dataclasses.replace(held, encoding=held.encoding | {"num_buckets": "auto"}, stored=None)
    assert stored.like(asked, held) is asked
    assert "layers.0.num_buckets: 24 -> 6" in stored.differences(held, asked)


def test_settings_of_an_earlier_run_are_repeated_as_they_were(capsys, place, other_rules):
    words = ["train", f"--config_json={place / 'runs' / OLD.name / 'config.json'}", "--dry_run"]
    code, out, err = tiny.call(capsys, *words)
    assert code == 0 and "T5(num_buckets=24, max_distance=24" in out and "2,640 parameters" in out, err
    code, out, _ = tiny.call(capsys, *words, "--config.train.length=96")
    assert code == 0 and "T5(num_buckets=6, max_distance=11" in out  # another question, and today's answer


@pytest.mark.parametrize(
    "words", [["evaluate"], ["generate"], ["train", "--config=old.py"]], ids=lambda words: words[0]
)
def test_a_schema_of_the_future_is_refused(capsys, place, words):
    path = place / "runs" / OLD.name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    code, _, err = tiny.call(capsys, *words, f"--workdir={path.parent}")
    assert code == 4 and err.count("\n") == 1 and "schema_version=99" in err and str(path) in err, err
    code, _, err = tiny.call(capsys, "train", f"--config_json={path}", "--dry_run")
    assert code == 2 and err.count("\n") == 1 and "schema_version=99" in err, err


@pytest.mark.parametrize("version", [None, "1", 0, 1.5])
def test_what_is_no_schema_is_refused(version):
    with pytest.raises(posx.errors.ConfigError, match="schema_version"):
        stored.from_stored({"schema_version": version})


def test_a_setting_that_a_file_lacks_means_what_it_meant_before(monkeypatch):
    values = json.loads((ROOT / "old_runs" / "configs" / "rope.json").read_text())
    assert "remat" not in values["model"] and "dispatch_steps" not in values["train"]
    other = tuple((vars(ModelConfig()) | {"remat": "layer"}).values())
    monkeypatch.setattr(ModelConfig.__init__, "__defaults__", other)
    assert ModelConfig().remat == "layer"
    run = stored.from_stored(values)
    assert run.model.remat == run.resolution.model.remat == "none" and run.train.dispatch_steps == 1


@pytest.mark.parametrize("setting", ["model.qk_norm", "train.beta2", "data.layout", "eval.stride"])
def test_a_setting_that_always_was_there_is_not_made_up(setting):
    values = json.loads((OLD / "config.json").read_text())
    where, name = setting.split(".")
    del values[where][name]
    with pytest.raises(posx.errors.ConfigError, match=f"{setting} is missing"):
        stored.from_stored(values)


def test_fields_of_encodings_likewise(monkeypatch):
    run = stored.from_stored(json.loads((OLD / "config.json").read_text()))
    values = json.loads(json.dumps(stored.to_stored(run)))
    del values["resolved"]["layers"][1]["values"]
    with pytest.raises(posx.errors.ConfigError, match="shaw.values is missing"):
        stored.from_stored(values)
    # As if it had been added since, and had been False without saying so.
    monkeypatch.setitem(stored.ENCODINGS_BEFORE, "shaw", {"values": False})
    found = stored.from_stored(values)
    assert found.resolution.layers[1] == posx.build({"name": "shaw", "values": False}, run.model.dims(48))


def test_the_name_of_a_run_outlives_new_settings(other_rules):
    """What a run is called does not change as settings are added; it does where one of them says something else."""
    run = stored.from_stored(json.loads((OLD / "config.json").read_text()))
    assert stored.digest(run) == "7c8c7202"
    model = dataclasses.replace(run.resolution.model, remat="layer")
    other = dataclasses.replace(run, stored=dataclasses.replace(run.resolution, model=model))
    assert stored.digest(other) != stored.digest(run)


ALIBI = Alibi()


@dataclasses.dataclass(frozen=True)
class Around(Encoding):
    """A user's encoding with encodings inside."""

    inner: Encoding = ALIBI
    gain: float | None = None
    others: tuple[Encoding, ...] = ()

    def resolve(self, dims):
        inner, others = self.inner.resolve(dims), tuple(other.resolve(dims) for other in self.others)
        return dataclasses.replace(self, inner=inner, others=others).fill_open(gain=2.0)


VALUES = {
    **{name: name for name in encodings.ENCODINGS},
    "chain": ["rope", {"name": "t5", "per_layer": True}, [{"name": "alibi", "num_heads": 2}, "nope"]],
    "around": {"name": f"{__name__}:Around", "inner": {"name": "shaw", "values": False}, "others": ["t5"]},
}  # fmt: skip


@pytest.mark.parametrize("spec", VALUES.values(), ids=VALUES)
def test_the_spec_of_a_value_gives_the_value(other_rules, spec):
    value = posx.build(spec, DIMS)
    found = json.loads(json.dumps(spec_of(value)))
    assert from_spec(found) == value
    assert "auto" not in json.dumps(found) and "null" not in json.dumps(found)


def test_what_is_asked_inside_other_encodings_is_compared_as_well(other_rules):
    def run(spec) -> RunConfig:
        return dataclasses.replace(run_config(base_config("nope")), encoding=spec)

    old = ["rope", {"name": f"{__name__}:Around", "inner": {"name": "alibi", "num_heads": 4}}]
    dims = run(old).model.dims(64)
    value = Chain((Rope(rotary_dim=32), Around(Alibi(4), 1.5, ())))
    found = posx.config.Resolution((value,) * 4, run(old).model.resolved(), code=encodings.code_of([value]))
    held = dataclasses.replace(run(old), stored=found)
    assert posx.build(old, dims) != value
    for same in (old, [{"name": "rope", "rotary_dim": 32}, old[1] | {"gain": 1.5}]):
        assert stored.like(run(same), held).resolution == held.resolution
    inner = {"inner": {"name": "alibi"}}
    for other in ([old[0], old[1] | {"gain": 2.5}], [old[0], old[1] | inner], old[::-1], old[:1], "rope"):
        assert stored.like(run(other), held).stored is None
