"""Settings: a ConfigDict that a config file fills in, typed frozen values for the code.

`base_config(name)` has every option with its default, and a config file returns it. `posx.lab.argv` makes `Sections`
of it and of a command line, and no function below sees a ConfigDict. `run_config` resolves them to a `RunConfig`. The
`problems()` of a section are those of its fields. `posx.lab.runs.checks` finds whether the model, the protocols and the
encodings of a run fit.

Nothing here knows the use of a setting: this room imports encodings and masks, no more.
"""

from posx.lab.config.data import DataConfig
from posx.lab.config.given import Sections, base_config, encoding_fields, read_sections
from posx.lab.config.run import RunConfig, run_config
from posx.lab.config.sections import SECTIONS, EvalConfig, ModelConfig, SweepConfig, TrainConfig
from posx.lazy import module_getter

__all__ = [
    "SECTIONS", "DataConfig", "EvalConfig", "ModelConfig", "RunConfig", "Sections", "SweepConfig", "TrainConfig",
    "base_config", "encoding_fields", "read_sections", "run_config",
]  # fmt: skip

__getattr__ = module_getter(__name__)
