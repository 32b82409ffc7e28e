"""Runs: a run's folder, the checks before anything starts, training and evaluating it to `DONE`, loading it.

`folder` knows the files of a run and the process that holds it, `finding` the runs of a work folder. `checks` finds
everything wrong before a start. `describe` computes the model and the cost of a run, `environment` records versions
and devices. `runner` takes one run to `DONE`. `evaluate` measures its rows on the tokens that `targets` chooses.
`text` finds the text of an earlier run. `load` gives a trained run as a function, `exported` as a file. `exchange`
reads and writes models of Hugging Face. `foreign` reads their files, and `families` holds their architectures.
"""

from posx.lazy import module_getter

__getattr__ = module_getter(__name__)
