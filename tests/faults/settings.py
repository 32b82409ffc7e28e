"""F1 to F20: wrong words, settings and config files of a user, and an environment that does not fit."""

from __future__ import annotations

import json
import os

from tests.faults.table import fault
from tests.tiny import ROOT, SMOKE, Scene, rows

USAGE = 2


def refused(number: int, what: str, expected: str, *trials: tuple[str, ...]) -> None:
    """Add a fault of trainings that posx refuses: the settings or the encoding of each, and patterns of the answer."""

    def provoke(scene: Scene) -> None:
        for given, *patterns in trials:
            ended = scene.train(*given.split()) if given.startswith("--") else scene.train(encoding=given)
            ended.must(USAGE, *patterns)

    fault(number, what, expected)(provoke)


refused(
    1, "unknown config key", "2; the full path, the nearest key",
    ("--config.model.dd=64", r"model\.dd", "Did you mean|Nearest"),
)  # fmt: skip
refused(1, "unknown key of an encoding", "2; the name, those it takes", ("rope(bose=5)", "bose", "base"))


@fault(2, "unknown command, flag, word without dashes, extra word", "2; what it may have been")
def wrong_words(scene: Scene) -> None:
    scene.posx("trian").must(USAGE, "Did you mean 'train'")
    scene.train("--steps=5").must(USAGE, r"Did you mean --config\.train\.steps=5")
    scene.train("config.learning_rate=2").must(USAGE, r"--config\.train\.learning_rate")
    scene.posx("evaluate", "runs", "--workdir=x").must(USAGE, "word 'runs' belongs to no flag|takes")


def with_config(scene: Scene, config: str | None, *patterns: str, text: str = "") -> None:
    """Check that a config file is refused: the one at `config`, or one with this text."""
    path = scene.folder / "own.py"
    path.write_text(text)
    own = [] if config else [r"own\.py"]
    scene.posx("train", f"--config={config or path}", "--workdir=w").must(USAGE, *own, *patterns)


@fault(3, "config file missing, a folder, no Python, broken, without get_config, of another type", "2; file and line")
def bad_config_files(scene: Scene) -> None:
    with_config(scene, f"{ROOT}/configs/smoek.py", r"smoke\.py")
    with_config(scene, f"{ROOT}/configs", "is a folder")
    with_config(scene, None, "line|null bytes|cannot", text="\0\1\2 no Python")
    with_config(scene, None, "line 1", text="def get_config(:\n  pass")
    with_config(scene, None, "no get_config", text="x = 1")
    with_config(scene, None, "ConfigDict, not int", text="def get_config(arg=''):\n  return 7")


@fault(4, "a config file that raises, ends the process, or is given a bad argument", "2; the user's own line")
def config_files_that_raise(scene: Scene) -> None:
    ends = "SystemExit|ended|exit"
    with_config(scene, None, "line 3", "KeyError", text="def get_config(arg=''):\n  x = {}\n  return x['missing']\n")
    with_config(scene, None, ends, text="import sys\nsys.exit(0)\n")
    with_config(scene, None, ends, text="import sys\ndef get_config(arg=''):\n  sys.exit(0)\n")
    with_config(scene, f"{SMOKE}:no_such", "no_such", "known|mean")


refused(
    5, "wrong types, NaN, negative, zero, enormous sizes", "2; all problems in one line",
    ("--config.train.steps=0 --config.train.batch_size=-1 --config.eval.num_targets=-3",
     r"train\.steps=0", r"train\.batch_size=-1", r"eval\.num_targets=-3"),
    ("--config.train.steps=many", r"train\.steps", "many"),
    ("--config.train.learning_rate=nan", "learning_rate"),
    ("--config.train.learning_rate=inf", "learning_rate"),
    ("--config.train.weight_decay=nan", "weight_decay"),
    ("--config.model.num_layers=1000000000 --dry_run", "num_layers"),
    *((f"--config.{room}.{name}={10**30} --dry_run", name) for room, name in (
        ("model", "model_dim"), ("model", "mlp_dim"), ("train", "batch_size"), ("train", "length"), ("train", "steps"),
        ("eval", "stride"),
    )),
)  # fmt: skip
refused(
    6, "unknown encoding, MLP, protocol, executor", "2; the nearest, those that are known", ("allibi", "alibi"),
    ("--config.model.mlp=gleu", "gelu"), ("--config.eval.protocols=('slidin',)", "sliding"),
    ("--config.train.executor=fast", "blockwise"),
)  # fmt: skip
refused(
    7, "heads that do not divide the width, or key heads the heads", "2; the numbers, the nearest that fit",
    ("--config.model.num_heads=3", "num_heads=3", "32"),
    ("--config.model.num_heads=4 --config.model.num_kv_heads=3", "num_kv_heads=3"),
)  # fmt: skip
refused(
    8, "rotary on an odd head width, or on a part of it that has no pairs", "2; names the encoding",
    ("--config.model.model_dim=10 --config.model.num_heads=2", "rope"),
    ("rope(rotary_dim=3)", "rope", "rotary_dim=3 must be even"),
)  # fmt: skip


@fault(9, "a table of positions shorter than an evaluation length", "0; a row that says undefined, no number")
def short_table(scene: Scene) -> str:
    scene.train(encoding="learned").must(0)
    beyond = [row for row in rows(scene.workdir / "eval.jsonl") if row["eval_len"] == 32]
    undefined = [row["status"] == "undefined" and not row.get("ppl") for row in beyond]
    assert undefined and all(undefined), f"rows at 32 are {beyond}"
    return "0; status undefined at 2 L"


@fault(10, "evaluation lengths below 2, out of order, twice", "2")
def bad_lengths(scene: Scene) -> None:
    for lengths in ("(1,16)", "(32,16)", "(16,16)"):
        scene.train(f"--config.eval.lengths={lengths}").must(USAGE, r"eval\.lengths")
    scene.posx("evaluate", f"--workdir={scene.finished()}", "--lengths=16,x").must(USAGE, "lengths")


@fault(11, "targets that are no multiple of window or batch", "0; every target scored, once")
def odd_targets(scene: Scene) -> str:
    odd = ("--lengths=17,29", "--num_targets=311", "--protocol=nonoverlapping")
    ended = scene.posx("evaluate", f"--workdir={scene.finished()}", "--json", *odd).must(0)
    found = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    scored = {row["eval_len"]: row["num_targets"] for row in found if row["eval_len"] in (17, 29)}
    assert {*scored} == {17, 29} and scored[17] == scored[29] >= 311, f"targets scored by length: {scored}"
    return f"0; {scored[17]} targets at 17 and at 29 tokens"


@fault(12, "a stride above the window, or negative", "2")
def bad_strides(scene: Scene) -> None:
    sliding = ("evaluate", f"--workdir={scene.finished()}", "--protocol=sliding", "--lengths=16")
    scene.posx(*sliding, "--stride=17").must(USAGE, "stride")
    scene.posx(*sliding, "--stride=-1").must(USAGE, "stride")


@fault(13, "warm-up as long as the run, no steps, checkpoints rarer than the run is long", "2, 2, 0")
def schedules(scene: Scene) -> None:
    scene.train("--config.train.warmup_steps=32").must(USAGE, "warmup_steps=32")
    scene.train("--config.train.steps=0").must(USAGE, "steps=0")
    scene.train("--config.train.checkpoint_steps=1000").must(0)


@fault(14, "a batch that accumulation does not divide, or that devices do not", "2 with those that do; 0")
def odd_batches(scene: Scene) -> None:
    scene.train("--config.train.accumulation=3").must(USAGE, "accumulation=3", r"\[1, 2, 4\]")
    scene.train("--config.train.batch_size=7", "--config.train.steps=4").must(0)


@fault(15, "a mesh that does not fit the devices", "2; the devices there are, the rows it must divide")
def odd_meshes(scene: Scene) -> None:
    three = {"JAX_NUM_CPU_DEVICES": "3"}
    scene.train("--mesh=4x1", env=three).must(USAGE, "--mesh=4x1 needs 4 devices, but there are 3")
    scene.train("--mesh=3x1", env=three).must(USAGE, "DATA must divide the 4 rows")
    scene.train("--mesh=four", env=three).must(USAGE, "--mesh=")


refused(
    16, "a type of numbers that is not supported, or JAX set to another", "2; those that are",
    ("--config.model.dtype=float64", "float64", "bfloat16"), ("--config.model.dtype=float16", "float16", "bfloat16"),
)  # fmt: skip


@fault(16, "JAX_ENABLE_X64=1", "0; as without it, bit for bit; said")
def x64(scene: Scene) -> str:
    scene.must_resume("JAX_ENABLE_X64=1 is not used", env={"JAX_ENABLE_X64": "1"})
    return "0; the same bits"


@fault(17, "axes with a value twice, an empty sweep, a million runs", "2; the clash, the number")
def bad_sweeps(scene: Scene) -> None:
    scene.sweep("--config.sweep.encodings=('rope','rope')").must(USAGE, "rope")
    scene.sweep("--config.sweep.encodings=()").must(USAGE, "encodings")
    scene.sweep(f"--config.sweep.seeds={tuple(range(3000))}", "--dry_run").must((0, USAGE))


@fault(18, "a seed below 0, beyond 32 bits", "2")
def bad_seeds(scene: Scene) -> None:
    scene.train("--config.train.seed=-1").must(USAGE, "seed")
    scene.train(f"--config.train.seed={2**32}").must(USAGE, "seed")
    generate = ("generate", f"--workdir={scene.finished()}", "--prompt=a")
    scene.posx(*generate, f"--seed={2**70}").must(USAGE, "seed")
    scene.posx(*generate, "--num_tokens=x").must(USAGE, "num_tokens")


@fault(19, "XLA_FLAGS that XLA does not know", "one line, no abort without a word")
def bad_xla_flags(scene: Scene) -> str:
    ended = scene.train(env={"XLA_FLAGS": "--xla_no_such_flag=1"})
    explained = "Traceback" not in ended.err and "xla_no_such_flag" in ended.err and ended.code != 0
    assert explained, f"{ended.code}: {ended.err[-800:]}"
    return f"{ended.code}; {ended.last[:200]}"


@fault(19, "JAX_PLATFORMS of a device that is not there", "2; what was asked for")
def no_platform(scene: Scene) -> None:
    for platform in ("cuda", "bogus"):
        scene.train(env={"JAX_PLATFORMS": platform}).must(USAGE, "JAX_PLATFORMS", platform)


@fault(20, "an optional dependency that is missing", "2; how it is installed")
def no_engines(scene: Scene) -> None:
    for name in ("ray", "submitit"):
        (scene.folder / f"{name}.py").write_text(f"raise ImportError('No module named {name}')\n")
    hidden = {"PYTHONPATH": f"{scene.folder}{os.pathsep}{ROOT}"}
    for engine in ("ray", "slurm"):
        scene.sweep("--on", engine, env=hidden).must(USAGE, rf"pip install 'posx\[{engine}\]'")
