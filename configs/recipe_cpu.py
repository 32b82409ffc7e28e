"""Recipe: at which learning rates each encoding is best at the training length, on documents held out for this alone.

    posx sweep --config recipe_cpu --workdir runs/recipe_cpu --config.data.source=PATH/TO/novels

Model, text and training length of `novels_cpu`, 2 M bytes a run. A tenth of the training documents is taken out and
judges, at the training length only: neither the validation text nor a longer window is looked at. An encoding that
learns nothing has one run for all multipliers. All base rates decay to 2e-4, the study's last one.
`:confirm` runs what was chosen, and half the base rate, on 5 M bytes; `:beyond` repeats the runs at the chosen rate, to
be tested beyond L once the choice stands.
Hardware and time: 4 CPU cores, three hours; confirm an hour and a half. What was chosen, and how: experiments/recipe.
"""

from posx.lab.config import base_config


def get_config(arg: str = ""):
    config = base_config()
    config.data.source = "novels"
    config.data.tuning_fraction = 0.1
    config.model.num_layers = 4
    config.model.model_dim = 128
    config.model.num_heads = 4
    config.train.length = 64
    config.train.batch_size = 64
    config.train.steps = 488
    config.eval.lengths = (64,)
    config.eval.protocols = ("nonoverlapping",)
    config.eval.num_targets = 262144
    config.sweep.train_lens = (64,)
    config.sweep.seeds = (0, 1)
    config.sweep.axes = {
        "train.learning_rate": (1e-3, 2e-3, 4e-3, 8e-3),
        "train.position_lr_multiplier": (1.0, 3.0, 10.0, 30.0),
    }
    if arg == "confirm":
        config.train.steps = 1220
        config.sweep.axes = {"train.learning_rate": (2e-3, 4e-3)}
    elif arg == "beyond":
        config.sweep.encodings = ("t5", "shaw", "deberta", "transformer_xl")  # learned, and defined beyond L
        config.sweep.axes = {
            "train.learning_rate": (4e-3,),
            "train.position_lr_multiplier": (1.0, 3.0, 10.0, 30.0, 100.0),
        }
    elif arg:
        raise ValueError(f"{arg!r} is unknown: nothing for the choice, 'confirm' or 'beyond'")
    return config.lock()
