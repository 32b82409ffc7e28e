"""Scaling: does the order of twelve encodings at a small size hold at a larger one? One width and one training length.

    posx sweep --config scaling --workdir runs/scaling/64x64 --config.data.source=PATH/TO/novels
    posx sweep --config scaling:128x64 --workdir runs/scaling/128x64 --config.data.source=PATH/TO/novels

WIDTHxLENGTH: the width is 64, 128, 256 or 512, of 0.2 to 13 M parameters; L is 64, 128 or 256. Steps of 4,096 tokens
give each width 5.7 or 5.8 tokens a parameter, and Transformer-XL 5.3.
`--config.data.source=stdlib` is the second text, `--config.data.tokenizer=bpe` the second tokenizer.
Hardware and time on 2 CPU cores: a cell of width 64 takes half an hour to an hour, one of width 128 two to five
hours. One of width 256 takes about a day at L = 64, and more at 256. Width 512 needs a GPU. `--dry_run` says what is
left, and the same command resumes.
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


def learning_rate(width: int) -> float:
    """Return the rate of the rule: that of the recipe at width 128, times the square root of 128 / width."""
    return 4e-3 * (128 / width) ** 0.5


def get_config(arg: str = "64x64"):
    cells = {f"{width}x{length}": (width, length) for width in STEPS for length in LENGTHS}
    if arg not in cells:
        raise ValueError(f"{arg!r} is unknown: WIDTHxLENGTH of {', '.join(map(str, STEPS))} and 64, 128, 256")
    width, length = cells[arg]
    config = base_config()
    config.data.source = "novels"
    config.data.vocab_size = 1024  # of a BPE
    config.model.num_layers = 4
    config.model.model_dim = width
    config.model.num_heads = width // 32
    config.train.steps = STEPS[width]
    config.train.batch_size = 4096 // length
    config.train.learning_rate = learning_rate(width)
    config.eval.lengths = tuple(factor * length for factor in FACTORS)
    config.eval.protocols = ("nonoverlapping",)
    config.eval.num_targets = 262144
    config.sweep.encodings = ENCODINGS
    config.sweep.train_lens = (length,)
    config.sweep.seeds = (0, 1, 2)
    return config.lock()
