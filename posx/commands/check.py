"""`posx check NAME`: the contract's checks for one encoding, a line for each."""

from __future__ import annotations

import os
from typing import Any

import jax

from posx.encodings import Dims, build
from posx.errors import ConfigError, PosxError
from posx.fields import items_of
from posx.machine.guard import start_devices
from posx.testing import DIMS, check_encoding, chosen_checks


def main(values: dict[str, Any], _: None) -> None:
    """Print a line for each check and a last one. Raises PosxError, exit code 1, if a check fails."""
    name = values["operand"]
    if not name:
        raise ConfigError("name the encoding first: posx check alibi, or posx check my_module:MyEncoding")
    sizes = {size: values[size] for size in ("model_dim", "num_heads", "num_kv_heads", "head_dim", "train_len")}
    dims = Dims(num_layers=DIMS.num_layers, **sizes)
    only = tuple(items_of(values["only"]))
    if values["dry_run"]:
        print(f"would check {build(name, dims)}: {', '.join(chosen_checks(only))}")
        return
    if "JAX_PLATFORMS" not in os.environ:  # the comparisons are in float64, and small
        jax.config.update("jax_platforms", "cpu")
    start_devices()
    report = check_encoding(
        name, dims, only=only, bidirectional=values["bidirectional"], log=lambda line: print(line, flush=True)
    )
    if report.failed:
        raise PosxError(f"{len(report.failed)} of {len(report.outcomes)} checks failed: {', '.join(report.failed)}")
    passed = sum(outcome.status == "ok" for outcome in report.outcomes)
    cls = type(report.encoding)
    print(
        f"all is well with {cls.__module__}:{cls.__qualname__}: {passed} passed, "
        f"{len(report.outcomes) - passed} had nothing to check"
    )
