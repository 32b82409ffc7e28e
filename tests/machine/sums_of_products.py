"""Check sums after attention over operands that do not vary. test_guard runs this in processes of their own.

    python -m tests.machine.sums_of_products [jax-first] [NAME ...]

Prints a line for each wrong case, and for each encoding how many cases there were. jax-first: JAX starts before posx is
imported. Encodings that are named are asked only what is wrong with every one of them where nothing guards it; without
names it is one for every way through the executors, and all cases.
"""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

if "jax-first" in sys.argv:
    jax.devices()

import posx
from posx.contract import abstract_params

WAYS = (
    "nope", "learned", "shaw", "transformer_xl", "t5", "tupe", "deberta", "rope", "alibi", "xpos", "cope", "dape",
    "ssmax", "key_offset", "fox", "selective_rope", "path",
)  # fmt: skip
#: Leave out LLVM's optimizer. It starts after XLA has fused kernels, and the fault is in what XLA fuses.
UNOPTIMISED = {"xla_backend_optimization_level": 0}

B, T, H, D = 2, 33, 2, 64  # 33 rows: whole tiles of a kernel and a remainder
DIMS = posx.Dims(model_dim=H * D, num_heads=H, head_dim=D, num_layers=1, train_len=T)
POS = np.arange(T, dtype=np.int32)

#: What varies in the operand that a case replaces, of [b, t, h, d].
VARY = {"nothing": (1, 1, 1, 1), "heads": (B, 1, H, 1), "tokens": (1, T, 1, 1), "channels": (1, 1, 1, D)}
SUMS = {
    "over b": lambda o: o.sum(0), "over t": lambda o: o.sum(1), "over h": lambda o: o.sum(2),
    "over d": lambda o: o.sum(3), "of all": lambda o: o.sum(), "largest": lambda o: o.max(3),
    "of squares": lambda o: (o * o).sum(),
}  # fmt: skip
MASKS = {"causal": posx.causal(), "full": posx.full()}
EXECUTORS, KINDS = ("blockwise", "dense", "fused"), ("value", "gradient")
#: The operand, what varies in it, the sum, the mask, the executor; the sum itself or the gradients of it.
KNOWN = [
    ("v", "nothing", "over d", "causal", "blockwise", "value"),
    ("v", "nothing", "of all", "causal", "blockwise", "gradient"),
]
CASES = [
    *KNOWN,
    ("v", "heads", "over t", "causal", "blockwise", "value"),
    ("v", "tokens", "largest", "causal", "blockwise", "value"),
    ("v", "nothing", "over d", "full", "dense", "value"),
    ("k", "heads", "of squares", "full", "dense", "value"),
    *(("v", "nothing", name, "causal", "blockwise", "value") for name in SUMS),
]  # fmt: skip


def cases_of(name):
    """CASES, and every operand with all that can vary in it; what else there is takes turns, encoding by encoding."""
    turn, cases = WAYS.index(name), list(CASES)
    for n, (operand, vary) in enumerate(itertools.product("vkq", VARY)):
        kind = KINDS[(n + n // 4 + turn) % 2]
        sums = list(SUMS)[: 5 if kind == "gradient" else 7]  # a largest one among equals has no one gradient
        chosen = (options[(n + turn) % len(options)] for options in (sums, list(MASKS), EXECUTORS))
        cases.append((operand, vary, *chosen, kind))
    return list(dict.fromkeys(cases))


def drawn(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


QKV = {name: drawn(B, T, H, D, seed=n) for n, name in enumerate("qkv")}
X = drawn(B, T, H * D, seed=3)


def attend(encoding, params, qkv, x=X, **how):
    x = x if encoding.acts_on("features") else None
    return posx.attend(encoding, params, **qkv, q_slots=POS, x=x, **how)


def computed(encoding, case, params, qkv, constant):
    """What the case asks for; the operand is made of the constant in the same program."""
    operand, _, name, mask, executor, kind = case

    def summed(params, qkv, constant):
        qkv = qkv | {operand: jnp.broadcast_to(constant, (B, T, H, D))}
        return SUMS[name](attend(encoding, params, qkv, mask=MASKS[mask], executor=executor))

    if kind == "value":
        return summed(params, qkv, constant)
    grads = jax.grad(lambda *arguments: summed(*arguments).sum(), argnums=(0, 1, 2))(params, qkv, constant)
    return jax.tree.map(lambda g: (g, (g * g).sum()), grads)


class Truth:
    """Dense in float64 with the operands as arguments and nothing fused: no program knows that one does not vary."""

    def __init__(self, encoding, params):
        self.params, x = wide(params), wide(X)
        off = UNOPTIMISED | {"xla_cpu_experimental_ynn_fusion_type": ""}

        def outputs(mask, params, qkv):
            return attend(encoding, params, qkv, x, mask=MASKS[mask], executor="dense")

        def gradients(mask, params, qkv, o_grad):
            return jax.vjp(lambda *arguments: outputs(mask, *arguments), params, qkv)[1](o_grad)

        self.attend = jax.jit(outputs, static_argnums=0, compiler_options=off)
        self.gradients = jax.jit(gradients, static_argnums=0, compiler_options=off)

    def __call__(self, case, constant):
        operand, _, name, mask, _, kind = case
        with jax.enable_x64(True):
            qkv = wide(QKV | {operand: np.broadcast_to(constant, (B, T, H, D))})
            o = self.attend(mask, self.params, qkv)
            if kind == "value":
                return SUMS[name](np.asarray(o))
            by_params, by_qkv = self.gradients(mask, self.params, qkv, jax.grad(lambda o: SUMS[name](o).sum())(o))
            varies = [axis for axis, size in enumerate(constant.shape) if size == 1]
            by_constant = by_qkv[operand].sum(tuple(varies), keepdims=True)
            grads = by_params, by_qkv | {operand: jnp.zeros_like(o)}, by_constant
        return jax.tree.map(lambda g: (g, (g * g).sum()), jax.tree.map(np.asarray, grads))


def wide(tree):
    with jax.enable_x64(True):
        return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tree)


@functools.cache
def is_served(encoding, mask, executor):
    try:
        params = abstract_params(encoding, DIMS)
        jax.eval_shape(lambda *given: attend(encoding, *given, mask=MASKS[mask], executor=executor), params, QKV)
    except ValueError:  # not by this executor, or not under this mask
        return False
    return True


def is_wrong(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted)
    # Where values are all alike gradients of weights are 0, as what comes back to them, 100 for each pair, cancels.
    return not np.abs(found - wanted).max() <= 1e-3 * max(np.abs(wanted).max(), 30)


def check(name, cases):
    encoding = posx.build({"name": name}, DIMS)
    params = encoding.init(jax.random.key(0), DIMS)
    truth = Truth(encoding, params)
    # A constant of its own for every case: what several of them read is computed once and not fused with their sums.
    todo = [(case, (params, QKV, 1.5 + drawn(*VARY[case[1]], seed=n))) for n, case in enumerate(cases)]
    todo = [(case, arguments) for case, arguments in todo if is_served(encoding, *case[3:5])]
    run = jax.jit(
        lambda all: [computed(encoding, case, *own) for (case, _), own in zip(todo, all, strict=True)],
        compiler_options=UNOPTIMISED,
    )
    for (case, arguments), found in zip(todo, run([arguments for _, arguments in todo]), strict=True):
        wanted = truth(case, arguments[2])
        leaves = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
        if wrong := [jax.tree_util.keystr(path) or "all" for (path, a), b in leaves if is_wrong(a, b)]:
            print(f"wrong: {name}: {', '.join(case)}: {' '.join(wrong)}", flush=True)
    print(f"{name}: {len(todo)} cases", flush=True)


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word in posx.ENCODINGS]
    for name in named or WAYS:
        check(name, KNOWN if named else cases_of(name))
