"""Encoders: masked loss against steps, and pseudo-perplexity to 8 L, of ten encodings and one control.

    posx sweep --config encoders_cpu --workdir runs/encoders_cpu --config.data.source=PATH/TO/novels
    posx sweep --config encoders_cpu:rates --workdir runs/encoders_rates --config.data.source=PATH/TO/novels

The model of `tasks_cpu` on the text of `novels_cpu`. `:rates` trains five of the encodings at half and twice the
learning rate. Each encoding has its own multiplier (`Encoding.about.lr_multiplier`), which was found for causal models.
Hardware and time: 2 CPU cores, about an hour; `:rates` twenty minutes.
Expect and read: experiments/encoders.
"""

from posx.lab.config import base_config

T5 = "t5(bidirectional=true)"
#: TUPE-R and its control with tied positions, as in TUPE's paper; without T5 they are TUPE-A and BERT's positions.
WITH_BUCKETS = (f"tupe+{T5}", f"learned+{T5}")
ENTRIES = ("sinusoidal", "learned", "shaw", "transformer_xl", T5, "tupe", "deberta", "rope", "alibi", *WITH_BUCKETS)


def get_config(arg: str = ""):
    if arg not in ("", "rates"):
        raise ValueError(f"{arg!r} is unknown: nothing for the study, or 'rates'")
    config = base_config()
    config.data.source = "novels"
    config.model.num_layers = 2
    config.model.model_dim = 64
    config.model.num_heads = 2
    config.train.objective = "masked"
    config.train.length = 64
    config.train.batch_size = 64
    config.train.steps = 2000
    config.train.learning_rate = 4e-3
    config.eval.lengths = (64, 128, 256, 512)
    config.eval.protocols = ("pseudo_perplexity",)
    config.eval.num_targets = 262144
    config.sweep.encodings = ENTRIES
    config.sweep.train_lens = (64,)
    config.sweep.seeds = (0, 1, 2)
    if arg == "rates":
        config.sweep.encodings = ("learned", "tupe", "rope", *WITH_BUCKETS)
        config.sweep.axes = {"train.learning_rate": (2e-3, 8e-3)}
        config.sweep.seeds = (0,)
    return config.lock()
