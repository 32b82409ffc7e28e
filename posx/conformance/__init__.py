"""The checks of the contract that every registered encoding passes, for any encoding.

    report = posx.conformance.check_encoding(MyEncoding())
    print(report)           # a line for each check: ok, or FAILED with the first problem
    assert report.ok

On the command line: `posx check my_module:MyEncoding`. `import posx` does not import this module.

`check_log_probs` checks whether `posx.evaluate` can measure a function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from posx.conformance import declarations, executors, rounding
from posx.conformance.findings import Findings, Report
from posx.conformance.subject import DIMS, CheckSubject, check_scale, promotion
from posx.contract import Dims, Params, abstract_params
from posx.contract.sizes import array_shapes, check_params
from posx.encodings import Spec, build
from posx.errors import ConfigError, nearest
from posx.evaluation.probe import check_log_probs
from posx.lazy import module_getter

Reference = Callable[[dict[str, Any], np.ndarray, Callable[..., Any], np.ndarray, np.ndarray], np.ndarray]
Check = Callable[[CheckSubject, Findings], None]

#: Every check by name, in the order in which they run, with a phrase that says what holds if it passes.
CHECKS: dict[str, tuple[Check, str]] = {
    "hooks": (declarations.check_hooks, "each hook returns the shape and the type that the contract states"),
    "value": (declarations.check_value, "encodings with equal fields are equal, also after pickling"),
    "tiles": (executors.check_tiles, "attention in small tiles equals dense attention"),
    "strips": (executors.check_strips, "attention from tables of distances equals dense attention"),
    "fused": (executors.check_fused, "the vendor's fused kernel equals dense attention"),
    "gradients": (executors.check_gradients, "gradients equal finite differences, and none reach later tokens"),
    "reference": (executors.check_reference, "outputs equal those of the given reference"),
    "packing": (executors.check_packing, "documents packed into one row equal the documents alone"),
    "padding": (executors.check_padding, "empty slots return 0 and change no other output"),
    "decode": (executors.check_decode, "decoding with a cache equals one pass over the whole sequence"),
    "positions": (declarations.check_positions, "all positions are defined, and the order of slots changes nothing"),
    "shift_invariant": (declarations.check_shift_invariant, "adding a constant to all positions acts as declared"),
    "prefix": (declarations.check_prefix, "later tokens do not change earlier outputs"),
    "tiling": (declarations.check_tiling, "an encoding declares whole rows of keys if it needs them, and only then"),
    "reach": (declarations.check_reach, "terms by distance are constant from the declared reach on, and not before"),
    "fades": (declarations.check_fades, "the bias by distance or the token bias falls, as declared"),
    "causal_only": (
        declarations.check_causal_only,
        "masks that show later keys are refused if the encoding needs that",
    ),
    "float32": (rounding.check_float32, "float32 equals float64 up to rounding, at far positions too"),
    "bfloat16": (rounding.check_bfloat16, "bfloat16 rounds vectors and never positions"),
    "eager": (declarations.check_eager, "hooks return the same outside jit as inside"),
}


def chosen_checks(only: Collection[str]) -> list[str]:
    """Return the checks named in `only`, or all if it is empty. Raises ConfigError for an unknown name."""
    for name in only:
        if name not in CHECKS:
            hint = nearest(name, list(CHECKS))
            raise ConfigError(f"only={name}: no check has this name. {hint}The checks are: {', '.join(CHECKS)}.")
    return [name for name in CHECKS if not only or name in only]


def check_encoding(
    encoding: Spec,
    dims: Dims = DIMS,
    *,
    reference: Reference | None = None,
    only: Collection[str] = (),
    params: str | Params = "large",
    log: Callable[[Findings], None] | None = None,
) -> Report:
    """Run the checks of the contract on `encoding`, built for `dims`, with random parameters and vectors.

    Each check compares numbers of small layers of 13 tokens, most of them in float64. It compares executors with the
    dense one, decoding with the whole sequence, gradients with finite differences, and declared facts with behaviour.

    Args:
      encoding: a value, or a spec for `posx.build`.
      dims: the sizes to build it for. A `train_len` of at least 30 gives tables enough rows.
      reference: the same attention in float64 NumPy, written from the definition: a function (params, x [t, m],
        project, pos [t], visible [t, t]) -> outputs [t, h, d] of one sequence. `q, k, v = project(x)` gives the vectors
        [t, h, d] and [t, g, d] of token vectors x. If the encoding embeds, the function embeds x first. A row of
        `visible` without any key must give 0.
      only: names of checks out of `CHECKS`; empty for all.
      params: "large" for numbers from N(0, 0.5), so that every array changes the outputs well above rounding. "init"
        for those of `init`, each array moved by a tenth of its size, if large ones are beyond what training reaches. Or
        trained arrays by name, as `init` returns them.
      log: is called with the findings of each check as soon as they are known.

    Returns:
      The findings. They include each problem that a check finds and each error that a hook raises inside a check.

    Raises:
      ConfigError: the encoding cannot be built, `only` names no check, or `params` are not its own.
    """
    chosen = chosen_checks(only)
    with promotion(strict=False):  # the check `hooks` reports what strict promotion refuses
        built = build(encoding, dims)
        if not isinstance(params, str):
            remedy = f"Give all that init(rng, dims) returns, for dims = {dims}."
            check_params(str(built), array_shapes(params), array_shapes(abstract_params(built, dims)), remedy)
        subject = CheckSubject(built, dims, reference, params)
    outcomes = []
    for name in chosen:
        check, shows = CHECKS[name]
        findings = Findings(name, shows)
        try:
            with promotion(subject.strict):
                check(subject, findings)
        except Exception as error:  # the user's own code
            text = next((line for line in str(error).splitlines() if line.strip()), "")
            findings.problems.insert(0, f"raises {type(error).__name__}: {text}")
        outcomes.append(findings)
        if log is not None:
            log(findings)
    return Report(subject.encoding, tuple(outcomes))


__all__ = ["CHECKS", "DIMS", "CheckSubject", "Findings", "Report", "check_encoding", "check_log_probs", "check_scale"]

__getattr__ = module_getter(__name__)
