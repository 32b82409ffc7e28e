"""Runs: a run's folder, the checks before anything starts, training and evaluating it to `DONE`, loading what it left.

folder        where things lie and who holds them; training writes there and knows no more of a run than this
checks        all that can be found wrong before anything starts
describe      the model that settings come to, and what a run would be
environment   what the numbers may depend on besides the settings
runner        one run from its settings to `DONE`
evaluate      the rows of a trained run
targets       which tokens they score: the same in all of them
text          the text of a run that exists, wherever it lies now
load          a trained run as a function
"""

from posx.lazy import modules_of

__getattr__ = modules_of(__name__)
