"""F56 to F71: numbers that are not finite, memory, signals, hangs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import time

from tests.faults.table import fault, limited, not_provoked
from tests.tiny import ROOT, SECONDS, STEPS, Scene, rows_so_far

NONFINITE, MEMORY, PARTLY = 5, 6, 7


@fault(56, "a loss or parameters that are not finite", "5; the step; the checkpoint before it is kept")
def diverges(scene: Scene) -> None:
    wild = ("--config.train.learning_rate=1e38", "--config.train.clip_norm=1e38")
    scene.train(*wild).must(NONFINITE, "not finite|loss (nan|inf)|gradient norm (nan|inf)", "step")
    status = json.loads((scene.workdir / "status.json").read_text())
    assert status["code"] == NONFINITE, f"status.json says {status}"


not_provoked(57, "NaN when the best of several is chosen", "posx chooses no best run or step")


@fault(58, "memory that runs out in the first step, or while the state is made", "6; what to lower")
def no_memory(scene: Scene) -> None:
    large = ("--config.model.model_dim=4096", "--config.model.num_heads=64", "--config.model.num_layers=2")
    wide = (f"--workdir={scene.folder / 'wide'}", "--config.train.batch_size=65536", "--config.train.length=64")
    for sizes in (large, wide):
        scene.train(*sizes, before=limited(resource.RLIMIT_AS, 6 * 10**9)).must(MEMORY, "memory")


@fault(59, "memory that runs out at one evaluation length", "7; status oom at that length, the others measured")
def no_memory_at_a_length(scene: Scene) -> str:
    workdir = scene.finished()
    words = ("evaluate", f"--workdir={workdir}", "--lengths=16,24,131072", "--num_targets=131072", "--executor=dense")
    limit = limited(resource.RLIMIT_AS, 12 * 10**9)
    scene.posx(*words, "--protocol=nonoverlapping", before=limit).must(PARTLY, "131072: oom")
    measured = [row for row in rows_so_far(workdir / "eval.jsonl") if row["num_targets"] > 100_000]
    found = {row["eval_len"]: row["status"] for row in measured}
    assert (found.get(131072), found.get(24)) == ("oom", "ok"), f"rows: {found}"
    return "7; oom at 131,072 (dense), ok at 16 and 24"


@fault(60, "a loss so large that perplexity is infinite", "0, 5 or 7; nll in nats, ppl as text, figures drawn")
def enormous_loss(scene: Scene) -> str:
    ended = scene.train("--config.train.learning_rate=300", "--config.train.steps=4").must((0, NONFINITE, PARTLY))
    found = rows_so_far(scene.workdir / "eval.jsonl")
    assert any(row["ppl"] == "inf" for row in found), f"no perplexity is infinite: {[row['ppl'] for row in found]}"
    scene.posx("plot", f"--workdir={scene.workdir}").must(0)
    largest = max((row["nll"] for row in found if isinstance(row["nll"], float)), default=0.0)
    return f"{ended.code}; mean loss up to {largest:,.0f} nats"


@fault(61, "a table shorter than the windows it is trained on", "2; how long it must be")
def out_of_range(scene: Scene) -> None:
    ended = scene.train(encoding="learned(num_positions=8)")
    ended.must(2, r"learned\(num_positions=8.*positions 0 to 7", "0 to 15")


def stopped_at(scene: Scene, moment: float, number: signal.Signals, code: int) -> int:
    """Send a signal to a training `moment` seconds after its start; return its exit code.

    `code` is expected, or the end of the training, or Python's own way to end before posx handles the signal.
    """
    process = scene.start(*scene.words())
    time.sleep(moment)
    process.send_signal(number)
    ended = scene.end(process)
    return ended.code if ended.code == -number else ended.must((code, 0)).code


@fault(62, "SIGTERM in a step, in a save, while compiling; twice", "75; saved; the same command ends in the same bits")
def terminated(scene: Scene) -> None:
    for moment in (0.0, 0.5, 1.5, 3.0):
        stopped_at(scene, moment, signal.SIGTERM, 75)
    scene.must_resume()
    shutil.rmtree(scene.workdir)  # or its steps would count as those of the next process
    process = scene.started(step=STEPS // 2)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    scene.end(process).must(75, "saved at step")
    scene.must_resume("resuming")


@fault(62, "Ctrl-C at any moment; twice", "130, one line; the same command goes on")
def interrupted(scene: Scene) -> str:
    codes = [stopped_at(scene, moment, signal.SIGINT, 130) for moment in (0.3, 0.8, 1.5, 2.5, 4.0, 6.0)]
    scene.must_resume()
    return f"{', '.join(map(str, codes))}; then 0, the same bits"


@fault(62, "Ctrl-Z for longer than XLA waits for a device, then fg", "0, the same bits", slow=True)
def suspended(scene: Scene) -> None:
    process = scene.started(step=3)
    process.send_signal(signal.SIGSTOP)
    time.sleep(60)
    process.send_signal(signal.SIGCONT)
    scene.end(process).must(0)
    scene.must_end_like_whole()


def together(scene: Scene) -> tuple[list[str], dict[str, str]]:
    """Return the words of a run over two processes with a device each, without their numbers, and the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = scene.words(f"--coordinator=127.0.0.1:{port}", "--processes=2", "--config.train.checkpoint_steps=1")
    return words, {"JAX_NUM_CPU_DEVICES": "1"}


@fault(63, "a process of a run over two is killed", "75 of the other, one line; both again end the run", slow=True)
def one_of_two(scene: Scene) -> None:
    words, env = together(scene)
    first, second = (scene.start(*words, f"--process={n}", env=env) for n in range(2))
    scene.until(lambda: scene.step() > 0, first)
    scene.kill(second)
    scene.end(first).must(75, "same command")
    words, env = together(scene)
    for process in [scene.start(*words, f"--process={n}", env=env) for n in range(2)]:
        scene.end(process).must(0)


@fault(64, "a rendezvous that never completes", "75 after two minutes, one line", slow=True)
def nobody_comes(scene: Scene) -> None:
    words, env = together(scene)
    scene.posx(*words, "--process=0", env=env, timeout=2 * SECONDS).must(75, "did not start within 120 s. Start")


@fault(65, "variables of a SLURM job in a shell", "0; nobody is waited for")
def slurm_variables(scene: Scene) -> None:
    shell = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODELIST": "n[1-4]"}
    scene.must_resume(env=shell)


@fault(66, "a step that never ends (patience of 3 s instead of ten minutes)", "75; the stacks of all threads in a file")
def hangs(scene: Scene) -> None:
    (scene.folder / "sitecustomize.py").write_text("import posx.lab.training.watchdog as w\nw.LEAST_SECONDS = 3.0\n")
    path = os.pathsep.join(map(str, (scene.folder, ROOT / "tests" / "faults" / "user", ROOT)))
    env = {"PYTHONPATH": path, "HANG_AFTER": "20", "HANG_SECONDS": "900"}
    scene.train(encoding="hanging:Hangs", env=env).must(75, "no step ended for", "stacks.txt")
    assert "wait" in (scene.workdir / "stacks.txt").read_text(), "stacks.txt does not say where it hung"


@fault(67, "the folder of the board, which a thread of its own writes, cannot be made", "4; one line")
def broken_thread(scene: Scene) -> None:
    scene.workdir.mkdir()
    (scene.workdir / "tensorboard").write_text("a file in the place of a folder")
    scene.train().must(4, "could not be written")


@fault(68, "memory that grows with steps", "as much after 4,000 steps as after 1,000, within 5 %", slow=True)
def growth(scene: Scene) -> str:
    steps = ("--config.train.steps=4000", "--config.train.checkpoint_steps=200", "--config.train.log_steps=20")
    process, seen = scene.start(*scene.words(*steps)), {}
    while process.poll() is None:
        if (step := scene.step()) in (1000, 2000, 3000, 3900) and step not in seen:
            seen[step] = resident(process.pid)
        time.sleep(0.02)
    scene.end(process).must(0)
    assert len(seen) >= 3, f"it was too fast to be looked at: {seen}"
    assert seen[max(seen)] <= 1.05 * seen[min(seen)], f"MB by step: {seen}"
    return ", ".join(f"{size} MB at {step:,}" for step, size in seen.items())


def resident(pid: int) -> int:
    """Return the memory that a process holds, in MB."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


not_provoked(69, "no GPU where one was asked for", "see F19: JAX_PLATFORMS=cuda ends with 2")
not_provoked(70, "several runs on one GPU", "a sweep gives an accelerator one run at a time; no GPU here to show it")


@fault(71, "an evaluation that is killed", "the rows it had are kept, the others measured, none twice")
def killed_evaluation(scene: Scene) -> None:
    workdir = scene.finished()
    (workdir / "DONE").unlink()
    (workdir / "eval.jsonl").unlink()
    words = ("evaluate", f"--workdir={workdir}", "--lengths=16,24,32,48,64,96,128")
    process = scene.start(*words)
    scene.until(lambda: len(rows_so_far(workdir / "eval.jsonl")) >= 3, process)
    scene.kill(process)
    kept = rows_so_far(workdir / "eval.jsonl")
    scene.posx(*words).must(0)
    found = rows_so_far(workdir / "eval.jsonl")
    assert found[: len(kept)] == kept, "rows that were there were changed"
    measured = [(row["protocol"], row["eval_len"]) for row in found]
    assert len(set(measured)) == len(measured), f"measured twice: {measured}"
