"""`posx doctor` and `posx check`: whether this machine computes right numbers, and an encoding keeps the contract."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx import conformance
from posx.attention import Slots, attend, batch_features, causal, kernel_refusal, refusal
from posx.attention.blockwise import Tiling, blockwise
from posx.conformance.by_numpy import run_in_numpy
from posx.conformance.subject import drawn_params
from posx.contract import acting_hooks
from posx.contract.shapes import tile_shapes
from posx.encodings import ENCODINGS, Dims, Encoding, build
from posx.errors import ConfigError, PosxError
from posx.lab.config import DataConfig
from posx.lab.data.store import cache_folder
from posx.lab.machine.compile_cache import most_bytes
from posx.lab.runs.environment import PACKAGES, version
from posx.machine import platforms
from posx.machine.cores import usable_cores
from posx.machine.devices import use_every_core
from posx.machine.guard import guard, start_devices
from posx.parsing import split_items

#: A check of the self-test: it returns whether it passed, and details.
Check = Callable[[], tuple[bool, str]]

#: Several tiles of blockwise attention, of which the last one is padded.
TOKENS, TILES = 70, functools.partial(blockwise, tiling=Tiling(16, 32))
DIMS = Dims(model_dim=32, num_heads=4, head_dim=8, num_layers=1, train_len=TOKENS, num_kv_heads=2)
#: The most that float32 may move an output of order one, and bfloat16 an output or a gradient of a vendor's kernel.
TOLERANCE, HALF_TOLERANCE = 1e-4, 3e-2
#: Seconds in which all checks end, if none takes longer than the longest before it.
LIMIT = 52.0
#: The width of the first column in characters.
WIDTH = 33


def run_doctor(values: dict[str, Any], _: None) -> None:
    """Print `machine_facts`, `checks` and a last line. Raises PosxError, exit code 1, with the checks that failed."""
    if values["dry_run"]:
        print("would describe this machine and check sums of products and attention on it")
        return
    use_every_core()
    start_devices()
    for fact, text in machine_facts():
        print(f"{fact:{WIDTH}}{text}", flush=True)
    count, failed, left = 0, [], []
    for name, outcome in _outcomes(checks()):
        if outcome is None:
            left.append(name)
            continue
        count, (right, detail) = count + 1, outcome
        print(f"{name:{WIDTH}}{'ok    ' if right else 'FAILED'} {detail}", flush=True)
        failed += [] if right else [f"{name}: {detail}"]
    if left:
        late = f"no time was left of {LIMIT:.0f} s. Call posx doctor again: compiled programs are kept"
        print(f"{'not checked':{WIDTH}}{'; '.join(left)}: {late}")
    if failed:
        raise PosxError(f"{len(failed)} of {count} checks failed: {'; '.join(failed)}")
    said = "no check failed" if left else "all is well"
    print(f"{said}: {count} of {count + len(left)} checks passed")


def _outcomes(named_checks: Iterable[tuple[str, Check]]) -> Iterator[tuple[str, tuple[bool, str] | None]]:
    """Yield (name, result) of checks in their order, each when it has ended; None if it would end after LIMIT.

    Every core runs a check. Most of its time goes to XLA's compiler, which does not hold Python's lock.
    """
    started, longest = time.monotonic(), 0.0

    def run(check: Check) -> tuple[bool, str] | None:
        nonlocal longest
        begun = time.monotonic()
        if begun - started + longest > LIMIT:
            return None
        try:
            return check()
        except Exception as error:  # a program that the device or its compiler refuses
            return False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}"
        finally:
            longest = max(longest, time.monotonic() - begun)

    with ThreadPoolExecutor(len(usable_cores())) as pool:
        running = [(name, pool.submit(run, check)) for name, check in named_checks]
        try:
            for name, outcome in running:
                yield name, outcome.result()
        finally:  # after an interrupt no other check begins
            pool.shutdown(wait=False, cancel_futures=True)


def run_check(values: dict[str, Any], _: None) -> None:
    """Print a line for each check and a last one. Raises PosxError, exit code 1, if a check fails."""
    name = values["operand"]
    if not name:
        raise ConfigError("no encoding is named. Name one: posx check alibi, or posx check my_module:MyEncoding")
    sizes = {size: values[size] for size in ("model_dim", "num_heads", "num_kv_heads", "head_dim", "train_len")}
    dims = Dims(num_layers=conformance.DIMS.num_layers, **sizes)
    only = tuple(split_items(values["only"]))
    conformance.check_scale(values["params"])
    if values["dry_run"]:
        print(f"would check {build(name, dims)}: {', '.join(conformance.chosen_checks(only))}")
        return
    if "JAX_PLATFORMS" not in os.environ:  # the comparisons are in float64, and small
        jax.config.update("jax_platforms", "cpu")
    start_devices()
    show = functools.partial(print, flush=True)
    report = conformance.check_encoding(name, dims, only=only, params=values["params"], log=show)
    if report.failures:
        raise PosxError(f"{len(report.failures)} of {len(report.outcomes)} checks failed: {', '.join(report.failures)}")
    passed = sum(outcome.status == "ok" for outcome in report.outcomes)
    print(f"all is well with {name}: {passed} passed, {len(report.outcomes) - passed} had nothing to check")


def machine_facts() -> Iterator[tuple[str, str]]:
    """Yield (fact, its value on this machine)."""
    versions = ", ".join(f"{name} {version(name)}" for name in (*PACKAGES, "matplotlib"))
    yield "versions", f"python {platform.python_version()}, {versions}"
    kinds = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    devices = f"{jax.device_count()} {platforms.platform()} ({kinds})"
    yield "devices", f"{devices}, {len(usable_cores())} cores usable"
    yield "XLA_FLAGS", os.environ.get("XLA_FLAGS", "") or "(none)"
    yield "compiler", guard().text
    root = cache_folder(DataConfig())
    inside = sorted(root.iterdir()) if root.is_dir() else []
    yield "cache", f"{root}, {', '.join(f'{path.name} {_size(path)}' for path in inside) or 'empty'}"
    yield "compiled programs", _programs(root / "compiled")
    yield "memory", _memory()
    here = Path.cwd()
    yield "disk", f"{shutil.disk_usage(here).free / 1e9:,.0f} GB free in {here}"
    yield (
        "self-test",
        (
            "This takes at most a minute. It checks sums that a faulty compiler gets wrong. It also compares "
            f"attention with dense attention, which NumPy computes one operation at a time. {len(subjects())} of the "
            f"{len(ENCODINGS)} encodings, which together use every hook of the catalogue, are compared. For the "
            "others, use posx check NAME."
        ),
    )


def checks() -> Iterator[tuple[str, Check]]:
    """Yield (name, check), the most telling check first.

    First come sums after products, then the precision of products. On an NVIDIA GPU both kernels in 16 bits follow. The
    encodings of `subjects` in full float32 are last.
    """
    for name, run, wanted in _known_faults():
        yield name, functools.partial(_sum, run, wanted)
    yield "products of float32", _precision
    if platforms.platform() == "cuda":
        yield "attention, cuDNN in bfloat16", functools.partial(_compare_bfloat16, "fused", "rope")
        yield "attention, kernel in bfloat16", functools.partial(_compare_bfloat16, "kernel", "rope", "t5")
    for name, encoding in subjects().items():
        yield f"attention, {name}", functools.partial(_attention, encoding)


def _sum(run: Callable[[], jax.Array], wanted: float) -> tuple[bool, str]:
    with platforms.product_precision("highest"):
        sums = np.asarray(jax.jit(run)())
    return bool(np.allclose(sums, wanted, rtol=1e-3)), f"{sums.flat[-1]:.6g}, expected {wanted:.6g}"


def _precision() -> tuple[bool, str]:
    """Compare products with float64: in the precision of evaluation, and in that of training by default."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype(np.float32) / np.float32(32**0.5) for shape in ((64, 1024), (1024, 64)))
    wanted, errors = x.astype(np.float64) @ y, {}
    for precision in ("highest", "default"):
        with platforms.product_precision(precision):
            errors[precision] = float(np.abs(np.asarray(jax.jit(jnp.matmul)(x, y)) - wanted).max())
    detail = f"evaluation errs by {errors['highest']:.0e} in sums of order one, training by {errors['default']:.0e}"
    if errors["default"] > 10 * errors["highest"]:
        detail += ", as its operands are rounded. train.precision=highest trains in full float32, more slowly"
    return errors["highest"] <= TOLERANCE, detail


def _compare_bfloat16(executor: str, *names: str) -> tuple[bool, str]:
    """Compare a kernel that serves 16 bits, and its gradients, with dense attention in float32."""
    dims, errors = dataclasses.replace(DIMS, head_dim=64), {}  # as models have it
    for name in names:
        encoding = build(name, dims)
        params, *vectors = _draw_arrays(encoding, dims)
        rounded = [x.astype(jnp.bfloat16) for x in vectors[:3]]
        wanted = run_in_numpy(_gradients(encoding, "dense"), params, *(x.astype(np.float32) for x in rounded))
        for part, x in jax.jit(_gradients(encoding, executor))(params, *rounded).items():
            scale = max(1.0, float(np.abs(wanted[part]).max()))
            errors[f"{name} {part}"] = float(np.abs(np.asarray(x, np.float32) - wanted[part]).max()) / scale
    return _verdict(errors, HALF_TOLERANCE)


def _gradients(encoding: Encoding, executor: str) -> Callable[..., dict[str, jax.Array]]:
    """Return a function of params, q, k and v that returns the outputs, and gradients of the sum of their sines."""
    pos = np.arange(TOKENS, dtype=np.int32)

    def total(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        o = attend(encoding, params, q, k, v, pos, executor=executor).astype(jnp.float32)
        return jnp.sum(jnp.sin(o)), o

    def run(*given: Any) -> dict[str, jax.Array]:
        (params, q, k, v), o = jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)(*given)
        return {"outputs": o, "dq": q, "dk": k, "dv": v} | {f"d{name}": grad for name, grad in params.items()}

    return run


def _draw_arrays(encoding: Encoding, dims: Dims) -> tuple[Any, ...]:
    """Return random parameters of an encoding, q, k, v [1, t, h or g, d] and x [1, t, m], NumPy arrays in float32."""
    rng, heads = np.random.default_rng(0), (dims.num_heads, dims.kv_heads, dims.kv_heads)
    shapes = [(1, TOKENS, number, dims.head_dim) for number in heads] + [(1, TOKENS, dims.model_dim)]
    params = drawn_params(encoding, dims, "large")
    return jax.tree.map(np.float32, (params, *(rng.standard_normal(shape) for shape in shapes)))


def _verdict(errors: dict[str, float], tolerance: float) -> tuple[bool, str]:
    wrong = [name for name, error in errors.items() if not error <= tolerance]
    largest = np.max(list(errors.values()))  # NaN if one is NaN
    return not wrong, f"{', '.join(wrong or errors)}: differs by at most {largest:.1e}, allowed {tolerance:g}"


def subjects() -> dict[str, Encoding]:
    """Return the encodings of the self-test: each that acts on a hook that none before it does, and plain attention."""
    encodings, met = {}, set[str]()
    for name in ENCODINGS:
        encoding = build(name, DIMS)
        hooks = acting_hooks(encoding)
        if not met.issuperset(hooks) or not hooks:
            encodings[name] = encoding
        met.update(hooks)
    return encodings


def _known_faults() -> list[tuple[str, Callable[[], jax.Array], float]]:
    """Return (name, program, its result) of programs that posx's own barriers do not reach."""
    weights = jax.nn.softmax(jax.random.normal(jax.random.key(0), (256, 256), jnp.float32))
    ones, one = jnp.ones((256, 64), jnp.float32), jnp.float32(1)
    rows = jnp.zeros((32_769, 3), jnp.float32).at[:, 0].set(jnp.arange(32_769, dtype=jnp.float32))

    def sum_constants() -> jax.Array:
        constant = jax.lax.optimization_barrier(one)
        return jnp.sum((weights @ jnp.broadcast_to(constant, (256, 64))) * ones, axis=-1)

    def sum_squares() -> jax.Array:  # jax issue 39103
        matrix = jnp.eye(3, dtype=jnp.float32)
        return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(jax.lax.optimization_barrier(rows))[-1]

    return [("sum of a product", sum_constants, 64.0), ("sum of squares", sum_squares, 32_768.0**2)]


def _attention(encoding: Encoding) -> tuple[bool, str]:
    """Compare compiled attention with the dense executor, computed by NumPy one operation at a time.

    Compiled are every executor that serves the encoding, the last token decoded from a cache, and sums over the outputs
    of constant values. The result is (whether all agree, the largest difference).
    """
    pos = np.arange(TOKENS, dtype=np.int32)
    params, q, k, v, x = given = _draw_arrays(encoding, DIMS)
    executors = serving_executors(encoding, params)

    def whole(executor: Any, params: Any, q: Any, k: Any, v: Any, x: Any) -> jax.Array:
        x = x if encoding.acts_on("features") else None
        return attend(encoding, params, q, k, v, pos, x=x, executor=executor)

    def run_compiled(one: Any, params: Any, q: Any, k: Any, v: Any, x: Any) -> dict[str, jax.Array]:
        outputs = {name: whole(executor, params, q, k, v, x) for name, executor in executors.items()}
        features = batch_features(encoding, params, x, pos)[0]
        last = {name: array[:, -1:] for name, array in features.items()}
        slots = Slots(pos[-1:], pos[-1:]), Slots(pos, pos)
        outputs["decoding"] = attend(encoding, params, q[:, -1:], k, v, *slots, features=(last, features))
        same = jnp.broadcast_to(one, v.shape)
        outputs["constant values"] = whole(TILES, params, q, k, same, x).sum(axis=-1)
        return outputs

    o, same = (run_in_numpy(functools.partial(whole, "dense"), params, q, k, v, x) for v in (v, np.ones_like(v)))
    wanted = {**dict.fromkeys(executors, o), "decoding": o[:, -1:], "constant values": same.sum(axis=-1)}
    with platforms.product_precision("highest"):
        outputs = jax.jit(run_compiled)(np.float32(1), *given)
    errors = {name: float(np.abs(np.asarray(outputs[name]) - wanted[name]).max()) for name in outputs}
    return _verdict(errors, TOLERANCE)


def serving_executors(encoding: Encoding, params: Any) -> dict[str, Any]:
    """Return the executors that serve an encoding here, by name. Without a GPU the kernel would be interpreted."""
    executors: dict[str, Any] = {"dense": "dense", "blockwise": TILES}
    if not refusal(encoding, params, causal(), in_order=True, segments=False):
        executors["fused"] = "fused"
    tile = tile_shapes(encoding, DIMS)
    if platforms.platform() == "cuda" and not kernel_refusal(encoding, params, causal(), tile=tile):
        executors["kernel"] = "kernel"
    return executors


def _size(path: Path) -> str:
    files = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:,.0f} MB"


def _programs(folder: Path) -> str:
    """Say where compiled programs are kept."""
    if not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return "nothing is kept: JAX_ENABLE_COMPILATION_CACHE is off"
    if elsewhere := jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return f"kept in {elsewhere}, as JAX's own settings say"
    return f"kept in the cache, {_size(folder)} of at most {most_bytes() / 1e6:,.0f} MB"


def _memory() -> str:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        free, total = (int(lines[name].split()[0]) * 1024 / 1e9 for name in ("MemAvailable", "MemTotal"))
        return f"{free:.1f} of {total:.1f} GB free"
    except (OSError, KeyError, ValueError):
        return "not known on this system"
