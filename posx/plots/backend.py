"""Import Matplotlib whatever MPLBACKEND says. Must be imported before any other module that needs Matplotlib.

Jupyter sets MPLBACKEND for the commands that a notebook starts. Matplotlib cannot be imported if that backend is not
installed for them. posx draws without a backend, and leaves a usable choice of the user as it is.
"""

import contextlib
import os
import sys

if "matplotlib" not in sys.modules:
    _asked = os.environ.pop("MPLBACKEND", "")
    import matplotlib

    if _asked:
        os.environ["MPLBACKEND"] = _asked
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = _asked
