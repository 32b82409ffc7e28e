"""Quick: five encodings trained at 64 tokens and tested up to 1024, on the embedded corpus (Python's own source code).

    posx sweep --config quick --workdir runs/quick

Hardware and time: 2 CPU cores, under 10 minutes. Expect sinusoidal to break beyond 64 tokens, RoPE to rise, ALiBi to
stay flat. It supports that order and no more: the model is small and sees about 2 M bytes.
"""

from posx.lab.config import base_config


def get_config(arg: str = "alibi"):
    config = base_config(arg)
    config.model.num_layers = 2
    config.model.model_dim = 96
    config.train.length = 64
    config.train.batch_size = 64
    config.train.steps = 500
    config.train.warmup_steps = 50
    config.train.checkpoint_steps = 100
    config.eval.lengths = (64, 96, 128, 256, 512, 1024)
    config.eval.protocols = ("nonoverlapping", "per_position")
    config.eval.num_targets = 65536
    config.sweep.encodings = ("sinusoidal", "rope", "t5", "nope", "alibi")
    config.sweep.train_lens = (64,)
    return config.lock()
