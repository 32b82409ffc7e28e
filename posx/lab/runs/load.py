"""A trained run as a function of parameters and tokens, from its folder or from one file that travels."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from posx.contract import Composite
from posx.encodings import Encoding
from posx.errors import WorkdirError
from posx.evaluation.ids import token_ids
from posx.lab.config import RunConfig
from posx.lab.data import Tokenizer
from posx.lab.files import checksums
from posx.lab.files.lines import parse_json
from posx.lab.positions import Positions
from posx.lab.runs.describe import make_run_model, notice_of_code
from posx.lab.runs.exported import export_header, read_export, unpack_export
from posx.lab.runs.finding import find_run
from posx.lab.runs.folder import TOKENIZER_CHECKSUM, RunFolder
from posx.lab.runs.text import saved_tokenizer
from posx.machine.guard import start_devices
from posx.notices import say

if TYPE_CHECKING:
    from posx.lab.model import Model
    from posx.lab.training.layout import Layout


@dataclasses.dataclass(frozen=True)
class Apply:
    """A trained model's forward pass as a function of parameters and tokens.

    Attributes:
      model: the model.
      positions: of the run that it was trained in.
    """

    model: Model
    positions: Positions = dataclasses.field(default_factory=Positions)

    def __call__(self, params: dict[str, Any], tokens: jax.Array, pos: Any = None) -> jax.Array:
        """Return logits [b, t, v], float32, of the tokens after tokens [b, t].

        pos: [t] or [b, t]; None for the positions at which windows of t tokens are measured.

        A model that was trained with train.objective=masked returns those of the tokens at the same places. It reads
        the id `tokenizer.vocab_size` as <mask>.

        Raises UndefinedLength if an encoding or the policy of positions is not defined for t tokens.
        """
        tokens = token_ids(tokens, "[b, t]", vocab_size=self.model.vocab_size)
        length = tokens.shape[1]
        pos = self.positions.measure(length) if pos is None else pos
        return self.model.at_length(length)(params, tokens, pos)


def load(workdir: str | Path) -> tuple[Apply, dict[str, Any], Tokenizer]:
    """Return (apply, params, tokenizer) of a trained run or of an exported file.

    `apply(params, tokens [b, t], pos=None)` returns logits [b, t, v]. Without pos, tokens have the positions that the
    run is measured at. These are 0 .. t - 1, unless it was trained with random positions.

    Raises WorkdirError if the folder holds no run, or no checkpoint that verifies, or if the file is damaged.
    """
    path = Path(workdir).expanduser().resolve()
    folder = unpack_export(path) if os.path.isfile(path) else find_run(path)
    model, params, tokenizer, _ = load_model(folder)
    return Apply(model, folder.read_config().train.token_positions), params, tokenizer


def load_model(folder: RunFolder, layout: Layout | None = None) -> tuple[Model, dict[str, Any], Tokenizer, int]:
    """Return the model of a run, its newest good parameters, its tokenizer, and their step.

    layout: the devices over which parameters are sharded; None for one device.
    """
    start_devices()  # else it would be the checkpoints that cannot be read
    run = folder.read_config()
    notice_of_code(run, folder.path.name)
    tokenizer = saved_tokenizer(folder)
    model = make_run_model(run, tokenizer.vocab_size)
    abstract = layout.place(model.abstract()) if layout else model.abstract()
    borrowed = check_borrowed(folder, run) if folder.is_borrowed else None
    if folder.weights.is_file():
        step, params = read_export(folder.weights, abstract)
        return model, params, tokenizer, step
    from posx.lab.training.checkpoints import Checkpoints

    whose = run.hash
    if borrowed:
        notice_of_code(borrowed, folder.weights.name)
        folder, whose = RunFolder(folder.weights), borrowed.hash
    restored = Checkpoints(folder.checkpoints, run=whose).restore({"params": abstract}, notice=say)
    if restored is None and (last := folder.nan_step()) is not None:
        raise WorkdirError(
            f"{folder.path} has no checkpoint: its training ended with NaN at step {last}. Train again with a "
            "lower --config.train.learning_rate."
        )
    if restored is None:
        raise _no_checkpoint(folder)
    step, state = restored
    ended = checksums.read_verified(folder.done_file).get("step")
    if isinstance(ended, int) and step < ended:  # else its numbers would be taken for those of the whole training
        raise WorkdirError(
            f"{folder.path}: this run ended at step {ended}, but that checkpoint is damaged. posx verify names the "
            f"file. The command that trained the run trains on from step {step}."
        )
    return model, jax.tree.map(jnp.asarray, state["params"]), tokenizer, step


def stored_step(folder: RunFolder) -> int:
    """Return the step of the weights of a run, from names and headers alone. Raises WorkdirError if it has none."""
    if folder.weights.is_file():
        return int(export_header(folder.weights)["step"])
    step = RunFolder(folder.weights).newest_step
    if step is None:
        raise _no_checkpoint(folder)
    return step


def _no_checkpoint(folder: RunFolder) -> WorkdirError:
    return WorkdirError(f"{folder.path} holds no checkpoint yet. Run `posx train` with this --workdir first.")


def check_borrowed(folder: RunFolder, run: RunConfig) -> RunConfig:
    """Return the settings of the run whose weights `run` has: those of its parent, or its own in an exported file.

    Raises WorkdirError if another run is there, or a run with another tokenizer.
    """
    weights, name = folder.weights, folder.path.name
    if weights.is_file():
        held = parse_json(export_header(weights)["config"])["hash"]
        if held != run.hash:
            raise WorkdirError(
                f"{name} has the weights of {weights}, but that file is of the run {held}, not of {run.hash}. Restore "
                "the file."
            )
        return run
    parent = check_parent(run, RunFolder(weights), name)
    own, theirs = (checksums.read_verified(path / folder.config_file.name) for path in (folder.path, weights))
    if own.get(TOKENIZER_CHECKSUM) != theirs.get(TOKENIZER_CHECKSUM):
        raise WorkdirError(
            f"{folder.tokenizer_file} is not that of {weights}, whose weights {name} has. Remove this run and evaluate "
            "it again."
        )
    return parent


def check_parent(run: RunConfig, parent: RunFolder, whose: str) -> RunConfig:
    """Return the settings of the run whose weights `run` has or starts from. Raises WorkdirError if it is not there."""
    if not parent.config_file.exists():
        raise WorkdirError(f"{whose} has the weights of {parent.path}, where no run is. Put that run back.")
    settings = parent.read_config()
    if settings.hash != run.parent.get("hash"):
        raise WorkdirError(
            f"{whose} has the weights of the run {run.parent.get('hash')}, but {parent.path} holds {settings.hash}. "
            "Restore that run."
        )
    return settings


def inherit_arrays(params: dict[str, Any], run: RunConfig, tokenizer: Tokenizer, parent: RunFolder) -> dict[str, Any]:
    """Return fresh parameters with the arrays of a parent run in place of those of equal name and shape.

    Arrays of an encoding are kept if both runs have that encoding there, whatever its fields. Says which arrays are
    kept, fresh and dropped. Raises WorkdirError if the parent is another run, or has another tokenizer.
    """
    from posx.lab.training.checkpoints import flatten

    theirs = check_parent(run, parent, "this run")
    _, trained, own_tokenizer, step = load_model(parent)
    if str(step) != run.parent["step"]:
        raise WorkdirError(f"{parent.path} is at step {step}, but this run starts from step {run.parent['step']}.")
    if own_tokenizer.digest != tokenizer.digest:
        raise WorkdirError(
            f"{parent.path} was trained with another tokenizer. Give --config.data.tokenizer={parent.tokenizer_file}"
        )
    if not (run.data.is_task or theirs.is_imported or theirs.data.is_task) and run.held_out != theirs.held_out:
        say(
            f"notice: {parent.path.name} held out other text than this run does. If it was trained on some of this "
            "text, perplexity here is too low. The same data and split avoid that."
        )
    fresh, old = flatten(params), flatten(trained)

    def fits(name: str) -> bool:
        if name not in old or old[name].shape != fresh[name].shape:
            return False
        place = re.search(r"layer_(\d+)\.attention\.position\.|shared\.encoding_(\d+)\.", name)
        if place is None:
            return True
        layers = [(one.layers if place[1] else list(dict.fromkeys(one.layers))) for one in (run, theirs)]
        one, other = (_classes(lines[int(place[1] or place[2])], name[place.end() :]) for lines in layers)
        return one == other

    kept = {name: old[name] for name in fresh if fits(name)}
    if not kept:
        raise WorkdirError(f"no array of {parent.path} fits this model. Give the model the sizes of that run.")
    say(f"{parent.path.name} at step {step}: {len(kept)} of {len(old)} arrays kept")
    for what, names in (("fresh", fresh.keys() - kept.keys()), ("dropped", old.keys() - kept.keys())):
        layers: dict[str, list[str]] = {}
        for name in sorted(names):
            layers.setdefault(re.sub(r"layer_\d+", "layer_*", name), []).extend(re.findall(r"layer_(\d+)", name))
        if layers:
            lines = (f"{name} ({', '.join(numbers)})" if numbers else name for name, numbers in layers.items())
            say(f"{what}: {', '.join(lines)}")
    leaves = [jax.device_put(kept[n], leaf.sharding) if n in kept else leaf for n, leaf in
              zip(fresh, jax.tree.leaves(params), strict=True)]  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _classes(encoding: Encoding, name: str) -> list[type]:
    """Return the class of an encoding, and of its parts around the array `name`, as "0.table" in a chain."""
    part, _, rest = name.partition(".")
    inner = encoding.named_parts().get(part) if isinstance(encoding, Composite) and rest else None
    return [type(encoding), *(_classes(inner, rest) if inner else [])]
