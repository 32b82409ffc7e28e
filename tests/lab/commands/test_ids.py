"""A run of token ids through the commands: trained, measured without bits per byte, and continued from ids."""

import numpy as np
import pytest

from posx.lab.config import base_config, run_config
from posx.lab.runs.checks import unused_settings
from posx.lab.runs.describe import expected_cost
from posx.lab.runs.folder import RunFolder
from tests import tiny
from tests.lab.commands import refused


def test_the_model_of_ids_is_known_before_they_are_read():
    """One row more than ids, for the end of a text."""
    config = base_config("nope")
    sizes = []
    for size in (300, 301):
        config.data.update(tokenizer="ids", vocab_size=size)
        sizes.append(expected_cost(run_config(config)).num_params)
    assert sizes[1] - sizes[0] == 2 * config.model.model_dim  # embeddings and output
    config.data.dtype = "uint16"
    found = unused_settings(run_config(config))
    assert "data.dtype" in found and "data.vocab_size" not in found


@pytest.mark.slow
def test_a_run_of_ids(capsys, site, tmp_path):
    ids, run = tmp_path / "ids.bin", tmp_path / "run"
    stream = np.frombuffer(b" ".join(path.read_bytes() for path in sorted((site / "text").iterdir())), np.uint8)
    stream.astype("<u2").tofile(ids)
    own = [f"--config.data.cache_dir={tmp_path / 'cache'}", "--config.data.dtype=uint16"]
    words = [*own, f"--config.data.source={ids}", "--config.data.tokenizer=ids", "--config.data.vocab_size=256"]
    code, _, err = tiny.call(capsys, "train", f"--config={site / 'tiny.py'}:rope", f"--workdir={run}", *words)
    assert code == 0 and "257 ids" in err, err
    rows = tiny.rows(run / "eval.jsonl")
    assert all(row["bpb"] is None and row["num_bytes"] is None and row["tokenizer"] == "ids" for row in rows)
    assert all(row["ppl"] < 60 for row in rows)
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={run}", f"--config.data.validation={ids}", *own)
    assert code == 3 and "name it as --config.data.validation alone" in err, err
    np.save(tmp_path / "held.npy", stream[::-1])
    words = [
        "evaluate",
        f"--workdir={run}",
        f"--config.data.validation={tmp_path / 'held.npy'}",
        "--protocol=nonoverlapping",
    ]
    code, out, err = tiny.call(capsys, *words, own[0])
    assert code == 0 and tiny.rows(run / "eval.jsonl")[-1]["data_digest"] != RunFolder(run).read_config().held_out, err
    code, out, err = tiny.call(capsys, "generate", f"--workdir={run}", "--prompt=107 97", "--num_tokens=5")
    assert code == 0 and out.startswith("107 97 ") and len(out.split()) >= 6, err
    refused(capsys, 3, ["generate", f"--workdir={run}", "--prompt=some words"], "'some' is no id below 256")
