"""Novels on a GPU: all ten encodings, 6 layers of width 512, byte-level BPE of 8192, L = 512, tested to 16 L.

    posx sweep --config novels_gpu --workdir runs/novels_gpu --config.data.source=PATH/TO/novels

The text is ELTeC-eng (doi 10.5281/zenodo.4662490) or any folder with train.* and validation.* files. 5000 steps of
32 768 tokens are eleven passes over its 14.6 M tokens, hence the dropout.
Hardware and time: planned for one data-centre GPU; not yet measured.
Expect the order of the small preset: sinusoidal breaks first, RoPE rises, ALiBi stays flat.
"""

from posx.lab.config import base_config


def get_config(arg: str = "alibi"):
    config = base_config(arg)
    config.data.source = "novels"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 8192
    config.model.num_layers = 6
    config.model.model_dim = 512
    config.model.num_heads = 8
    config.model.dropout = 0.1
    config.model.dtype = "bfloat16"
    config.train.length = 512
    config.train.batch_size = 64
    config.train.steps = 5000
    config.train.warmup_steps = 250
    config.train.learning_rate = 1e-3
    config.train.final_learning_rate = 1e-4
    config.train.checkpoint_steps = 1000
    config.eval.lengths = (512, 640, 768, 1024, 2048, 4096, 8192)
    config.eval.protocols = ("nonoverlapping", "per_position", "sliding")
    config.eval.num_targets = 524288
    config.eval.batch_tokens = 65536
    config.sweep.train_lens = (512,)
    return config.lock()
