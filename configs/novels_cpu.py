"""Novels on a CPU: all ten encodings, 4 layers of width 128, bytes, L = 64, about 5 M bytes each, tested to 32 L.

    posx sweep --config configs/novels_cpu.py --workdir runs/novels_cpu --config.data.source=PATH/TO/novels

The text is ELTeC-eng (doi 10.5281/zenodo.4662490) or any folder with train.* and validation.* files.
Hardware and time: 2 CPU cores, about half an hour in all; --jobs=2 fills both cores better.
Expect (perplexity per byte, non-overlapping): about 4.4 to 4.6 at L and 5.1 for NoPE; R_8 about 5.8 sinusoidal,
4 RoPE, 2.4 NoPE, 0.97 ALiBi.
"""

from posx.config import base_config


def get_config(arg: str = "alibi"):
    config = base_config(arg)
    config.data.source = "novels"
    config.model.num_layers = 4
    config.model.model_dim = 128
    config.model.num_heads = 4
    config.train.length = 64
    config.train.batch_size = 64
    config.train.steps = 1200
    config.train.learning_rate = 2e-3
    config.eval.lengths = (64, 68, 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
    config.eval.protocols = ("nonoverlapping", "per_position", "sliding")
    config.eval.num_targets = 262144
    config.eval.sliding_targets = 32768  # at stride 16: windows of 4 M tokens, as much as all other lengths together
    config.sweep.train_lens = (64,)
    return config.lock()
