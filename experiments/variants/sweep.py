"""Variants: RoPE's base, with and without ALiBi beside it, on the embedded corpus (Python's own source code).

    posx sweep --config experiments/variants/sweep.py --workdir runs/variants --jobs=4

Hardware and time: 4 CPU cores with --jobs=4, ten minutes for the 18 runs. Expect RoPE alone to rise beyond 64 tokens
whatever its base (R_16 4.6 to 5.9), and with ALiBi beside it far less (1.25 to 1.30, means of three seeds).
"""

from posx.lab.config import base_config

BASES = (100, 10000, 1000000)


def get_config(arg: str = "rope"):
    config = base_config(arg)
    config.model.num_layers = 2
    config.model.model_dim = 96
    config.train.steps = 500
    config.train.warmup_steps = 50
    config.train.checkpoint_steps = 500
    config.eval.lengths = (64, 96, 128, 256, 512, 1024)
    config.eval.num_targets = 65536
    config.sweep.axes = {
        "encoding": tuple(f"rope(base={base}){more}" for more in ("", "+alibi") for base in BASES),
        "train.seed": (0, 1, 2),
    }
    return config.lock()
