"""Measure a sweep on more workers, and one run on more processes, on one machine and by the commands themselves.

    python -m experiments.scale.scale measure experiments/scale/measured.json
    python -m experiments.scale.scale figure experiments/scale/measured.json
    python -m experiments.scale.scale plan experiments/scale/measured.json

`measure` needs a quiet machine of four cores, and the extra `ray`. Each worker is a Ray machine of one CPU. Each
process of a run is bound to one core. `plan` prints Markdown: the measurements, and the memory and traffic of a 7 B
model as `posx.lab.runs.describe` computes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.tables import markdown

ROOT = Path(__file__).parents[2]
WORKERS = (1, 2, 4)
RUNS = 8

#: The processes of one run, and their mesh; with "" each process holds all weights.
LAYOUTS = ((1, ""), (2, ""), (4, ""), (2, "2x1"), (4, "4x1"), (4, "2x2"))
STEPS = 40
SIZES = {
    "model.num_layers": 4, "model.model_dim": 256, "model.num_heads": 4, "train.length": 256, "train.batch_size": 32,
    "train.steps": STEPS, "train.warmup_steps": 4, "train.log_steps": 8, "train.checkpoint_steps": STEPS,
    "train.dispatch_steps": 4, "eval.lengths": 256, "eval.protocols": "nonoverlapping", "eval.num_targets": 4096,
}  # fmt: skip


#: A model of 7 B (the sizes of LLaMA, arXiv 2302.13971, table 2) in windows of 4,096, four million tokens a step.
SEVEN_B = {
    "model.num_layers": 32, "model.model_dim": 4096, "model.num_heads": 32, "model.mlp": "swiglu",
    "model.mlp_dim": 11008, "model.dtype": "bfloat16", "model.remat": "layer", "data.tokenizer": "bpe",
    "data.vocab_size": 32768, "train.length": 4096, "train.batch_size": 1024,
}  # fmt: skip
PLANNED = [
    ("7 B", SEVEN_B | {"train.accumulation": parts}, mesh)
    for mesh, parts in (("64x1", 1), ("64x1", 4), ("128x1", 1), ("128x1", 2), ("32x4", 2), ("16x8", 4))
]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "posx.lab.cli", *words]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", **extra}


@contextlib.contextmanager
def ray_of(workers: int) -> Iterator[str]:
    """Yield the address of a Ray cluster of so many machines of one CPU, all on this one."""
    os.environ |= environment()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(workers):
            cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def sweep(folder: Path, *more: str, runs: int = RUNS, steps: int = 600) -> float:
    """Return the seconds of a sweep of `runs` small runs, each on one core, figures and starts included."""
    words = [
        "sweep", f"--config={ROOT / 'configs' / 'smoke.py'}", f"--workdir={folder}", f"--config.train.steps={steps}",
        "--config.sweep.encodings=rope,alibi", f"--config.sweep.seeds={','.join(map(str, range(runs // 2)))}",
    ]  # fmt: skip
    began = time.monotonic()
    subprocess.run(command(*words, *more), env=environment(), check=True, capture_output=True)
    return time.monotonic() - began


def train(folder: Path, count: int, mesh: str) -> dict[str, Any]:
    """Return the median tokens a second of the log lines after the first of one run, and its losses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["train", f"--config={ROOT / 'configs' / 'smoke.py'}:rope", f"--workdir={folder}"]
    words += [f"--config.{name}={value}" for name, value in SIZES.items()]
    words += [f"--mesh={mesh}"] if mesh else []
    processes = []
    for number in range(count):
        own = [f"--coordinator={coordinator}", f"--processes={count}", f"--process={number}"] if count > 1 else []
        bound = ["taskset", "-c", str(number)]
        alone = environment(JAX_NUM_CPU_DEVICES="1")
        processes.append(subprocess.Popen([*bound, *command(*words, *own)], env=alone, stderr=subprocess.DEVNULL))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{count} processes, mesh {mesh!r}: exit codes {codes}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["tokens_per_second"] for row in rows[1:]]
    return {
        "processes": count, "mesh": mesh, "tokens_per_second": statistics.median(speeds), "rounds": speeds,
        "steps": [row["step"] for row in rows], "losses": [row["loss"] for row in rows],
    }  # fmt: skip


def measure(out: Path) -> None:
    """Write all measurements to a JSON file."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sweep(folder / "first", runs=2, steps=50)  # caches the text and the speed of the machine
        found: dict[str, Any] = {
            "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}", "load": os.getloadavg(),
            "runs": RUNS, "sizes": SIZES, "sweeps": [], "training": [],
        }  # fmt: skip
        for workers in WORKERS:
            with ray_of(workers) as address:
                seconds = sweep(folder / f"ray{workers}", f"--on=ray:{address}")
            found["sweeps"].append({"on": "ray", "workers": workers, "seconds": seconds})
            print(found["sweeps"][-1], flush=True)
        found["sweeps"].append({"on": "here", "workers": 4, "seconds": sweep(folder / "here", "--jobs=4")})
        print(found["sweeps"][-1], flush=True)
        for count, mesh in LAYOUTS:
            found["training"].append(train(folder / f"train{count}_{mesh}", count, mesh))
            print(count, mesh, found["training"][-1]["tokens_per_second"], flush=True)
    out.write_text(json.dumps(found | {"load_after": os.getloadavg()}, indent=1) + "\n")


def figure(path: Path) -> None:
    """Draw runs an hour against workers, tokens a second against processes, and the losses of all runs."""
    from posx.lab.plots import look

    found = json.loads(path.read_text())
    with look.style():
        made = look.figure(12.5, 3.6)
        sweeps, speeds, losses = made.subplots(1, 3, gridspec_kw={"wspace": 0.32})
        on_ray = {
            row["workers"]: 3600 * found["runs"] / row["seconds"] for row in found["sweeps"] if row["on"] == "ray"
        }
        here = next(row for row in found["sweeps"] if row["on"] == "here")
        sweeps.plot(on_ray.keys(), on_ray.values(), marker="o", color="#0072B2", label="on Ray, one CPU each")
        sweeps.plot(
            on_ray.keys(), [n * on_ray[1] for n in on_ray], color="#999999", lw=1, ls=":", label="one worker, times n"
        )
        sweeps.plot(
            [here["workers"]],
            [3600 * found["runs"] / here["seconds"]],
            "s",
            color="#D55E00",
            label="this machine, --jobs=4",
        )
        sweeps.set(
            xlabel="workers", ylabel="runs an hour", title="Sweep of 8 small runs", xticks=WORKERS, ylim=(0, None)
        )
        training = found["training"]
        alone = training[0]["tokens_per_second"]
        for label, color, rows in (
            ("weights in each", "#0072B2", [row for row in training if not row["mesh"]]),
            ("weights in parts, n x 1", "#009E73", [row for row in training if row["mesh"].endswith("x1")]),
            ("weights in parts, 2 x 2", "#CC79A7", [row for row in training if row["mesh"] == "2x2"]),
        ):
            counts, rates = ([row[name] for row in rows] for name in ("processes", "tokens_per_second"))
            speeds.plot(counts, rates, marker="o", color=color, label=label)
        speeds.plot(WORKERS, [n * alone for n in WORKERS], color="#999999", lw=1, ls=":", label="one process, times n")
        speeds.set(
            xlabel="processes, a core each", ylabel="tokens a second", title="One run", xticks=WORKERS, ylim=(0, None)
        )
        for row, style in zip(training, ("-", "--", ":", "-.", (0, (1, 3)), (0, (5, 5))), strict=True):
            name = f"{row['processes']} processes{', ' + row['mesh'] if row['mesh'] else ''}"
            losses.plot(row["steps"], row["losses"], ls=style, label=name.replace("1 processes", "1 process"))
        losses.set(xlabel="step", ylabel="loss, nats a byte", title="The same losses")
        for ax in (sweeps, speeds, losses):
            ax.legend(fontsize=7.5)
        for one in look.save_figure(made, path.parent, "scale"):
            print(one)


def sweeps_table(found: dict[str, Any]) -> str:
    """Return the sweeps as Markdown."""
    names, (alone, *_) = {"ray": "Ray", "here": "this machine, `--jobs=4`"}, found["sweeps"]
    body = [
        [
            names[row["on"]], f"{row['workers']}", f"{row['seconds']:.0f}",
            f"{3600 * found['runs'] / row['seconds']:.0f}",
            f"{alone['seconds'] / row['seconds'] / row['workers']:.2f}",
        ]
        for row in found["sweeps"]
    ]  # fmt: skip
    return markdown(["sweep of 8 runs", "workers", "seconds", "runs an hour", "of one worker times n"], body)


def processes_table(found: dict[str, Any]) -> str:
    """Return the runs on several processes as Markdown."""
    first, body = found["training"][0], []
    for row in found["training"]:
        apart = max(abs(a - b) for a, b in zip(row["losses"], first["losses"], strict=True))
        share = row["tokens_per_second"] / first["tokens_per_second"] / row["processes"]
        speed = [f"{row['processes']}", row["mesh"], f"{row['tokens_per_second']:,.0f}", f"{share:.2f}"]
        body.append([*speed, f"{apart:.1e}" if apart else ""])
    head = ["processes, a core each", "mesh", "tokens/s", "of one process times n", "largest difference of a loss"]
    return markdown(head, body)


def plan(path: Path) -> None:
    """Print the measurements, and the computed needs of a model of 7 B."""
    found = json.loads(path.read_text())
    print(f"{sweeps_table(found)}\n\n{processes_table(found)}\n")
    for name, sizes, mesh in PLANNED:
        print(f"* {name}, {mesh}, batches in {sizes['train.accumulation']}: {on_paper(sizes, mesh)}")


def on_paper(sizes: dict[str, Any], mesh: str) -> str:
    """Return the parameters of a model and the share of each device of a mesh."""
    from posx.lab.config import base_config, run_config
    from posx.lab.runs.describe import count, make_run_model, share

    config = base_config("rope")
    for name, value in sizes.items():
        section, field = name.split(".")
        config[section][field] = value
    run = run_config(config)
    model = make_run_model(run, run.data.vocab_size)
    data, heads = map(int, mesh.split("x"))
    return f"{count(model) / 1e9:.2f} B parameters, {share(run, model, data, heads)}"


if __name__ == "__main__":
    {"measure": measure, "figure": figure, "plan": plan}[sys.argv[1]](Path(sys.argv[2]))
