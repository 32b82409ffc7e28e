"""Smoke test: three encodings in seconds, to see that everything is in place.

    posx sweep --config smoke --workdir runs/smoke

Hardware and time: 2 CPU cores, about half a minute. Expect a falling loss, below the 4.5 bits a byte of single-byte
frequencies, and nothing more: the numbers rank no encoding.
"""

from posx.lab.config import base_config


def get_config(arg: str = "alibi"):
    config = base_config(arg)
    config.model.num_layers = 2
    config.model.model_dim = 64
    config.train.length = 32
    config.train.batch_size = 32
    config.train.steps = 150
    config.train.warmup_steps = 20
    config.train.learning_rate = 3e-3
    config.train.checkpoint_steps = 50
    config.eval.lengths = (32, 64, 128)
    config.eval.protocols = ("nonoverlapping", "per_position", "sliding")
    config.eval.num_targets = 8192
    config.eval.sliding_targets = 1024
    config.sweep.encodings = ("sinusoidal", "rope", "alibi")
    config.sweep.train_lens = (32,)
    return config.lock()
