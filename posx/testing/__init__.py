"""Does an encoding keep the contract? The checks that every registered encoding passes, for any encoding.

    report = posx.testing.check_encoding(MyEncoding())
    print(report)           # a line for each check: ok, or FAILED and what differs by how much
    assert report.ok

On the command line: `posx check my_module:MyEncoding`. Not imported by `import posx`.

`check_log_probs` tells whether a function can be measured by `posx.evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from posx.encodings import Dims, Spec, build
from posx.errors import ConfigError, nearest
from posx.evaluation.probe import check_log_probs
from posx.lazy import modules_of
from posx.testing.decoding import check_decode
from posx.testing.dtypes import promotion
from posx.testing.executors import check_fused, check_gradients, check_padding, check_strips, check_tiles
from posx.testing.facts import (
    check_causal_only,
    check_fades,
    check_positions,
    check_prefix_consistent,
    check_reach,
    check_shift_invariant,
    check_tiling,
)
from posx.testing.findings import Findings, Outcome, Report, outcome
from posx.testing.hooks import check_eager, check_hooks, check_value
from posx.testing.packing import check_packing
from posx.testing.precision import check_bfloat16, check_float32, check_reference
from posx.testing.subject import DIMS, Subject

#: (params, x [t, m], project, pos [t], visible [t, t]) -> outputs [t, h, d], in NumPy, see `check_encoding`.
Reference = Callable[[dict[str, Any], np.ndarray, Callable[..., Any], np.ndarray, np.ndarray], np.ndarray]

#: Every check by name, in the order in which they run; each takes a `Subject` and the `Findings` to add to.
CHECKS: dict[str, Callable[[Subject, Findings], None]] = {
    "hooks": check_hooks,
    "value": check_value,
    "reference": check_reference,
    "tiles": check_tiles,
    "strips": check_strips,
    "fused": check_fused,
    "gradients": check_gradients,
    "packing": check_packing,
    "padding": check_padding,
    "decode": check_decode,
    "positions": check_positions,
    "shift_invariant": check_shift_invariant,
    "prefix_consistent": check_prefix_consistent,
    "tiling": check_tiling,
    "reach": check_reach,
    "fades": check_fades,
    "causal_only": check_causal_only,
    "float32": check_float32,
    "bfloat16": check_bfloat16,
    "eager": check_eager,
}

#: What each check shows if it holds, a phrase for its line.
SHOWS = {
    "hooks": "each hook returns the shape and the type that the contract states",
    "value": "encodings of equal fields are equal, and survive pickling",
    "reference": "outputs equal the given reference",
    "tiles": "attention in small tiles equals dense attention",
    "strips": "at consecutive positions, tables of distances equal dense attention",
    "fused": "the vendor's kernel equals dense attention",
    "gradients": "gradients equal finite differences, and none reach later tokens",
    "packing": "documents packed into one row equal the documents alone",
    "padding": "empty slots return 0 and change nothing",
    "decode": "decoding with a cache equals the whole sequence",
    "positions": "all positions are defined, and the order of slots changes nothing",
    "shift_invariant": "moving all positions alike changes nothing, or something if declared False",
    "prefix_consistent": "later tokens do not change earlier outputs, or do if declared False",
    "tiling": "an encoding that declares whole rows of keys needs them",
    "reach": "distances from the declared reach on count alike, nearer ones do not",
    "fades": "the curve or the potential falls with distance, as declared",
    "causal_only": "masks that show later keys are refused where the encoding needs that",
    "float32": "float32 equals float64 up to rounding, at far positions too",
    "bfloat16": "bfloat16 rounds vectors and never positions",
    "eager": "hooks return outside jit what they return inside",
}


def chosen_checks(only: Collection[str]) -> dict[str, Callable[[Subject, Findings], None]]:
    """Return the checks named in `only`, or all if it is empty. Raises ConfigError for an unknown name."""
    for name in only:
        if name not in CHECKS:
            raise ConfigError(f"no check is called {name!r}; {nearest(name, list(CHECKS))}known: {', '.join(CHECKS)}")
    return {name: check for name, check in CHECKS.items() if not only or name in only}


def check_encoding(
    encoding: Spec,
    dims: Dims = DIMS,
    *,
    reference: Reference | None = None,
    only: Collection[str] = (),
    bidirectional: bool = False,
    log: Callable[[Outcome], None] | None = None,
) -> Report:
    """Runs the contract's checks on `encoding`, built for `dims`, with large random parameters and vectors.

    Each check compares numbers of small layers of 13 tokens, most of them in float64: executors with the dense one,
    decoding with the whole sequence, gradients with finite differences, and what the class declares with what happens.

    Args:
      encoding: a value, or what `posx.build` takes.
      dims: sizes it is built for; a `train_len` of at least 30 gives tables enough rows.
      reference: the same attention in float64 NumPy, written from the definition: a function (params, x [t, m],
        project, pos [t], visible [t, t]) -> outputs [t, h, d] of one sequence, where `q, k, v = project(x)` gives the
        vectors [t, h, d] and [t, g, d] of token vectors x, embedded first if the encoding embeds. A row of `visible`
        without any key gives 0.
      only: names of checks out of `CHECKS`; all if left out.
      bidirectional: whether tables of distances are checked without a mask too.
      log: is given each outcome as soon as it is known.

    Raises ConfigError where the encoding cannot be built, or `only` names no check. What a check finds, or a hook
    raises inside one, is in the report.
    """
    chosen = chosen_checks(only)
    with promotion(strict=False):  # a check of its own says what stricter rules refuse
        subject = Subject(build(encoding, dims), dims, reference, bidirectional)
    outcomes = []
    for name, check in chosen.items():
        findings = Findings()
        try:
            with promotion(subject.strict):
                check(subject, findings)
        except Exception as error:  # the user's own code
            text = next((line for line in str(error).splitlines() if line.strip()), "")
            findings.problems.insert(0, f"raises {type(error).__name__}: {text}")
        outcomes.append(outcome(name, findings, SHOWS[name]))
        if log is not None:
            log(outcomes[-1])
    return Report(subject.encoding, tuple(outcomes))


__all__ = ["CHECKS", "DIMS", "Findings", "Outcome", "Report", "Subject", "check_encoding", "check_log_probs"]

__getattr__ = modules_of(__name__)
