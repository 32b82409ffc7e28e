"""F1 to F20: what a user gets wrong in words, settings and config files, and an environment that does not fit."""

from __future__ import annotations

import json
import os
import textwrap

from tests.faults.scene import ROOT, Scene, Unmet
from tests.faults.table import fault

USAGE = 2


@fault(1, "unknown config key", "2; the full path, the nearest key")
def unknown_key(scene: Scene) -> None:
    scene.posx(*scene.train("--config.model.dd=64")).must(USAGE, r"model\.dd", "did you mean|near")


@fault(1, "unknown key of an encoding", "2; the name, those it takes")
def unknown_field(scene: Scene) -> None:
    scene.posx(*scene.train(encoding="rope(bose=5)")).must(USAGE, "bose", "base")


@fault(2, "unknown command, flag, word without dashes, extra word", "2; what it may have been")
def wrong_words(scene: Scene) -> None:
    scene.posx("trian").must(USAGE, "did you mean 'train'")
    scene.posx(*scene.train("--steps=5")).must(USAGE, r"did you mean --config\.train\.steps=5")
    scene.posx(*scene.train("config.learning_rate=2")).must(USAGE, r"--config\.train\.learning_rate")
    scene.posx("evaluate", "runs", "--workdir=x").must(USAGE, "stray word 'runs'|takes")


@fault(3, "config file missing, a folder, no Python, broken, without get_config, of another type", "2; file and line")
def bad_config_files(scene: Scene) -> None:
    def told(text: str, *patterns: str) -> None:
        path = scene.folder / "own.py"
        path.write_text(textwrap.dedent(text))
        scene.posx("train", f"--config={path}", "--workdir=w").must(USAGE, r"own\.py", *patterns)

    scene.posx("train", f"--config={ROOT}/configs/smoek.py", "--workdir=w").must(USAGE, r"smoke\.py")
    scene.posx("train", f"--config={ROOT}/configs", "--workdir=w").must(USAGE, "is a folder")
    told("\0\1\2 no Python", "line|null bytes|cannot")
    told("def get_config(:\n  pass", "line 1")
    told("x = 1", "no get_config")
    told("def get_config(arg=''):\n  return 7", "ConfigDict, not int")


@fault(4, "a config file that raises, ends the process, or is given a bad argument", "2; the user's own line")
def config_files_that_raise(scene: Scene) -> None:
    path = scene.folder / "own.py"
    path.write_text("def get_config(arg=''):\n  x = {}\n  return x['missing']\n")
    scene.posx("train", f"--config={path}", "--workdir=w").must(USAGE, "line 3", "KeyError")
    path.write_text("import sys\nsys.exit(0)\n")
    scene.posx("train", f"--config={path}", "--workdir=w").must(USAGE, r"own\.py", "SystemExit|ended|exit")
    path.write_text("import sys\ndef get_config(arg=''):\n  sys.exit(0)\n")
    scene.posx("train", f"--config={path}", "--workdir=w").must(USAGE, r"own\.py", "SystemExit|ended|exit")
    scene.posx("train", f"--config={ROOT}/configs/smoke.py:no_such", "--workdir=w").must(USAGE, "no_such", "known|mean")


@fault(5, "wrong types, NaN, negative, zero, enormous sizes", "2; all problems in one line")
def bad_values(scene: Scene) -> None:
    wrong = ("--config.train.steps=0", "--config.train.batch_size=-1", "--config.eval.num_targets=-3")
    scene.posx(*scene.train(*wrong)).must(USAGE, r"train\.steps=0", r"train\.batch_size=-1", r"eval\.num_targets=-3")
    scene.posx(*scene.train("--config.train.steps=many")).must(USAGE, r"train\.steps", "many")
    scene.posx(*scene.train("--config.train.learning_rate=nan")).must(USAGE, "learning_rate")
    scene.posx(*scene.train("--config.train.learning_rate=inf")).must(USAGE, "learning_rate")
    scene.posx(*scene.train("--config.train.weight_decay=nan")).must(USAGE, "weight_decay")
    scene.posx(*scene.train("--config.model.num_layers=1000000000", "--dry_run")).must(USAGE, "num_layers")
    for name in ("model.model_dim", "model.mlp_dim", "train.batch_size", "train.length", "train.steps", "eval.stride"):
        scene.posx(*scene.train(f"--config.{name}={10**30}", "--dry_run")).must(USAGE, name.rsplit(".", 1)[-1])


@fault(6, "unknown encoding, MLP, protocol, executor", "2; the nearest, those that are known")
def unknown_names(scene: Scene) -> None:
    scene.posx(*scene.train(encoding="allibi")).must(USAGE, "alibi")
    scene.posx(*scene.train("--config.model.mlp=gleu")).must(USAGE, "gelu")
    scene.posx(*scene.train("--config.eval.protocols=('slidin',)")).must(USAGE, "sliding")
    scene.posx(*scene.train("--config.train.executor=fast")).must(USAGE, "blockwise")


@fault(7, "heads that do not divide the width, or key heads the heads", "2; the numbers, the nearest that fit")
def heads(scene: Scene) -> None:
    scene.posx(*scene.train("--config.model.num_heads=3")).must(USAGE, "num_heads=3", "32")
    scene.posx(*scene.train("--config.model.num_heads=4", "--config.model.num_kv_heads=3")).must(
        USAGE, "num_kv_heads=3"
    )


@fault(8, "rotary on an odd head width, or on a part of it that has no pairs", "2; names the encoding")
def odd_heads(scene: Scene) -> None:
    scene.posx(*scene.train("--config.model.model_dim=10", "--config.model.num_heads=2")).must(USAGE, "rope")
    scene.posx(*scene.train(encoding="rope(rotary_dim=3)")).must(USAGE, "rope", "even width", "not 3")


@fault(9, "a table of positions shorter than an evaluation length", "0; a row that says undefined, no number")
def short_table(scene: Scene) -> str:
    scene.posx(*scene.train(encoding="learned")).must(0)
    rows = [json.loads(line) for line in (scene.workdir / "eval.jsonl").read_text().splitlines()]
    beyond = [row for row in rows if row["eval_len"] == 32]
    if not beyond or any(row["status"] != "undefined" or row.get("ppl") for row in beyond):
        raise Unmet(f"rows at 32 are {beyond}")
    return "0; status undefined at 2 L"


@fault(10, "evaluation lengths below 2, out of order, twice", "2")
def bad_lengths(scene: Scene) -> None:
    for lengths in ("(1,16)", "(32,16)", "(16,16)"):
        scene.posx(*scene.train(f"--config.eval.lengths={lengths}")).must(USAGE, r"eval\.lengths")
    scene.finished()
    scene.posx("evaluate", f"--workdir={scene.workdir}", "--lengths=16,x").must(USAGE, "lengths")


@fault(11, "targets that are no multiple of window or batch", "0; every target scored, once")
def odd_targets(scene: Scene) -> str:
    scene.finished()
    odd = ("--lengths=17,29", "--num_targets=311", "--json", "--protocol=nonoverlapping")
    ended = scene.posx("evaluate", f"--workdir={scene.workdir}", *odd).must(0)
    rows = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    scored = {row["eval_len"]: row["num_targets"] for row in rows if row["eval_len"] in (17, 29)}
    if set(scored) != {17, 29} or any(number < 311 for number in scored.values()) or len(set(scored.values())) != 1:
        raise Unmet(f"targets scored by length: {scored}")
    return f"0; {scored[17]} targets at 17 and at 29 tokens"


@fault(12, "a stride above the window, or negative", "2")
def bad_strides(scene: Scene) -> None:
    scene.finished()
    sliding = ("evaluate", f"--workdir={scene.workdir}", "--protocol=sliding", "--lengths=16")
    scene.posx(*sliding, "--stride=17").must(USAGE, "stride")
    scene.posx(*sliding, "--stride=-1").must(USAGE, "stride")


@fault(13, "warm-up as long as the run, no steps, checkpoints rarer than the run is long", "2, 2, 0")
def schedules(scene: Scene) -> None:
    scene.posx(*scene.train("--config.train.warmup_steps=32")).must(USAGE, "warmup_steps=32")
    scene.posx(*scene.train("--config.train.steps=0")).must(USAGE, "steps=0")
    scene.posx(*scene.train("--config.train.checkpoint_steps=1000")).must(0)


@fault(14, "a batch that accumulation does not divide, or that devices do not", "2 with those that do; 0")
def odd_batches(scene: Scene) -> None:
    scene.posx(*scene.train("--config.train.accumulation=3")).must(USAGE, "accumulation=3", r"\[1, 2, 4\]")
    scene.posx(*scene.train("--config.train.batch_size=7", "--config.train.steps=4")).must(0)


@fault(15, "a mesh that does not fit the devices", "2; the devices there are, the rows it must divide")
def odd_meshes(scene: Scene) -> None:
    three = {"JAX_NUM_CPU_DEVICES": "3"}
    scene.posx(*scene.train("--mesh=4x1"), env=three).must(USAGE, "--mesh=4x1 is of 4 devices, there are 3")
    scene.posx(*scene.train("--mesh=3x1"), env=three).must(USAGE, "DATA must divide the 4 rows")
    scene.posx(*scene.train("--mesh=four"), env=three).must(USAGE, "--mesh=")


@fault(16, "a type of numbers that is not supported, or JAX set to another", "2; those that are")
def dtypes(scene: Scene) -> None:
    scene.posx(*scene.train("--config.model.dtype=float64")).must(USAGE, "float64", "bfloat16")
    scene.posx(*scene.train("--config.model.dtype=float16")).must(USAGE, "float16", "bfloat16")


@fault(16, "JAX_ENABLE_X64=1", "0; as without it, bit for bit; said")
def x64(scene: Scene) -> str:
    scene.posx(*scene.train(), env={"JAX_ENABLE_X64": "1"}).must(0, "JAX_ENABLE_X64=1 is not used")
    scene.must_end_like_whole()
    return "0; the same bits"


@fault(17, "axes with a value twice, an empty sweep, a million runs", "2; the clash, the number")
def bad_sweeps(scene: Scene) -> None:
    scene.posx(*scene.sweep("--config.sweep.encodings=('rope','rope')")).must(USAGE, "rope")
    scene.posx(*scene.sweep("--config.sweep.encodings=()")).must(USAGE, "encodings")
    many = f"--config.sweep.seeds={tuple(range(3000))}"
    ended = scene.posx(*scene.sweep(many, "--dry_run"))
    if ended.code not in (0, USAGE):
        ended.must(0)


@fault(18, "a seed below 0, beyond 32 bits", "2")
def bad_seeds(scene: Scene) -> None:
    scene.posx(*scene.train("--config.train.seed=-1")).must(USAGE, "seed")
    scene.posx(*scene.train(f"--config.train.seed={2**32}")).must(USAGE, "seed")
    scene.finished()
    scene.posx("generate", f"--workdir={scene.workdir}", "--prompt=a", f"--seed={2**70}").must(USAGE, "seed")
    scene.posx("generate", f"--workdir={scene.workdir}", "--prompt=a", "--num_tokens=x").must(USAGE, "num_tokens")


@fault(19, "XLA_FLAGS that XLA does not know", "one line, no abort without a word")
def bad_xla_flags(scene: Scene) -> str:
    ended = scene.posx(*scene.train(), env={"XLA_FLAGS": "--xla_no_such_flag=1"})
    if "Traceback" in ended.err or "xla_no_such_flag" not in ended.err or ended.code == 0:
        raise Unmet(f"{ended.code}: {ended.err[-800:]}")
    return f"{ended.code}; {ended.last[:200]}"


@fault(19, "JAX_PLATFORMS of a device that is not there", "2; what was asked for")
def no_platform(scene: Scene) -> None:
    for platform in ("cuda", "bogus"):
        scene.posx(*scene.train(), env={"JAX_PLATFORMS": platform}).must(USAGE, "JAX_PLATFORMS", platform)


@fault(20, "an optional dependency that is missing", "2; how it is installed")
def no_engines(scene: Scene) -> None:
    for name in ("ray", "submitit"):
        (scene.folder / f"{name}.py").write_text(f"raise ImportError('No module named {name}')\n")
    hidden = {"PYTHONPATH": f"{scene.folder}{os.pathsep}{ROOT}"}
    for engine in ("ray", "slurm"):
        scene.posx(*scene.sweep("--on", engine), env=hidden).must(USAGE, rf"pip install 'posx\[{engine}\]'")
