"""`posx doctor`: what this machine is to posx, and whether the numbers it computes are right."""

from __future__ import annotations

import functools
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import Slots, attend, batch_features, causal, refusal
from posx.attention.blockwise import Tiling, blockwise
from posx.config import DataConfig
from posx.contract import acting
from posx.data.store import cache_folder
from posx.encodings import ENCODINGS, Dims, Encoding, build
from posx.errors import PosxError
from posx.machine.backend import start_devices
from posx.machine.compile_cache import most_bytes
from posx.machine.cores import usable_cores
from posx.machine.devices import use_every_core
from posx.machine.guard import guard
from posx.runs.environment import PACKAGES, version

#: Several tiles of blockwise attention, whose last ones are filled up.
TOKENS, TILES = 70, functools.partial(blockwise, tiling=Tiling(16, 32))
KEY_HEADS = 2
DIMS = Dims(model_dim=32, num_heads=4, head_dim=8, num_layers=1, train_len=TOKENS, num_kv_heads=KEY_HEADS)
#: By how much float32 may move an output of order one.
TOLERANCE = 1e-4
#: Characters of the first column.
WIDTH = 33


class Check(NamedTuple):
    """One line of the self-test."""

    name: str
    ok: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.name:{WIDTH}}{'ok    ' if self.ok else 'FAILED'} {self.detail}"


def main(values: dict[str, Any], _: None) -> None:
    """Print `facts`, `checks` and a last line. Raises PosxError, exit code 1, with the checks that failed."""
    if values["dry_run"]:
        print("would describe this machine and check sums of products and attention on it")
        return
    use_every_core()
    start_devices()
    for what, text in facts():
        print(f"{what:{WIDTH}}{text}", flush=True)
    done = []
    for check in checks():
        print(check, flush=True)
        done.append(check)
    if failed := [check for check in done if not check.ok]:
        reasons = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        raise PosxError(f"{len(failed)} of {len(done)} checks failed: {reasons}")
    print(f"all is well: {len(done)} of {len(done)} checks passed")


def facts() -> Iterator[tuple[str, str]]:
    """(what, how it is here), a line each."""
    versions = ", ".join(f"{name} {version(name)}" for name in (*PACKAGES, "matplotlib"))
    yield "versions", f"python {platform.python_version()}, {versions}"
    kinds = sorted({device.device_kind for device in jax.devices()})
    yield (
        "devices",
        f"{jax.device_count()} {jax.default_backend()} ({', '.join(kinds)}), {len(usable_cores())} cores usable",
    )
    yield "XLA_FLAGS", os.environ.get("XLA_FLAGS", "") or "(none)"
    yield "compiler", guard().text
    root = cache_folder(DataConfig())
    yield "cache", f"{root}, {', '.join(f'{name} {_size(root / name)}' for name in _inside(root)) or 'empty'}"
    yield "compiled programs", _programs(root / "compiled")
    yield "memory", _memory()
    here = Path.cwd()
    yield "disk", f"{shutil.disk_usage(here).free / 1e9:,.0f} GB free in {here}"
    yield (
        "self-test",
        f"about a minute: sums that a faulty compiler gets wrong, and attention with {len(tried())} of the "
        f"{len(ENCODINGS)} encodings, which together use every hook of the catalogue (the others: posx check NAME), "
        "against dense attention computed one operation at a time",
    )


def checks() -> Iterator[Check]:
    """Yield the checks of the self-test: sums after products, which a faulty compiler gets wrong, then the encodings
    of `tried`.

    An encoding is right if every executor that serves it, and the last token out of a cache, give what the dense
    executor gives operation by operation; also if all values are one constant and the outputs are summed.
    """
    for name, run, wanted in _known_faults():
        found = np.asarray(jax.jit(run)())
        yield Check(name, bool(np.allclose(found, wanted, rtol=1e-3)), f"{found.flat[-1]:.6g}, expected {wanted:.6g}")
    for name, encoding in tried().items():
        yield _attention(name, encoding)


def tried() -> dict[str, Encoding]:
    """Return the encodings of the self-test by name: in the catalogue's order, each that acts on a hook that none
    before it acts on, and plain attention."""
    found, met = {}, set[str]()
    for name in ENCODINGS:
        encoding = build(name, DIMS)
        sites = acting(encoding)
        if not met.issuperset(sites) or not sites:
            found[name] = encoding
        met.update(sites)
    return found


def _known_faults() -> list[tuple[str, Callable[[], jax.Array], float]]:
    """(name, program, what it gives): programs of a user's own, which posx's barriers do not reach."""
    weights = jax.nn.softmax(jax.random.normal(jax.random.key(0), (256, 256), jnp.float32))
    ones, one = jnp.ones((256, 64), jnp.float32), jnp.float32(1)
    rows = jnp.zeros((32_769, 3), jnp.float32).at[:, 0].set(jnp.arange(32_769, dtype=jnp.float32))

    def of_constant_values() -> jax.Array:
        constant = jax.lax.optimization_barrier(one)
        return jnp.sum((weights @ jnp.broadcast_to(constant, (256, 64))) * ones, axis=-1)

    def of_squares() -> jax.Array:  # jax issue 39103
        matrix = jnp.eye(3, dtype=jnp.float32)
        return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(jax.lax.optimization_barrier(rows))[-1]

    return [("sum of a product", of_constant_values, 64.0), ("sum of squares", of_squares, 32_768.0**2)]


def _attention(name: str, encoding: Encoding) -> Check:
    params, pos = encoding.init(jax.random.key(0), DIMS), np.arange(TOKENS, dtype=np.int32)
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, TOKENS, heads, DIMS.head_dim)), jnp.float32)
        for heads in (DIMS.num_heads, KEY_HEADS, KEY_HEADS)
    )
    x = jnp.asarray(rng.standard_normal((1, TOKENS, DIMS.model_dim)), jnp.float32)
    whole: dict[str, Any] = {"q_slots": pos, "x": x if encoding.acts_on("features") else None}
    fits = not refusal(encoding, params, causal(), in_order=True, segments=False)
    executors: dict[str, Any] = {"dense": "dense", "blockwise": TILES} | ({"fused": "fused"} if fits else {})

    def run(params: Any, one: Any) -> dict[str, jax.Array]:
        same = jnp.broadcast_to(one, v.shape)
        found = {how: attend(encoding, params, q, k, v, **whole, executor=by) for how, by in executors.items()}
        features = batch_features(encoding, params, x, pos)[0]
        found["decoding"] = attend(
            encoding, params, q[:, -1:], k, v, Slots(pos[-1:], pos[-1:]), Slots(pos, pos),
            features=({name: kept[:, -1:] for name, kept in features.items()}, features),
        )  # fmt: skip
        found["constant values"] = attend(encoding, params, q, k, same, **whole, executor=TILES).sum(axis=-1)
        return found

    def due(params: Any, one: Any) -> dict[str, jax.Array]:
        o, same = (attend(encoding, params, q, k, x, **whole, executor="dense") for x in (v, jnp.full_like(v, one)))
        return {**dict.fromkeys(executors, o), "decoding": o[:, -1:], "constant values": same.sum(axis=-1)}

    with jax.disable_jit():
        wanted = due(params, 1.0)
    found = jax.jit(run)(params, jnp.float32(1))
    errors = {how: float(np.abs(np.asarray(found[how]) - np.asarray(wanted[how])).max()) for how in found}
    wrong = [how for how, error in errors.items() if not error <= TOLERANCE]
    worst = max(errors, key=lambda how: (np.isnan(errors[how]), errors[how]))
    detail = f"{', '.join(wrong or errors)}: differs by at most {errors[worst]:.1e}, allowed {TOLERANCE:g}"
    return Check(f"attention, {name}", not wrong, detail)


def _inside(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def _size(path: Path) -> str:
    files = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:,.0f} MB"


def _programs(folder: Path) -> str:
    """How compiled programs are kept."""
    if not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return "not kept: JAX_ENABLE_COMPILATION_CACHE is off"
    if elsewhere := jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return f"kept in {elsewhere}, as JAX was told"
    return f"kept in the cache, {_size(folder)} of at most {most_bytes() / 1e6:,.0f} MB"


def _memory() -> str:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        free, total = (int(lines[name].split()[0]) / 1e6 for name in ("MemAvailable", "MemTotal"))
        return f"{free:.1f} of {total:.1f} GB free"
    except (OSError, KeyError, ValueError):
        return "not known on this system"
