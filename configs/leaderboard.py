"""Leaderboard: most encodings of the catalogue at the shape of `novels_cpu`, three seeds each.

    posx sweep --config leaderboard --workdir runs/leaderboard --config.data.source=PATH/TO/novels

Model, text and training of `novels_cpu`, each encoding at its own rate (`Encoding.about.lr_multiplier`). The preset
`leaderboard:tuning` found these rates, with a third of the steps and no longer windows, judged as `recipe_cpu` judges.
An encoding that has several forms stands with each; logit scales stand with RoPE.
Hardware and time: 4 CPU cores, about five hours (tuning one and a half); the same command resumes.
Expect and read: experiments/leaderboard.
"""

from posx.lab.config import base_config
from posx.lab.config.sections import CLASSIC

RELEASED_BAM = "bam(shapes=(0, 0), initial_scale=1, per_layer=true)"  # as its later train.py starts: as no position
KERPLES = ("kerple", "kerple(form=power)", "kerple(per_layer=true)")  # the last: what DAPE is built on
BIASES = (*KERPLES, "bam", RELEASED_BAM, "sandwich", "fire", "dynamic_bias", "nape")
CONTENT = ("fox", "fox(gate=cable)", "cope", "dape", "dape(kernel=3)", "inkling", "grape_a", "path")
ROTARY = ("xpos", "pope", "selective_rope", "fope", "key_offset")
SSMAX = ("rope+ssmax", "rope+ssmax(initial=0.31)", "ssmax")  # 0.31: 1 / mean(ln n) over 64 tokens
LOGIT_SCALES = ("rope+log_length", *SSMAX, "rope+llama4_temperature", "rope+adaptive_temperature")
#: Slow planes that stand still or follow the content, accumulated rotations, rotations beside a penalty of far keys.
CONTROLS = (
    "rope(frequencies=whole_turns)", "darope", "rope+gape", "path+fox", "path+alibi", "accumulated_rope",
    "accumulated_rope(random=True)", "rotated_values(base=accumulated_rope)",
)  # fmt: skip
ENTRIES = (*CLASSIC, *BIASES, *CONTENT, *ROTARY, *LOGIT_SCALES, *CONTROLS)
#: The ten were tuned by `recipe_cpu`; an encoding that learns nothing has one run for all multipliers.
NEW = tuple(entry for entry in ENTRIES if entry not in CLASSIC)


def get_config(arg: str = ""):
    config = base_config()
    config.data.source = "novels"
    config.model.num_layers = 4
    config.model.model_dim = 128
    config.model.num_heads = 4
    config.train.length = 64
    config.train.batch_size = 64
    config.train.steps = 1200
    config.train.learning_rate = 4e-3
    config.eval.lengths = (64, 68, 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
    config.eval.protocols = ("nonoverlapping",)
    config.eval.num_targets = 262144
    config.sweep.encodings = ENTRIES
    config.sweep.train_lens = (64,)
    config.sweep.seeds = (0, 1, 2)
    if arg == "tuning":
        config.data.tuning_fraction = 0.1
        config.train.steps = 488
        config.eval.lengths = (64,)
        config.sweep.encodings = NEW
        config.sweep.seeds = (0,)
        config.sweep.axes = {"train.position_lr_multiplier": (1.0, 3.0, 10.0, 30.0)}
    elif arg:
        raise ValueError(f"{arg!r} is unknown: nothing for the leaderboard, or 'tuning'")
    return config.lock()
