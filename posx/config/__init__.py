"""Settings: one ConfigDict for the command line, typed frozen values for the code.

`base_config(name)` gives every option with its default. At the edge, which is `flags`, the ConfigDict becomes a
`RunConfig`; below that no function sees a ConfigDict. A section's own `problems()` are those of its fields; all that is
wrong with a run, with the model and the protocols that it names, is found by `posx.runs.checks`. `stored` says how a
run's settings are kept, compared and found again, `schema_1` how they once were.

Nothing here knows what settings are for: this room imports encodings and the names of attention's executors, no more.
"""

from posx.config.data import DataConfig
from posx.config.evaluation import EvalConfig
from posx.config.model import ModelConfig
from posx.config.run import SECTIONS, RunConfig, base_config, encoding_section, run_config
from posx.config.sweep import SweepConfig
from posx.config.train import TrainConfig
from posx.lazy import modules_of

__all__ = [
    "SECTIONS", "DataConfig", "EvalConfig", "ModelConfig", "RunConfig", "SweepConfig", "TrainConfig",
    "base_config", "encoding_section", "run_config",
]  # fmt: skip

__getattr__ = modules_of(__name__)
