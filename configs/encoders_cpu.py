"""Encoders: masked loss against steps, and pseudo-perplexity to 8 L, of ten encodings and one control.

    posx sweep --config encoders_cpu --workdir runs/encoders_cpu --config.data.source=PATH/TO/novels

Model and text of `novels_cpu`, 2400 steps: 15 % of the tokens are predicted, so a step says less than one of next
tokens. Each encoding has its own rate (`Encoding.about.lr_multiplier`), which was found for causal models.
Hardware and time: not measured; `--dry_run` estimates it.
Expect and read: experiments/encoders.
"""

from posx.lab.config import base_config

T5 = "t5(bidirectional=true)"
#: TUPE-R and its control with tied positions, as in TUPE's paper; without T5 they are TUPE-A and BERT's positions.
WITH_BUCKETS = (f"tupe+{T5}", f"learned+{T5}")
ENTRIES = ("sinusoidal", "learned", "shaw", "transformer_xl", T5, "tupe", "deberta", "rope", "alibi", *WITH_BUCKETS)


def get_config(arg: str = "alibi"):
    config = base_config(arg)
    config.data.source = "novels"
    config.model.num_layers = 4
    config.model.model_dim = 128
    config.model.num_heads = 4
    config.train.objective = "masked"
    config.train.length = 64
    config.train.batch_size = 64
    config.train.steps = 2400
    config.train.learning_rate = 4e-3
    config.eval.lengths = (64, 128, 256, 512)
    config.eval.protocols = ("pseudo_perplexity",)
    config.eval.num_targets = 262144
    config.sweep.encodings = ENTRIES
    config.sweep.train_lens = (64,)
    config.sweep.seeds = (0, 1, 2)
    return config.lock()
