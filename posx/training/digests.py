"""What an array is known again by: of one that is whole, and of one whose parts lie on many devices and machines."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from posx.machine import processes

#: Entries whose terms are computed at a time.
_SOME = 2**20


def in_parts(array: Any) -> bool:
    """Whether an array lies on more than one device."""
    return isinstance(array, jax.Array) and len(array.sharding.device_set) > 1


def facts_of(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Shape, type and digest of each array: "sha256" of what is whole here, "sum" of what lies in parts.

    Where there are such, all processes call this.
    """
    parts = [name for name, array in arrays.items() if in_parts(array)]
    sums = processes.total(np.array([_sum(arrays[name]) for name in parts], np.uint64)) if parts else ()
    found = {name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in arrays.items()}
    for name, one in zip(parts, sums, strict=True):
        found[name]["sum"] = f"{int(one):016x}"
    for name, facts in found.items():
        if "sum" not in facts:
            facts["sha256"] = sha256_of(arrays[name])
    return found


def is_same(array: np.ndarray, saved: Mapping[str, Any]) -> bool:
    """Whether a whole array is what was saved, whole or in parts."""
    facts = {"shape": list(array.shape), "dtype": str(array.dtype)}
    facts |= {"sha256": sha256_of(array)} if "sha256" in saved else {"sum": f"{_sum(array):016x}"}
    return facts == saved


def sha256_of(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _sum(array: Any) -> int:
    """Of an array, or of its parts that this process answers for: the sum modulo 2^64 of a term for every entry, its
    place and its bits mixed (the finalizer of SplitMix64). Sums of parts add up to that of the whole however it is cut.
    """
    if in_parts(array):
        parts = [(np.asarray(one.data), one.index) for one in array.addressable_shards if one.replica_id == 0]
    else:
        parts = [(np.asarray(array), (slice(None),) * np.ndim(array))]
    return sum(_sum_of_part(part, index, array.shape) for part, index in parts) % 2**64


def _sum_of_part(part: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    """part: what an array of `shape` holds at `index`."""
    starts = [one.indices(size)[0] for one, size in zip(index, shape, strict=True)]
    strides = [math.prod(shape[n + 1 :]) for n in range(part.ndim)]
    along = [
        (start + np.arange(size, dtype=np.uint64)) * np.uint64(stride)
        for start, size, stride in zip(starts, part.shape, strides, strict=True)
    ]
    rows = along[0] if along else np.zeros(1, np.uint64)
    inside = functools.reduce(np.add.outer, along[1:], np.zeros((), np.uint64)).reshape(-1)
    bits = np.ascontiguousarray(part).view(f"u{part.dtype.itemsize}").reshape(len(rows), -1)
    step, total = max(1, _SOME // max(1, len(inside))), 0
    for n in range(0, len(rows), step):
        places = rows[n : n + step, None] + inside
        x = places * np.uint64(0x9E3779B97F4A7C15) + bits[n : n + step].astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        total += int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))
    return total
