"""Settings: one ConfigDict for the command line, typed frozen values for the code.

`base_config(name)` has every option with its default. `posx.lab.argv` makes a ConfigDict of a command line.
`run_config` resolves it to a `RunConfig`, and no function below sees a ConfigDict. The `problems()` of a section are
those of its fields. `posx.lab.runs.checks` finds whether the model, the protocols and the encodings of a run fit.

Nothing here knows the use of a setting: this room imports encodings and masks, no more.
"""

from posx.lab.config.data import DataConfig
from posx.lab.config.run import RunConfig, base_config, encoding_section, run_config
from posx.lab.config.sections import SECTIONS, EvalConfig, ModelConfig, SweepConfig, TrainConfig
from posx.lazy import modules_of

__all__ = [
    "SECTIONS", "DataConfig", "EvalConfig", "ModelConfig", "RunConfig", "SweepConfig", "TrainConfig",
    "base_config", "encoding_section", "run_config",
]  # fmt: skip

__getattr__ = modules_of(__name__)
