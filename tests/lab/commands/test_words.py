"""The words of a command line: help, and one clear line for every wrong word and value."""

import shlex

import pytest

import posx
from posx.lab.cli import COMMANDS
from tests import tiny
from tests.lab.commands import refused

BAD_WORDS = {
    "no such command": (["trian"], ["command 'trian' is unknown", "Did you mean 'train'"]),
    "unknown key": (["train", "--config.model.model_dmi=64"], ["key 'model.model_dmi'", "Nearest: model.model_dim"]),
    "unknown key, short name": (["train", "--config.train.lr=2"], ["is unknown", "learning_rate"]),
    "section as a value": (["train", "--config.model=3"], ["config key 'model' is unknown"]),
    "unknown flag": (["train", "--workdri=x"], ["--workdri: this flag is unknown", "Did you mean --workdir"]),
    "another command's flag": (["train", "--num_tokens=3"], ["--num_tokens: this flag is unknown", "eval.num_items"]),
    "unknown flag of a command without settings": (["plot", "--steps=5"], ["unknown. The flags of this"]),
    "setting without its path": (["train", "--steps=5"], ["flag is unknown", "mean --config.train.steps=5?"]),
    "setting with hyphens": (["sweep", "--learning-rate=5"], ["mean --config.train.learning_rate=5?"]),
    "setting of evaluate without its path": (["evaluate", "--batch_tokens=5"], ["mean --config.eval.batch_tokens=5?"]),
    "encoding without its path": (["train", "--encoding=t5"], ["mean --config.encoding=t5?"]),
    "wrong value of a flag": (["generate", "--num_tokens=many"], ["posx: --num_tokens=many: not a whole number"]),
    "wrong number": (["sweep", "--gpus=some"], ["posx: --gpus=some: not a number"]),
    "wrong switch": (["train", "--dry_run=maybe"], ["posx: --dry_run=maybe: not true or false"]),
    "flag twice": (["plot", "--workdir=A", "--workdir", "B"], ["--workdir is given 2 times. Give it once."]),
    "a switch and its opposite": (["train", "--dry_run", "--nodry_run"], ["--dry_run is given 2 times"]),
    "config twice": (["train", "--config=other.py"], ["--config is given 2 times"]),
    "family twice": (["sweep", "--slurm.time=1", "--slurm.time=2"], ["--slurm.time is given twice"]),
    "setting twice": (
        ["train", "--config.train.steps=5", "--config.train.steps=6"],
        ["--config.train.steps=5 and --config.train.steps=6 are about the same setting"],
    ),
    "no process": (["train", "--process=-1", "--workdir=new"], ["--process=-1", "count from 1 and"]),
    "no processes": (["train", "--processes=0", "--workdir=new"], ["--processes=0", "count from 1 and"]),
    "stray word": (["train", "steps=3"], ["word 'steps=3' belongs to no flag", "--config.train.steps=3"]),
    "stray word without dashes": (["train", "config.lr=2"], ["'config.lr=2'", "--config.train.learning_rate=2"]),
    "wrong type": (["train", "--config.train.steps=many"], ["posx: --config.train.steps=many: not a whole number"]),
    "fraction for a whole number": (["train", "--config.train.steps=1.5"], ["steps", "1.5"]),
    "a flag of absl": (["train", "--undefok=x"], ["--undefok: this flag is unknown"]),
    "a file of flags": (["train", "--flagfile=x"], ["--flagfile: this flag is unknown"]),
    "a pair of dashes": (["train", "--", "--dry_run"], ["word '--dry_run' belongs to no flag. Leave out the lone --"]),
    "a flag for a value": (["train", "--workdir", "--dry_run"], ["--workdir has no value. Write --workdir=VALUE"]),
    "no value at the end": (["train", "--workdir"], ["--workdir has no value"]),
    "two sources": (["train", "--config_json=x.json"], ["--config and --config_json are both given"]),
    "no value": (["train", "--config.train.steps"], ["--config.train.steps has no value"]),
    "wrong tuple": (["train", "--config.eval.lengths=16,x"], ["--config.eval.lengths=16,x: x is not a whole number"]),
    "NaN": (["train", "--config.train.learning_rate=nan"], ["train.learning_rate=nan", "finite"]),
    "unknown field of the encoding": (["train", "--config.encoding.slope=2"], ["'encoding.slope' is unknown"]),
    "unknown executor": (["train", "--config.train.executor=fast"], ["train.executor='fast'", "dense"]),
    "unknown mlp": (["train", "--config.model.mlp=gleu"], ["model.mlp='gleu'", "gelu"]),
    "unknown dtype": (["train", "--config.model.dtype=float64"], ["model.dtype='float64'", "bfloat16"]),
    "unknown remat": (["train", "--config.model.remat=all"], ["model.remat='all'", "layer"]),
    "no steps in a call": (["train", "--config.train.dispatch_steps=0"], ["train.dispatch_steps=0", "at least 1"]),
    "unknown layer": (["train", "--config.model.layer_policy=nop"], ["encoding 'nop' is unknown", "nope"]),
    "layers that never occur": (
        ["train", "--config.model.num_layers=2", "--config.model.layer_policy=encoding,encoding,rope,nope"],
        ["model.layer_policy=encoding,encoding,rope,nope: rope and nope would be in none of the 2 layers"],
    ),
    "seeds of one run": (["train", "--config.sweep.seeds=0,1"], ["posx train makes one run", "--config.train.seed="]),
    "an axis of one run": (
        ["train", "--config.sweep.axes.model.model_dim=32,64"], ["posx sweep", "--config.model.model_dim=VALUE"],
    ),
    "zipped axes of one run": (["train", "--config.sweep.zip=a+b"], ["posx train makes one run"]),
    "width": (["train", "--config.model.model_dim=30", "--config.model.num_heads=4"], ["model_dim=30", "num_heads=4"]),
    "key/value heads": (["train", "--config.model.num_heads=4", "--config.model.num_kv_heads=3"], ["num_kv_heads=3"]),
    "many at once": (
        ["train", "--config.model.num_layers=0", "--config.train.steps=-1", "--config.train.batch_size=0",
         "--config.eval.lengths=0,16"],
        ["model.num_layers=0", "train.steps=-1", "train.batch_size=0", "eval.lengths=(0, 16)"],
    ),
    "warm-up": (["train", "--config.train.warmup_steps=32"], ["train.warmup_steps=32", "train.steps=32"]),
    "accumulation": (["train", "--config.train.accumulation=3"], ["train.accumulation=3", "train.batch_size=4"]),
    "seed": (["train", "--config.train.seed=-1"], ["train.seed=-1"]),
    "lengths not increasing": (["train", "--config.eval.lengths=32,16"], ["eval.lengths=(32, 16)", "increase"]),
    "a length twice": (["train", "--config.eval.lengths=16,16"], ["eval.lengths=(16, 16)", "once"]),
    "no lengths": (["train", "--config.eval.lengths=()"], ["eval.lengths is empty"]),
    "unknown protocol": (["train", "--config.eval.protocols=slidng"], ["'slidng' is unknown", "sliding"]),
    "a protocol twice": (
        ["train", "--config.eval.protocols=sliding,nonoverlapping,sliding"], ["names sliding twice"],
    ),
    "stride": (
        ["train", "--config.eval.protocols=sliding", "--config.eval.stride=17"],
        ["eval.stride=17", "shortest sliding window, 16"],
    ),
    "stride below zero": (["train", "--config.eval.stride=-1"], ["eval.stride=-1"]),
    "no --workdir": (["train"], ["--workdir is missing"]),
    "layers": (["train", "--config.model.num_layers=1000000000", "--workdir=new"], ["at most 4,096"]),
    "a width of 10^30": (["train", f"--config.model.model_dim={10**30}", "--workdir=new"], ["beyond all range"]),
    "home": (["train", "--config.data.source=~nosuch/x", "--workdir=new"], ["'~nosuch/x' can be no path"]),
    "work folder": (["train", "--workdir=~nosuch/x"], ["~nosuch/x is no path"]),
    "codec": (["train", "--config.data.text_encoding=rot13", "--workdir=new"], ["'rot13' is unknown"]),
    "jobs": (["sweep", "--jobs=-1", "--workdir=new"], ["--jobs=-1 must be at least 1"]),
    "an encoding twice": (["sweep", "--config.sweep.encodings=rope,rope", "--workdir=new"], ["names a value twice"]),
    "no encoding": (["sweep", "--config.sweep.encodings=()", "--workdir=new"], ["sweep.encodings is empty"]),
    "unknown in a sweep": (["sweep", "--config.sweep.encodings=rope,albi", "--workdir=new"], ["'albi'", "'alibi'"]),
    "too many runs": (
        ["sweep", f"--config.sweep.seeds={','.join(map(str, range(501)))}", "--workdir=new"], ["1002 runs"],
    ),
    "problems of several runs": (
        ["sweep", "--config.sweep.encodings=rope,t5", "--config.model.num_heads=16", "--config.model.model_dim=48",
         "--workdir=new"],
        ["rope-L16-s0", "even"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "wanted"), BAD_WORDS.values(), ids=BAD_WORDS.keys())
def test_wrong_words_and_values_are_one_line_and_start_nothing(capsys, site, tmp_path, monkeypatch, words, wanted):
    monkeypatch.chdir(tmp_path)
    config = [f"--config={site / 'tiny.py'}"] if words[0] in ("train", "sweep") else []
    refused(capsys, 2, [words[0], *config, *words[1:]], *wanted)
    assert list(tmp_path.iterdir()) == []


BAD_ENCODINGS = {
    "unknown": ("albi", [], ["encoding 'albi' is unknown", "Did you mean 'alibi'", "sinusoidal"]),
    "odd head width": ("rope", ["--config.model.model_dim=34", "--config.model.num_heads=2"], ["rope", "17"]),
    "odd rotary_dim": ("rope", ["--config.encoding.rotary_dim=3"], ["rope", "3"]),
    "odd buckets": ("t5", ["--config.encoding.num_buckets=7"], ["num_buckets=7", "even"]),
    "max_distance": (
        "t5",
        ["--config.encoding.num_buckets=16", "--config.encoding.max_distance=8"],
        ["max_distance=8"],
    ),
    "too short": ("learned", ["--config.encoding.num_positions=8"], ["positions 0 to 7", "train.length=16"]),
    "beyond": ("learned", ["--config.encoding.beyond=wrap"], ["beyond='wrap'", "clamp"]),
    "a file for a module": ("mine.py:Mine", [], ["Did you mean mine:Mine?"]),
    "no such module": ("no_such_package:Mine", [], ["cannot be imported", "no_such_package"]),
    "not an encoding": ("json:JSONDecoder", [], ["json:JSONDecoder", "posx.Encoding"]),
}


@pytest.mark.parametrize(("name", "words", "wanted"), BAD_ENCODINGS.values(), ids=BAD_ENCODINGS.keys())
def test_encodings_that_do_not_fit_are_one_line(capsys, site, tmp_path, name, words, wanted):
    new = tmp_path / "new"
    refused(capsys, 2, ["train", f"--config={site / 'tiny.py'}:{name}", f"--workdir={new}", *words], *wanted)
    assert not new.exists()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["plot", "runs/mine"], "Did you mean --workdir runs/mine?"),
        (["plot", "--workdir=runs/a", "runs/b"], "one work folder at a time"),
        (["train", "--config", "quick", "rope"], "Did you mean --config quick:rope?"),
        (["train", "--config=quick", "rope"], "Did you mean --config quick:rope?"),
        (["generate", "--prompt", "to", "be"], "Did you mean --prompt='to be'?"),
        (["evaluate", "--lengths=16,", "32"], "Did you mean --lengths='16, 32'?"),
        (["train", "--config=quick", "--config.train.steps", "5"], "Did you mean --config.train.steps=5?"),
        (["encodings", "rope", "alibi"], "one NAME at a time"),
        (["evaluate", "--lengths=16", "my runs/a"], "Did you mean --workdir 'my runs/a'?"),
        (["generate", "there"], "Did you mean --workdir there?"),
        (["sweep", "quick", "--workdir=new"], "Did you mean --config quick?"),
        (["train", "mine.py:rope"], "Did you mean --config mine.py:rope?"),
    ],
)
def test_a_stray_word_is_told_its_flag(capsys, tmp_path, monkeypatch, words, meant):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    refused(capsys, 2, words, "belongs to no flag", meant)


def test_a_name_that_is_too_long_is_one_line(capsys):
    for words in (["evaluate", "--workdir"], ["generate", "--workdir"], ["plot", "--workdir"], ["train", "--config"]):
        line = refused(capsys, 2 if words[0] == "train" else 4, [*words, "x" * 5000 + ".safetensors"], "does not exist")
        assert len(line) < 600
    refused(capsys, 2, ["plot", "/".join("x" * 5000)], "belongs to no flag")


def test_a_current_folder_that_was_removed_is_one_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    refused(capsys, 2, ["encodings"], "the current folder has been removed")
    assert tiny.call(capsys, "--help")[0] == 0


def test_help_and_the_version_are_found_in_any_order(capsys):
    _, of_sweep, _ = tiny.call(capsys, "sweep", "--help")
    assert of_sweep.startswith("posx sweep: all runs of a config")
    for words in (["help", "sweep"], ["--help", "sweep"], ["sweep", "help"]):
        assert tiny.call(capsys, *words) == (0, of_sweep, "")
    assert tiny.call(capsys, "--version") == (0, f"posx {posx.__version__}\n", "")
    one, other = (
        tiny.call(capsys, *words) for words in (["encodings", "rope", "--dry_run"], ["encodings", "--dry_run", "rope"])
    )
    assert one == other and one[0] == 0 and one[1].startswith("rope\n")


def test_usage(capsys):
    for words in ([], ["--help"]):
        code, out, _ = tiny.call(capsys, *words)
        assert code == (0 if words else 2) and all(name in out for name in COMMANDS) and "docs/index.md" in out
    for name, command in COMMANDS.items():
        code, out, _ = tiny.call(capsys, name, "--help")
        title, page = command.guide
        assert code == 0 and all(f"--{flag}" in out for flag in command.flags)
        assert out.endswith(f"Guide: {title}, {page}\n")
        assert f"\n# {title}\n" in "\n" + (tiny.ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("flag", ["--print_config", "--dry_run"])
@pytest.mark.parametrize("command", list(COMMANDS))
def test_print_config_and_dry_run_write_nothing(capsys, site, whole, tmp_path, monkeypatch, command, flag):
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    if COMMANDS[command].takes_config:
        words = [f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'new'}", f"--config.data.cache_dir={cache}"]
    else:
        words = [*(["t5"] if COMMANDS[command].operand not in ("", "RUN") else []), f"--workdir={whole}"]
    if command == "export":
        words += ["--to=model.safetensors"]
    if command == "import":
        source = tiny.write_model(tmp_path.parent / f"{tmp_path.name}-model")
        words = [f"--from={source}", "--to=run"]
    code, out, err = tiny.call(capsys, command, *words, flag)
    said = [line for line in err.splitlines() if "bytes of text in 1 document are held out" not in line]
    assert code == 0 and out.strip() and not said, err
    assert list(tmp_path.iterdir()) == []
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


def test_print_config_shows_the_overrides(capsys, site):
    code, out, _ = tiny.call(
        capsys, "train", f"--config={site / 'tiny.py'}:t5", "--print_config", "--config.train.steps=77",
        "--config.eval.lengths=16,48", "--config.encoding.num_buckets=8",
    )  # fmt: skip
    chosen, _, defaults = out.partition("# defaults")
    assert code == 0 and "--config.encoding=t5(num_buckets=8)" in chosen and "--config.train.steps=77" in chosen
    assert "--config.train.weight_decay=0.1" in defaults and "!!python" not in out
    # What is printed can be typed: the same settings from another config file's.
    words = [shlex.split(line)[0] for line in out.splitlines() if line.startswith(("-", "'"))]
    _, again, _ = tiny.call(
        capsys, "train", f"--config={tiny.ROOT / 'configs' / 'novels_cpu.py'}:rope", *words, "--print_config"
    )
    assert again == out
    code, told, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:rope", *words, "--dry_run")
    assert (
        code == 0
        and "77 steps" in told
        and [line.split()[1] for line in err.splitlines()] == ["--config.eval.sliding_targets=64"]
    )
