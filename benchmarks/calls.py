"""One causal attention call, as every contestant of the attention and memory benchmarks makes it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posx
from benchmarks import calls_torch, measure
from benchmarks.workers import one_line
from posx.attention import EXECUTORS
from posx.attention.blockwise import Tiling, blockwise
from posx.attention.tiles import content_free_bias
from posx.contract import acting_hooks, distance_terms
from posx.lab.layers import sequential
from posx.machine.devices import mesh, replicate

#: The library's own executors.
LIBRARY = tuple(EXECUTORS)
#: Blockwise without skipping, beside blockwise that skips tiles if an encoding fades. And blockwise with larger tiles,
#: for accelerators.
EXECUTORS["every-tile"] = functools.partial(blockwise, tiling=Tiling(skip=False))
EXECUTORS["wide-tiles"] = functools.partial(blockwise, tiling=Tiling(512, 1024))

Arrays = dict[str, np.ndarray]
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
KINDS = ("forward", "gradient")
FAILURES = (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError)


@dataclasses.dataclass(frozen=True)
class Case:
    """An encoding, and tokens of noise to attend over.

    Attributes:
      encoding: its spec.
      length: tokens to attend over.
      heads: of queries, keys and values.
      head_dim: channels of a head.
      batch: sequences.
      train_len: tokens that the encoding is resolved for.
      dtype: of q, k and v.
    """

    encoding: str
    length: int
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    train_len: int = measure.TRAIN_LEN
    dtype: str = "float32"

    @property
    def dims(self) -> posx.Dims:
        return posx.Dims(self.heads * self.head_dim, self.heads, self.head_dim, 1, self.train_len)

    @property
    def value(self) -> posx.Encoding:
        return posx.build(measure.at_any_length(self.encoding), self.dims)

    @property
    def params(self) -> dict[str, jax.Array]:
        return self.value.init(jax.random.key(0), self.dims)

    def arrays(self) -> Arrays:
        """Draw q, k, v and the output's cotangent [b, t, h, d]: float32 that `dtype` holds exactly."""
        rng, shape = np.random.default_rng(self.length), (self.batch, self.length, self.heads, self.head_dim)
        drawn = ((name, rng.standard_normal(shape, np.float32)) for name in ("q", "k", "v", "cotangent"))
        return {name: np.asarray(jnp.asarray(x, self.dtype), np.float32) for name, x in drawn}

    def layer_inputs(self) -> tuple[np.ndarray, ...]:
        """Draw (x [b, t, m],) for encodings that read features of it; else return ()."""
        shape = (self.batch, self.length, self.dims.model_dim)
        has_features = self.value.acts_on("features")
        return (np.random.default_rng(0).standard_normal(shape, np.float32),) if has_features else ()

    def useful_flops(self, kind: str) -> float:
        """Count two products forward and four more backward, over the visible pairs only, without recomputation."""
        pairs = self.batch * self.heads * self.length * (self.length + 1) / 2
        return (4.0 if kind == "forward" else 12.0) * pairs * self.head_dim


class Call(NamedTuple):
    """A prepared call: each entry runs it to its end. `answers` are the output and the gradients."""

    forward: Callable[[], Any]
    gradient: Callable[[], Any]
    answers: Callable[[], Arrays]


def jax_call(
    attention: Callable[..., jax.Array], case: Case, *fixed: Any, place: Callable[[Any], Any] = lambda arrays: arrays
) -> Call:
    """Compile `attention(params, q, k, v, *fixed)`. `fixed` are arguments, as large constants slow the compiler.

    `place` puts all of them, and the output's cotangent, on their devices.
    """
    arrays = case.arrays()
    cotangent, *qkv = (jnp.asarray(arrays[name], case.dtype) for name in ("cotangent", "q", "k", "v"))
    cotangent, operands, fixed = place((cotangent, (case.params, *qkv), fixed))

    @jax.jit
    def gradient(operands, cotangent, fixed):
        o, pull_back = jax.vjp(lambda *operands: attention(*operands, *fixed), *operands)
        return o, pull_back(cotangent)

    forward = jax.jit(attention)

    def answers() -> Arrays:
        params_grad, *grads = gradient(operands, cotangent, fixed)[1]
        found = {"o": forward(*operands, *fixed)} | dict(zip("qkv", grads, strict=True)) | params_grad
        return {name: np.asarray(x, np.float64) for name, x in found.items()}

    return Call(
        lambda: jax.block_until_ready(forward(*operands, *fixed)),
        lambda: jax.block_until_ready(gradient(operands, cotangent, fixed)),
        answers,
    )


def places(case: Case) -> np.ndarray:
    """Return the positions 0 to t - 1, on every axis that the encoding reads."""
    pos = sequential(case.length)
    return pos if case.value.axes <= 1 else np.stack([pos] * case.value.axes, axis=-1)


def posx_call(case: Case, executor: str, num_devices: int = 1) -> Call:
    encoding, pos, over = case.value, places(case), mesh(num_devices)

    def attention(params, q, k, v, x=None):
        with jax.sharding.use_abstract_mesh(over.abstract_mesh):
            return posx.attend(encoding, params, q, k, v, pos, x=x, executor=executor)

    return jax_call(attention, case, *case.layer_inputs(), place=lambda arrays: replicate(arrays, num_devices))


def stock_call(case: Case, library: str) -> Call | None:
    """Call JAX's or Flax's own attention with a dense bias; None if the encoding is more than maps of q, k and a bias.

    A bias without learned parameters is made once, and its time is not measured.
    """
    encoding, pos = case.value, jnp.asarray(places(case))
    stock = {"embed", "query", "key", "logit_scale", "by_distance", "bias"}
    terms = distance_terms(encoding, case.params)
    if encoding.history or not {*acting_hooks(encoding)} <= stock or terms.keys() - {"bias"}:
        return None
    has_bias = "bias" in terms or encoding.acts_on("bias")
    fixed = content_free_bias(encoding, {}, pos[None], pos[None]) if has_bias and not case.params else None
    order = jnp.asarray(sequential(case.length))[None]
    mask = nnx.make_causal_mask(order).astype(bool) if library == "flax.nnx" else None
    kernel = "cudnn" if library == "jax.nn-cudnn" else "xla"

    def attention(params, q, k, v, bias, mask):
        q = jax.vmap(lambda q: encoding.query(params, q, pos, {}))(q)
        k = jax.vmap(lambda k: encoding.key(params, k, pos, {}))(k)
        if encoding.acts_on("logit_scale"):
            q = q * encoding.logit_scale(params, pos, {}).T[None, :, :, None].astype(q.dtype)
        if has_bias and bias is None:
            bias = content_free_bias(encoding, params, pos[None], pos[None])
        if library == "flax.nnx":
            return nnx.dot_product_attention(q, k, v, bias=bias, mask=mask)
        return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True, implementation=kernel)

    return jax_call(attention, case, fixed, mask)


def contestants() -> dict[str, Callable[[Case], Call | None]]:
    """Name every way to make the call. It returns None, or raises, for an encoding that it cannot serve.

    "posx" is the executor that posx chooses, over all devices of the process. The other ways of JAX use the first.
    """
    ours = {"posx": lambda case: posx_call(case, "auto", jax.device_count())}  # asked late: names alone start no JAX
    ours |= {f"posx-{name}": functools.partial(posx_call, executor=name) for name in (*LIBRARY, "auto")}
    ours["posx-wide-tiles"] = lambda case: posx_call(case, "wide-tiles")
    ours["posx-every-tile"] = lambda case: posx_call(case, "every-tile") if case.value.fades else None
    stock = {name: functools.partial(stock_call, library=name) for name in ("jax.nn", "jax.nn-cudnn", "flax.nnx")}
    return ours | stock | {name: functools.partial(calls_torch.call, name=name) for name in calls_torch.NAMES}


def separate() -> list[str]:
    """List all contestants of a CPU but "posx-auto", which is one of the others. A CPU interprets "posx-kernel"."""
    of_accelerators = ("posx-kernel", "posx-wide-tiles", "jax.nn-cudnn")
    return [name for name in contestants() if name not in ("posx-auto", *of_accelerators)]


def is_quadratic(contestant: str, encoding: str) -> bool:
    """Return whether memory grows with the square of the length by construction."""
    flash = contestant in ("torch-sdpa", "torch-sdpa-compiled") and encoding in calls_torch.WITHOUT_BIAS
    flash |= contestant == "jax.nn-cudnn" and encoding in calls_torch.WITHOUT_BIAS
    linear = ("posx", "posx-blockwise", "posx-kernel", "posx-fused", "posx-auto", "posx-every-tile", "posx-wide-tiles")
    return not flash and contestant not in (*linear, "torch-sdpa-column", "torch-flex")


def in_attention(encodings: list[str]) -> list[str]:
    """Choose NoPE, the yardstick, and the encodings that differ from it in more than the embeddings."""
    differ = [text for text in encodings if {*acting_hooks(measure.at_any_length(text))} - {"embed"}]
    return list(dict.fromkeys(["nope", *differ]))


def oracle(case: Case) -> Arrays:
    """Compute the output and all gradients by posx's dense executor in float64."""
    arrays, encoding, pos = case.arrays(), case.value, places(case)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), case.params)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        x = jnp.asarray(*case.layer_inputs(), jnp.float64) if case.layer_inputs() else None

        def attention(params, q, k, v):
            return posx.attend(encoding, params, q, k, v, pos, x=x, executor="dense")

        o, pull_back = jax.vjp(attention, params, wide["q"], wide["k"], wide["v"])
        params_grad, *grads = pull_back(wide["cotangent"])
        found = {"o": o} | dict(zip("qkv", grads, strict=True)) | params_grad
        return {name: np.asarray(x) for name, x in found.items()}


def errors(answers: Arrays, truth: Arrays) -> dict[str, float]:
    """Return the largest deviation of each answer over the largest true entry; infinite for a missing answer."""
    found = {}
    for name, true in truth.items():
        wrong = np.abs(answers[name] - true).max() / max(np.abs(true).max(), 1e-30) if name in answers else np.inf
        found[name] = float(wrong) if np.isfinite(wrong) else float("inf")
    return found


class Calls:
    """The attention calls that one process makes, served by `workers`: by contestant and case."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, Case], Call] = {}
        self.truths: dict[Case, Arrays] = {}

    def check(self, name: str, case: dict[str, Any]) -> dict[str, Any] | None:
        """Return the worst answer against posx's dense executor in float64; None if the contestant has none."""
        made = Case(**case)
        try:
            call = contestants()[name](made)
            answers = call.answers() if call else None
        except FAILURES:  # `prepare` reports it
            return None
        if answers is None:
            return None
        if made not in self.truths:
            self.truths = {made: oracle(made)}
        truth = self.truths[made]
        if name == "torch-flex":  # forward only
            truth = {key: truth[key] for key in answers}
        answer, error = max(errors(answers, truth).items(), key=lambda item: item[1])
        return {"contestant": name, "encoding": made.encoding, "answer": answer, "error": error}

    def prepare(self, name: str, case: dict[str, Any]) -> dict[str, Any] | None:
        """Return {kind: seconds of a compiled call, or why there is none}; None if the contestant has no such call."""
        made = Case(**case)
        self.calls = {key: call for key, call in self.calls.items() if key[1].length == made.length}
        try:
            call = contestants()[name](made)
        except FAILURES as error:
            return dict.fromkeys(KINDS, one_line(error))
        if call is None:
            return None
        self.calls[name, made] = call
        return {kind: self._first(getattr(call, kind)) for kind in KINDS}

    def _first(self, once: Callable[[], Any]) -> float | str:
        try:
            once()
            return seconds(once, 1)
        except FAILURES as error:
            return one_line(error)

    def turn(self, name: str, case: dict[str, Any], kind: str, repeats: int) -> float:
        return seconds(getattr(self.calls[name, Case(**case)], kind), repeats)


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the seconds per call, after some that are not timed."""
    for _ in range(1 + repeats // 4):
        call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
