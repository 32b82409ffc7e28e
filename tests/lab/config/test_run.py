"""A run is its resolved settings: equal hashes mean the same run, and `config.json` gives the run back."""

import dataclasses
import hashlib
import json

import pytest

import posx
from posx import encodings
from posx.contract import Encoding
from posx.encodings import Alibi, from_spec, spec_of
from posx.errors import ConfigError
from posx.lab.config import RunConfig, base_config, run_config
from posx.lab.config.run import SCHEMA_VERSION
from posx.lab.config.sections import ModelConfig
from tests import tiny

ALIBI = Alibi()
DIMS = posx.Dims(model_dim=32, num_heads=4, head_dim=8, num_layers=2, train_len=48)


@dataclasses.dataclass(frozen=True)
class Nested(Encoding):
    """A user's encoding with encodings inside."""

    inner: Encoding = ALIBI
    gain: float | None = None
    others: tuple[Encoding, ...] = ()

    def resolve(self, dims):
        inner, others = self.inner.resolve(dims), tuple(other.resolve(dims) for other in self.others)
        return dataclasses.replace(self, inner=inner, others=others).fill_open(gain=2.0)


def run_of(encoding="t5", **sections):
    """Return a run whose sections have other values: run_of(train={"steps": 5})."""
    config = base_config(encoding)
    for name, values in sections.items():
        config[name].update(values)
    return run_config(config)


@pytest.fixture
def other_rules(monkeypatch):
    """Resolve open settings as another version of posx may do."""
    monkeypatch.setattr(
        encodings.ENCODINGS["t5"], "resolve", lambda self, _: self.fill_open(num_buckets=6, max_distance=32)
    )
    monkeypatch.setattr(ModelConfig, "hidden_dim", property(lambda self: self.mlp_dim or 3 * self.model_dim))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"encoding": "t5(num_buckets=30)"}),
        ({}, {"model": {"mlp_dim": 512, "num_kv_heads": 4}}),
        ({}, {"train": {"position_lr_multiplier": encodings.T5.about.lr_multiplier}}),
        ({}, {"train": {"log_steps": 3, "checkpoint_steps": 7, "dispatch_steps": 2, "keep_checkpoints": 9}}),
        ({}, {"eval": {"lengths": (64, 4096), "stride": 3}}),
        ({}, {"data": {"cache_dir": "/elsewhere", "vocab_size": 999}}),
        ({}, {"model": {"layer_policy": ("encoding", "t5")}}),
    ],
)
def test_equal_settings_are_one_run_however_they_are_given(old, new):
    assert run_of(**old).hash == run_of(**new).hash


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"encoding": "t5(num_buckets=8)"}, "encoding.num_buckets: 30 -> 8"),
        ({"model": {"remat": "layer"}}, "model.remat: 'none' -> 'layer'"),
        ({"train": {"position_lr_multiplier": 2.0}}, "train.position_lr_multiplier: 10.0 -> 2.0"),
        ({"train": {"seed": 1}}, "train.seed: 0 -> 1"),
        ({"data": {"layout": "line"}}, "data.layout: 'document' -> 'line'"),
        ({"model": {"layer_policy": ("encoding", "nope")}}, "layers.1.name: None -> 'nope'"),
    ],
)
def test_another_setting_is_another_run_and_is_named(change, told):
    old, new = run_of(), run_of(**change)
    assert old.hash != new.hash and told in old.differences(new)


def test_text_is_named_by_its_digest_and_not_by_its_path():
    one, other = (run_of(data={"source": source}) for source in ("here.txt", "there.txt"))
    assert one.hash != other.hash
    read = [dataclasses.replace(run, text="abc") for run in (one, other)]
    assert read[0].hash == read[1].hash and read[0].settings["data"] == "abc"
    assert dataclasses.replace(one, text="def").hash != read[0].hash


@pytest.mark.parametrize(
    "spec", ["rope+t5(per_layer=true)", f"{__name__}:Nested(inner=shaw(values=false), others=(t5,))"]
)
def test_config_json_gives_the_run_back(other_rules, spec):
    run = dataclasses.replace(run_of(spec, model={"layer_policy": ("encoding", "nope")}), text="abc")
    again = RunConfig.from_json(json.loads(json.dumps(run.to_json())))
    assert again == run and again.hash == run.hash and again.asked == run.asked and again.encoding == run.encoding


def test_stored_run_keeps_its_settings_when_rules_change(request):
    values = json.loads(json.dumps(run_of().to_json()))
    request.getfixturevalue("other_rules")
    held = RunConfig.from_json(values)
    assert held.layers[0].num_buckets == 30 and held.model.mlp_dim == 512
    told = held.differences(run_of())
    assert told == ["encoding.num_buckets: 30 -> 6", "model.mlp_dim: 512 -> 384"]


def test_settings_that_come_or_go_raise_the_schema_version():
    """They change the hash of every run: older folders are refused by their version, and not as edited."""
    names = sorted(name for name in run_of().settings if name.partition(".")[0] in ("model", "train"))
    assert (SCHEMA_VERSION, len(names), hashlib.sha256(",".join(names).encode()).hexdigest()[:8]) == (8, 36, "8971589b")


@pytest.mark.parametrize("version", [None, "3", 0, 2, 99])
def test_other_schema_version_is_refused(version):
    with pytest.raises(ConfigError, match="schema_version"):
        RunConfig.from_json(run_of().to_json() | {"schema_version": version})


@pytest.mark.parametrize(
    ("section", "setting"),
    [("model", "qk_norm"), ("train", "beta2"), ("rates", None), ("layers", None), ("asked", None)],
)
def test_config_json_that_lacks_something_is_refused(section, setting):
    values = run_of(train={"beta2": 0.97}, model={"qk_norm": True}).to_json()
    if setting:
        del values[section][setting]
    else:
        del values[section]
    with pytest.raises(ConfigError, match=r"hash|damaged"):
        RunConfig.from_json(values)


def test_config_json_with_too_large_a_rate_is_refused():
    values = run_of("t5").to_json()
    values["rates"][0]["table"]["lr_multiplier"] = 10**400
    with pytest.raises(ConfigError, match="settings are damaged: OverflowError"):
        RunConfig.from_json(values)


def test_edited_config_json_is_refused():
    values = run_of().to_json()
    values["train"]["steps"] = 5
    with pytest.raises(ConfigError, match="It was edited"):
        RunConfig.from_json(values)


@pytest.mark.parametrize("name", [*encodings.ENCODINGS, f"{__name__}:Nested"])
def test_the_spec_of_a_value_gives_the_value(name):
    value = posx.build(name, DIMS)
    found = json.loads(json.dumps(spec_of(value)))
    assert from_spec(found) == value and "auto" not in json.dumps(found) and "null" not in json.dumps(found)


def test_changed_default_makes_another_run_and_says_why(capsys, site, whole, request):
    request.getfixturevalue("other_rules")
    words = [f"--config={site / 'tiny.py'}", "--dry_run"]
    code, _, err = tiny.call(capsys, "train", f"{words[0]}:t5", words[1], f"--workdir={whole}")
    assert code == 4 and "encoding.num_buckets: " in err and "model.mlp_dim: 128 -> 96" in err, err
    code, out, err = tiny.call(capsys, "train", f"--config_json={whole / 'config.json'}", "--dry_run")
    assert code == 0 and "T5(num_buckets=6" not in out and "T5(num_buckets=" in out, (
        "the file of a run repeats it as it was"
    )
