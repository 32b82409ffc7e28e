"""Novels on a CPU: all ten encodings, 4 layers of width 128, bytes, L = 64, about 5 M bytes each, tested to 32 L.

    posx sweep --config novels_cpu --workdir runs/novels_cpu --config.data.source=PATH/TO/novels

The text is ELTeC-eng (doi 10.5281/zenodo.4662490) or any folder with train.* and validation.* files.
Hardware and time: 2 CPU cores, two hours and a half a seed of all ten; half of it is the sliding protocol.
Expect (perplexity per byte, non-overlapping, 3 to 5 seeds): 4.1 to 4.35 at L and 4.9 to 5.1 for NoPE; R_8 0.97 for T5,
ALiBi, Shaw and Transformer-XL, 0.97 to 1.04 DeBERTa, 2.7 to 3.3 NoPE, 4.1 to 5.4 RoPE, 6.0 to 6.4 sinusoidal.
"""

from posx.lab.config import base_config


def get_config(arg: str = "alibi"):
    config = base_config(arg)
    config.data.source = "novels"
    config.model.num_layers = 4
    config.model.model_dim = 128
    config.model.num_heads = 4
    config.train.length = 64
    config.train.batch_size = 64
    config.train.steps = 1200
    config.train.learning_rate = 4e-3
    config.eval.lengths = (64, 68, 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
    config.eval.protocols = ("nonoverlapping", "per_position", "sliding")
    config.eval.num_targets = 262144
    config.eval.sliding_targets = 32768  # at stride 16: windows of 4 M tokens, as much as all other lengths together
    config.sweep.train_lens = (64,)
    return config.lock()
