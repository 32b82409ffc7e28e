"""Scaling: does the order of twelve encodings at a small size hold at a larger one? One width, three training lengths.

    posx sweep --config scaling --workdir runs/scaling/64 --config.data.source=PATH/TO/novels
    posx sweep --config scaling:128 --workdir runs/scaling/128 --config.data.source=PATH/TO/novels

The width is 64, 128, 256 or 512, of 0.2 to 13 M parameters. Steps of 4,096 tokens give each 5.8 tokens a parameter.
`--config.data.source=stdlib` is the second text, `--config.data.tokenizer=bpe` the second tokenizer.
Hardware and time, estimated for 2 busy CPU cores: 64 takes three hours, 128 a day, 256 eleven days. 512 needs a GPU.
`--dry_run` says what is left, and the same command resumes.
Expect and read: experiments/scaling.
"""

from posx.lab.config import base_config

#: For each width the steps of 4,096 tokens.
STEPS = {64: 320, 128: 1200, 256: 4600, 512: 18000}
LENGTHS = (64, 128, 256)
FACTORS = (1, 2, 4, 8)
#: One or two of each kind: none, added to tokens, rotations, fixed and learned biases, biases of the content.
ENCODINGS = (
    "nope", "sinusoidal", "rope", "rope(frequencies=whole_turns)", "darope", "alibi", "sandwich", "kerple", "t5",
    "transformer_xl", "fox", "cope",
)  # fmt: skip


def get_config(arg: str = ""):
    widths = {"": 64, "128": 128, "256": 256, "512": 512}
    if arg not in widths:
        raise ValueError(f"{arg!r} is unknown: nothing for the width 64, or one of 128, 256 and 512")
    width = widths[arg]
    config = base_config()
    config.data.source = "novels"
    config.data.vocab_size = 1024  # of a BPE
    config.model.num_layers = 4
    config.model.model_dim = width
    config.model.num_heads = width // 32
    config.train.steps = STEPS[width]
    config.train.learning_rate = 4e-3 * (128 / width) ** 0.5
    config.eval.lengths = tuple(sorted({factor * length for factor in FACTORS for length in LENGTHS}))
    config.eval.protocols = ("nonoverlapping",)
    config.eval.num_targets = 262144
    config.sweep.encodings = ENCODINGS
    config.sweep.train_lens = LENGTHS
    config.sweep.axes = {"train.batch_size": tuple(4096 // length for length in LENGTHS)}
    config.sweep.zip = ("train_lens+train.batch_size",)
    config.sweep.seeds = (0, 1, 2)
    return config.lock()
