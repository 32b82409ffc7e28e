"""Pictures: hidden patches of dead leaves, trained at 8 x 8 patches and measured at 16 x 16 and 24 x 24, three seeds.

    posx sweep --config pictures_cpu --workdir runs/pictures_cpu

The model of `tasks_cpu` as an encoder of the task `dead_leaves`, at positions (row, column). Six ways to encode them.
Hardware and time: 2 CPU cores, about 45 minutes. The same command resumes.
Expect and read: experiments/pictures.
"""

from posx.lab.config import base_config

#: Each reads a row and a column, but for `nope`, which reads neither. A head has 32 channels, so 16 planes.
ENTRIES = (
    "axial(inner=rope(base=100))", "mrope(sections=(8, 8))", "axial(inner=sinusoidal)", "axial(inner=learned)",
    "axial(inner=alibi)", "nope",
)  # fmt: skip


def get_config():
    config = base_config()
    config.data.source = "task:dead_leaves"
    config.model.num_layers = 2
    config.model.model_dim = 64
    config.model.num_heads = 2
    config.train.objective = "masked"
    config.train.positions = "grid"
    config.train.length = 64
    config.train.batch_size = 64
    config.train.steps = 2000
    config.train.warmup_steps = 100
    config.train.checkpoint_steps = 500
    config.eval.lengths = (64, 256, 576)
    config.eval.num_items = 500
    config.sweep.encodings = ENTRIES
    config.sweep.train_lens = (64,)
    config.sweep.seeds = (0, 1, 2)
    return config.lock()
