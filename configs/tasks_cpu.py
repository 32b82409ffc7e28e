"""Tasks: three tasks trained at 64 tokens and tested with items of up to 128 and 256, three seeds each.

    posx sweep --config tasks_cpu --workdir runs/tasks_cpu

The ten classic encodings on binary majority, unique copy and flip-flop. `:catalogue` takes every encoding of the
leaderboard and `alibi(scale=log)`, `:more` the ten on other tasks of posx. `:recall` takes every encoding with keys
that see the token before, on associative recall (MQAR) and unique copy.
Hardware and time: 2 CPU cores, about two hours; `:catalogue` ten, `:more` nine, `:recall` one and a half. The same
command resumes.
Expect and read: experiments/tasks.
"""

import runpy
from pathlib import Path

from posx.lab.config import base_config
from posx.lab.config.sections import CLASSIC

#: Read from the file beside this one. `configs` cannot be imported if posx was installed from a wheel.
ENTRIES = runpy.run_path(str(Path(__file__).with_name("leaderboard.py")))["ENTRIES"]
#: Each has the rate, 2e-3 or 5e-3, at which more encodings answer items of the training lengths right, 2e-3 if both do.
TASKS = {"binary_majority": 2e-3, "unique_copy(symbols=128)": 5e-3, "flip_flop": 2e-3}
#: Tasks that have items of 65 to 256 tokens.
MORE = (
    "majority", "sort(symbols=128)", "repeat_copy", "parity", "addition", "selective_copy", "passkey", "s5", "aa_star",
    "ab_star", "starts_with_a", "ends_with_a", "contains_ab",
)  # fmt: skip
#: Without a key that sees the token before, RoPE does not learn the first in 10,000 steps.
RECALL = {"mqar(symbols=16)": 5e-3, "unique_copy(symbols=128)": 5e-3}
CATALOGUE = (*ENTRIES, "alibi(scale=log)")
SEEING_BACK = (
    *(f"key_offset+{name}" for name in CATALOGUE if name != "key_offset"), "key_offset+rope(rotary_dim=16)",
    "key_offset+deberta(max_distance=16)", "canon+rope",
)  # fmt: skip


def get_config(arg: str = ""):
    config = base_config()
    config.model.num_layers = 2
    config.model.model_dim = 64
    config.model.num_heads = 2
    config.train.length = 64
    config.train.batch_size = 64
    config.train.steps = 2000
    config.train.warmup_steps = 100
    config.train.checkpoint_steps = 500
    config.train.stop_check_steps = 100
    config.eval.lengths = (64, 128, 256)
    config.eval.attention_items = 64
    config.sweep.encodings = CLASSIC
    config.sweep.train_lens = (64,)
    config.sweep.seeds = (0, 1, 2)
    tasks = TASKS
    if arg == "catalogue":
        config.sweep.encodings = CATALOGUE
    elif arg == "more":
        tasks = dict.fromkeys(MORE, 2e-3)
    elif arg == "recall":
        tasks = RECALL
        config.sweep.encodings = SEEING_BACK
    elif arg:
        raise ValueError(f"{arg!r} is unknown: nothing for the ten, 'catalogue', 'more' or 'recall'")
    config.sweep.axes = {
        "data.source": tuple(f"task:{task}" for task in tasks),
        "train.learning_rate": tuple(tasks.values()),
    }
    config.sweep.zip = ("data.source+train.learning_rate",)
    return config.lock()
