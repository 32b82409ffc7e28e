"""Every custom rule gives gradients of its arguments' types, in any floating-point type.

JAX does not object to a rule that gives another type. The wrong type then reaches whatever stands before the rule: a
float32 gradient of bfloat16 outputs made XLA refuse cuDNN's backward pass.
"""

import ast
import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx.conformance import rounding
from posx.conformance.subject import even_tiles, variant
from posx.contract import abstract_params
from posx.lab.config.sections import ModelConfig
from posx.lab.model import make_model
from posx.lab.training.step import loss
from tests.lowered import shape_of
from tests.test_architecture import FILES

TYPES = ("float32", "bfloat16", "float16")
DIMS = posx.Dims(8, 2, 4, 1, 16, 1)
#: The calls of JAX that make a rule.
MAKERS = {"defvjp", "defjvp", "defjvps", "custom_gradient"}


@dataclasses.dataclass(frozen=True)
class Rectified(posx.Encoding):
    """A score with a derivative of its own."""

    def score(self, params, s, tile):
        return jax.nn.relu(s)


def rules() -> dict[str, jax.custom_vjp | jax.custom_jvp]:
    """Every rule of the package, by file and name. One that is no name of its module would not be found."""
    found = {}
    for name, tree in FILES.items():
        made = sum(getattr(node, "attr", getattr(node, "id", "")) in MAKERS for node in ast.walk(tree))
        if made:
            module = importlib.import_module(f"posx.{name.removesuffix('/__init__').replace('/', '.')}")
            kinds = jax.custom_vjp, jax.custom_jvp
            own = {key: rule for key, rule in vars(module).items() if isinstance(rule, kinds)}
            assert len(own) == made, f"{name}: define each rule at the top of its module"
            found |= {f"{name}.{key}": rule for key, rule in own.items()}
    return found


RULES = rules()


def training(dtype: str) -> None:
    """Trace a loss of the model, and its gradients."""
    model = make_model(ModelConfig(1, 8, 2, 1, 4, dtype=dtype), "rope", 7, 8)
    of_loss = jax.grad(functools.partial(loss, model, dropout_rng=None, executor="blockwise"))
    jax.eval_shape(of_loss, model.abstract(), shape_of(2, 9, dtype="int32"))


def attention(encoding: posx.Encoding, executor=even_tiles) -> None:
    """Trace tiles with strips, or the kernel, and their gradients."""

    def total(params, q, k, v, x):
        reads = x if encoding.acts_on("features") else None
        return posx.attend(encoding, params, q, k, v, np.arange(8, dtype=np.int32), x=reads, executor=executor).sum()

    q, k = (shape_of(1, 8, heads, 4) for heads in (2, 1))
    x = shape_of(1, 8, DIMS.model_dim)
    jax.eval_shape(jax.grad(total, argnums=(0, 1, 2, 3)), abstract_params(encoding, DIMS), q, k, k, x)


def of_type(x, dtype=None):
    """The shape of an array, in another type if that is given and the array holds floating-point numbers."""
    own = jnp.result_type(x)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype if dtype and jnp.issubdtype(own, jnp.floating) else own)


def in_type(array, dtype=None):
    """The shape of an array; in type `dtype`, if that is given and the array holds floating-point numbers."""
    own = jnp.result_type(array)
    return jax.ShapeDtypeStruct(jnp.shape(array), dtype if dtype and jnp.issubdtype(own, jnp.floating) else own)


@pytest.fixture(scope="module")
def calls() -> dict[str, list]:
    """The arguments that each rule is called with in training steps and in attention: arrays as their shapes."""
    names, found = {id(rule): name for name, rule in RULES.items()}, {name: {} for name in RULES}
    with pytest.MonkeyPatch.context() as patch:
        for kind in (jax.custom_vjp, jax.custom_jvp):

            def recorded(self, *args, original=kind.__call__, **options):
                if id(self) in names:
                    shapes = [a if n in self.nondiff_argnums else jax.tree.map(in_type, a) for n, a in enumerate(args)]
                    found[names[id(self)]][str(shapes)] = shapes
                return original(self, *args, **options)

            patch.setattr(kind, "__call__", recorded)
        for dtype in ("float32", "bfloat16"):
            training(dtype)
        for spec in ("shaw", "alibi", "selective_rope"):
            attention(posx.build(spec, DIMS))
        for spec in ("t5", "learned_sinks"):
            attention(posx.build(spec, DIMS), "kernel")
        attention(Rectified(), "kernel")
        rope = posx.build("rope", DIMS)
        attention(variant(rope, query=rounding._round_hook(rope, "query")))
    return {name: list(of_rule.values()) for name, of_rule in found.items()}


def wrong_types(rule, args, places) -> list[str]:
    """The arguments at `places` whose gradients have another type than themselves."""
    wrong = []

    def gradients(*arrays):
        def call(*arrays):
            own = dict(zip(places, arrays, strict=True))
            return rule(*(own.get(n, a) for n, a in enumerate(args)))

        outputs, pull = jax.vjp(call, *arrays)
        found = jax.tree.leaves(pull(jax.tree.map(jnp.ones_like, outputs)))
        for (path, array), grad in zip(jax.tree.leaves_with_path(arrays), found, strict=True):
            if jnp.issubdtype(array.dtype, jnp.floating) and grad.dtype != array.dtype:
                wrong.append(f"{jax.tree_util.keystr(path)}: {array.dtype}, its gradient {grad.dtype}")
        return ()

    jax.eval_shape(gradients, *(args[n] for n in places))
    return wrong


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # in float16
@pytest.mark.parametrize("name", RULES)
def test_gradients_have_the_types_of_arguments(name, calls):
    rule = RULES[name]
    assert calls[name], f"{name}: no training step and no attention above calls this rule. Add one."
    for args in calls[name]:
        places = [n for n in range(len(args)) if n not in rule.nondiff_argnums]
        alone = [(dtype, (n,)) for dtype in TYPES[:2] for n in places if isinstance(args[n], jax.ShapeDtypeStruct)]
        ways = {}
        for dtype, changed in [*((dtype, places) for dtype in TYPES), *alone]:
            cast = functools.partial(in_type, dtype=dtype)
            given = [jax.tree.map(cast, a) if n in changed else a for n, a in enumerate(args)]
            ways[str(given)] = given
        for way, given in ways.items():
            with jax.numpy_dtype_promotion("standard"):  # arguments of several types
                assert not wrong_types(rule, given, places), way
