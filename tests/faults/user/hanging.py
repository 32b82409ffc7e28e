"""A user's encoding that calls Python each time. After HANG_AFTER calls each waits HANG_SECONDS."""

import dataclasses
import os
import time

import jax

from posx.encodings.nope import Nope

calls = []


def wait(_):
    calls.append(1)
    if len(calls) > int(os.environ["HANG_AFTER"]):
        time.sleep(float(os.environ["HANG_SECONDS"]))


@dataclasses.dataclass(frozen=True)
class Hangs(Nope):
    def query(self, params, vectors, pos, features):
        jax.debug.callback(wait, vectors[(0,) * vectors.ndim])
        return vectors
