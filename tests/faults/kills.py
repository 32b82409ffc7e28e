"""kill -9 at random moments, and what is left."""

from __future__ import annotations

import time
from pathlib import Path

from tests.faults.scene import Scene, Unmet, rows


def killed_until_done(scene: Scene, workdir: Path, most: int) -> int:
    """A run that is killed again and again, at most so often, until it ends; how often that was.

    Whatever moment it is: the start, a step, a save, the evaluation. Raises Unmet unless it ends in the bits and with
    the rows of one that was left alone, and no row was lost on the way.
    """
    words, kills, seconds = scene.train(f"--workdir={workdir}"), 0, 12.0
    before: list[str] = []
    while kills < most:
        process = scene.start(*words)
        moment = time.monotonic() + scene.random.uniform(0, seconds)
        while process.poll() is None and time.monotonic() < moment:
            time.sleep(0.002)
        if process.poll() is not None:
            scene.end(process).must(0)
            break
        scene.kill(process)
        kills += 1
        now = [str(row) for row in rows(workdir / "metrics.jsonl") + rows(workdir / "eval.jsonl")]
        if lost := [row for row in before if row not in now]:
            raise Unmet(f"after kill {kills} a row is gone: {lost[0][:200]}")
        before = now
    scene.posx(*words).must(0)
    measured = [(row["protocol"], row["eval_len"], row["targets"]) for row in rows(workdir / "eval.jsonl")]
    if len(set(measured)) < len(measured):
        raise Unmet(f"a row is there twice: {measured}")
    scene.must_end_like_whole(workdir)
    return kills
