"""The decoder LM, the same for every encoding. The only file that imports Flax.

Modules describe shapes and maths; `Model` splits them once into a plain dict of arrays, and everything outside works
on that dict with `jax.jit`. Activations run as [b*t, m], see `posx.lab.layers`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posx.attention import Mask, Slots, attend, attention_weights, drop_axes, host_array, sharding
from posx.attention.accelerators import round_operands
from posx.attention.cache import Cache, Layer, advance, empty_layer, remember, revise_keys, tokens_first
from posx.contract import Dims, Encoding, at_least_float32, tabulate_terms
from posx.contract.facts import FACTS
from posx.contract.sizes import array_shapes, check_params
from posx.encodings import Spec
from posx.evaluation.ids import token_ids
from posx.lab import cross_entropy
from posx.lab.config.sections import ModelConfig
from posx.lab.layers import ACTIVATIONS, dropout, embed_tokens, fold_in, layer_norm, linear, rms_norm, sequential


class ForwardPass(NamedTuple):
    """The arguments of one forward pass for every layer.

    Attributes:
      slots: those of all tokens.
      cache: the cache of a decoding step.
      executor: see `attend`.
      read: a map of the results of `attention_weights` to what a layer returns beside its output.
      length: the tokens of a row.
    """

    slots: Slots
    cache: Cache | None
    executor: str
    read: Callable[[jax.Array, jax.Array], Any] | None = None
    length: int = 0


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


def position_arrays(encoding: Encoding, dims: Dims, rngs: nnx.Rngs) -> dict[str, jax.Array]:
    """Return fresh parameters of an encoding in float32, also if 64-bit types are on."""
    return {name: array.astype(jnp.float32) for name, array in encoding.init(rngs.position(), dims).items()}


class Component(nnx.Module):
    """A part of the decoder, with products and norms by name, each with a bias if the settings ask for one."""

    config: ModelConfig

    def add_product(self, name: str, rngs: nnx.Rngs, shape: tuple[int, int], std: float, bias: str = "all") -> None:
        """Add a matrix; it has a bias if the setting is `bias` or "all"."""
        setattr(self, name, weight(rngs, shape, std))
        if self.config.biases in (bias, "all"):
            setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(shape[1:], jnp.float32)))

    def add_norm(self, name: str, width: int) -> None:
        setattr(self, name, nnx.Param(jnp.ones((width,), jnp.float32)))
        if self.config.norm == "layer" and self.config.biases == "all":
            setattr(self, f"{name}_bias", nnx.Param(jnp.zeros((width,), jnp.float32)))

    def product(self, name: str, x: jax.Array) -> jax.Array:
        return self._with_bias(name, linear(x, getattr(self, name)[...], self.config.dtype))

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        function = layer_norm if self.config.norm == "layer" else rms_norm
        return self._with_bias(name, function(x, getattr(self, name)[...], self.config.norm_eps))

    def _with_bias(self, name: str, x: jax.Array) -> jax.Array:
        bias = getattr(self, f"{name}_bias", None)
        return x if bias is None else x + jnp.expand_dims(bias[...], tuple(range(x.ndim - 1)))


class Attention(Component):
    """Projections around `attend`, and this layer's own position parameters."""

    def __init__(self, config: ModelConfig, encoding: Encoding, mask: Mask, dims: Dims, rngs: nnx.Rngs):
        m, h, g, d = dims.model_dim, dims.num_heads, config.kv_heads, dims.head_dim
        self.config, self.encoding, self.mask, self.dims = config, encoding, mask, dims
        for name, heads in (("query", h), ("key", g), ("value", g)):
            self.add_product(name, rngs, (m, heads * d), m**-0.5, bias="qkv")
        self.add_product("out", rngs, (h * d, m), (h * d) ** -0.5 / math.sqrt(2 * config.num_layers))
        if config.qk_norm:
            self.add_norm("query_norm", d)
            self.add_norm("key_norm", d)
        own = {k: v for k, v in position_arrays(encoding, dims, rngs).items() if k not in encoding.shared}
        self.position = nnx.Param(own) if own else None

    def __call__(self, x: jax.Array, shared: dict[str, Any], call: ForwardPass, layer: Layer | None):
        t, d, dtype = call.length, self.dims.head_dim, self.config.dtype
        b = x.shape[0] // t

        def heads(name: str) -> jax.Array:
            y = self.product(name, x).reshape(b, t, -1, d)
            return (self.norm(f"{name}_norm", y) if hasattr(self, f"{name}_norm") else y).astype(dtype)

        q, k, v = heads("query"), heads("key"), heads("value")
        params = shared | (self.position.get_value() if self.position is not None else {})
        attention = functools.partial(attend, self.encoding, params, mask=self.mask, executor=call.executor)
        x = x.reshape(b, t, -1)
        if layer is None or call.cache is None:
            o = attention(q, k, v, call.slots, x=x)
            if call.read:
                layer = call.read(*attention_weights(self.encoding, params, q, k, call.slots, mask=self.mask, x=x))
        else:
            projected = {"query": q, "key": k, "value": v}
            layer, q, features = remember(self.encoding, params, layer, call.cache, call.slots, x, projected)
            o = attention(
                q, tokens_first(layer.k.astype(dtype), b), tokens_first(layer.v.astype(dtype), b), call.slots,
                Slots(call.cache.pos, call.cache.idx), features=(features, layer.features), cached=True,
            )  # fmt: skip
            if self.encoding.revised_by & features.keys():
                layer = revise_keys(self.encoding, params, layer, features, call.cache, call.slots)
        return self.product("out", o.reshape(b * t, -1)), layer


class Mlp(Component):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        m, f = config.model_dim, config.hidden_dim
        self.config = config
        self.add_product("up", rngs, (m, f), m**-0.5)
        if config.gated:
            self.add_product("gate", rngs, (m, f), m**-0.5)
        self.add_product("down", rngs, (f, m), f**-0.5 / math.sqrt(2 * config.num_layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [n, m] to [n, m]. The hidden activations, the widest arrays of a layer, are kept in `dtype`."""

        def activations(name: str) -> jax.Array:
            return at_least_float32(self.product(name, x).astype(self.config.dtype))

        up, activation = activations("up"), ACTIVATIONS[self.config.mlp]
        y = activation(activations("gate")) * up if self.config.gated else activation(up)
        return self.product("down", y.astype(self.config.dtype))


class DecoderBlock(Component):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, config: ModelConfig, encoding: Encoding, mask: Mask, dims: Dims, rngs: nnx.Rngs):
        self.config = config
        self.attention = Attention(config, encoding, mask, dims, rngs)
        self.mlp = Mlp(config, rngs)
        for name in ("attention", "mlp"):
            self.add_norm(f"{name}_norm", dims.model_dim)
            if config.post_norm:
                self.add_norm(f"{name}_post_norm", dims.model_dim)

    def __call__(self, x, shared, call: ForwardPass, layer: Layer | None, rng: jax.Array | None):
        x = sharding.shard(x)
        y, layer = self.attention(self.norm("attention_norm", x), shared, call, layer)
        after = x + self._summand("attention", y, fold_in(rng, 0))
        y = self.mlp(self.norm("mlp_norm", x if self.config.parallel else after))
        return after + self._summand("mlp", y, fold_in(rng, 1)), layer

    def _summand(self, name: str, y: jax.Array, rng: jax.Array | None) -> jax.Array:
        y = round_operands(y, jnp.dtype(self.config.dtype))
        y = self.norm(f"{name}_post_norm", y) if self.config.post_norm else y
        return dropout(y, self.config.dropout, rng)


def layer_name(n: int) -> str:
    """Return the name of layer n in the parameters."""
    return f"layer_{n:02d}"


def shared_name(n: int) -> str:
    """Return the name of the n-th distinct encoding's shared arrays in the parameters."""
    return f"encoding_{n}"


class Decoder(Component):
    """Token embeddings, the layers and the final norm. `logits` maps their result to logits."""

    def __init__(self, model: Model, rngs: nnx.Rngs):
        config, dims = model.config, model.dims
        self.model, self.config = model, config
        self.embedding = weight(rngs, (model.vocab_size, dims.model_dim), 0.02)
        if config.embedding_norm:
            self.add_norm("embedding_norm", dims.model_dim)
        each = zip(model.encodings, config.masks, strict=True)
        layers = [DecoderBlock(config, encoding, mask, dims, rngs) for encoding, mask in each]
        self.layers = nnx.Dict({layer_name(n): layer for n, layer in enumerate(layers)})
        self.add_norm("final_norm", dims.model_dim)
        self.unembedding = None if config.tied else weight(rngs, (dims.model_dim, model.vocab_size), 0.02)
        shared = {}
        for n, encoding in enumerate(model.distinct):
            once = {k: v for k, v in position_arrays(encoding, dims, rngs).items() if k in encoding.shared}
            if once:
                shared[shared_name(n)] = nnx.Param(once)
        self.shared = nnx.Dict(shared)

    def __call__(self, tokens: jax.Array, call: ForwardPass, rng: jax.Array | None):
        model = self.model
        of_token = model.position_shape
        if call.slots.pos is None and not of_token:  # known while the program is traced
            call = call._replace(slots=call.slots._replace(pos=sequential(tokens.shape[1])))
        pos = call.slots.pos
        if not any(encoding.axes for encoding in model.encodings):  # then positions of any number of axes are given
            pos = drop_axes(pos, tokens.shape)
            call = call._replace(slots=call.slots._replace(pos=pos))
        host_array("pos", pos, tokens.shape, ("int32", "float32"), of_token)
        for name in ("idx", "segment"):
            if (given := getattr(call.slots, name)) is not None:
                host_array(name, given, tokens.shape)
        call = call._replace(length=tokens.shape[1])
        x = embed_tokens(self.embedding[...], tokens) * math.sqrt(model.dims.model_dim)
        x = self.norm("embedding_norm", x) if self.config.embedding_norm else x
        shared = {}
        for n, encoding in enumerate(model.distinct):
            name = shared_name(n)
            shared[encoding] = self.shared[name].get_value() if name in self.shared else {}
            if encoding.acts_on("embed"):
                by_row = (None, 0, 0 if call.slots.pos.ndim == 2 + len(of_token) else None)
                x = jax.vmap(encoding.embed, in_axes=by_row)(shared[encoding], x, call.slots.pos)
        x = x.reshape(-1, model.dims.model_dim)
        x = dropout(x, model.config.dropout, fold_in(rng, len(self.layers)))
        kept = []
        for n, block in enumerate(self.layers.values()):
            layer = None if call.cache is None else call.cache.layers[n]
            run = functools.partial(
                block, shared=shared[block.attention.encoding], call=call, layer=layer, rng=fold_in(rng, n)
            )
            x, layer = (jax.checkpoint(run) if model.config.remat == "layer" else run)(x)
            kept.append(layer)
        return self.norm("final_norm", x).reshape(*tokens.shape, -1), tuple(kept)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits [b, t, v], float32, of hidden [b, t, m]."""
        unembedding = self.embedding[...].T if self.unembedding is None else self.unembedding[...]
        x = hidden.reshape(-1, hidden.shape[-1])
        return linear(x, unembedding, self.model.config.dtype).reshape(*hidden.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder as a value: sizes and one encoding per layer. Parameters are a plain dict, always passed in."""

    config: ModelConfig
    encodings: tuple[Encoding, ...]
    vocab_size: int
    dims: Dims

    @property
    def distinct(self) -> tuple[Encoding, ...]:
        """The encoding values of the layers, each once, in order."""
        return tuple(dict.fromkeys(self.encodings))

    @property
    def position_shape(self) -> tuple[int, ...]:
        """The shape of one token's position: () for one axis, (n,) for n. Raises ConfigError if layers differ."""
        axes = FACTS["axes"].join([e.axes for e in self.distinct], {str(n): e for n, e in enumerate(self.distinct)})
        return (axes,) if axes > 1 else ()

    def init(self, rng: jax.Array) -> dict[str, Any]:
        """Return fresh parameters.

        Position parameters draw from a random stream of their own, so that models of two encodings start from the same
        weights everywhere else.
        """
        params_rng, position_rng = jax.random.split(rng)
        decoder = Decoder(self, nnx.Rngs(params=params_rng, position=position_rng))
        return nnx.to_pure_dict(nnx.split(decoder)[1])

    def abstract(self) -> dict[str, Any]:
        """Return shapes and types of the parameters."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def layer_arrays(self, params: dict[str, Any], n: int) -> dict[str, Any]:
        """Return the arrays of the encoding of layer n, its own and those that layers share."""
        once = params.get("shared", {}).get(shared_name(self.distinct.index(self.encodings[n])), {})
        return once | params["layers"][layer_name(n)]["attention"].get("position", {})

    def __call__(
        self,
        params: dict[str, Any],
        tokens: jax.Array,
        pos: Any,
        *,
        idx: jax.Array | None = None,
        segment: jax.Array | None = None,
        dropout_rng: jax.Array | None = None,
    ) -> jax.Array:
        """Return logits [b, t, v], float32, of the token after each of tokens [b, t] at positions [t] or [b, t].

        If the encodings read n axes, positions are [t, n] or [b, t, n]. Positions None are 0 to t - 1 on one axis.

        dropout_rng: one key [b] a row, or None for no dropout.
        """
        tokens = token_ids(tokens, "[b, t]", vocab_size=self.vocab_size)
        decoder = self._decoder(params)
        call = ForwardPass(Slots(pos, idx, segment), None, "auto")
        return decoder.logits(decoder(tokens, call, dropout_rng)[0])

    def log_probs(
        self, params: dict[str, Any], tokens: jax.Array, pos: Any, dropout_rng: jax.Array | None, executor: str,
        score: Callable[[jax.Array, jax.Array], Any] = cross_entropy.log_probs, targets: jax.Array | None = None,
    ) -> Any:  # fmt: skip
        """Return log-probabilities [b, t] (nats, float32) of the next tokens in [b, t + 1]; positions [t] or [b, t].

        Positions None are 0 to t - 1. If `targets` [b, t] are given, tokens are [b, t] and the targets are scored at
        their places. Another `score` of logits and targets is returned instead, such as `cross_entropy.score_answers`.
        """
        tokens = token_ids(tokens, "[b, t]" if targets is not None else "[b, t + 1]", vocab_size=self.vocab_size)
        inputs, targets = (tokens[:, :-1], tokens[:, 1:]) if targets is None else (tokens, targets)
        decoder = self._decoder(params)
        hidden, _ = decoder(inputs, ForwardPass(Slots(pos), None, executor), dropout_rng)
        return cross_entropy.token_scores(decoder.logits, hidden, targets, self.vocab_size, score)

    def read_attention(
        self, params: dict[str, Any], tokens: jax.Array, pos: Any, read: Callable[[jax.Array, jax.Array], Any]
    ) -> tuple[Any, ...]:
        """Return `read(weights [b, h, t, t], visible [b or 1, t, t])` of each layer, see `attention_weights`.

        Args:
          params: those of this model.
          tokens: [b, t].
          pos: positions [t] or [b, t], None for 0 to t - 1.
          read: a function that JAX can trace.
        """
        tokens = token_ids(tokens, "[b, t]", vocab_size=self.vocab_size)
        return self._decoder(params)(tokens, ForwardPass(Slots(pos), None, "auto", read), None)[1]

    def decode(
        self, params: dict[str, Any], tokens: jax.Array, pos: jax.Array, idx: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Return logits [b, t, v] of the tokens after each of tokens [b, t], and the cache with these appended.

        pos and idx are int32, [t] or [b, t], and pos has a last axis if the encodings read several. idx counts from the
        first token of each row and is -1 for padding, which is allowed before that token alone. Raises ConfigError if
        idx is known to be otherwise, or if the cache has too few free slots. Under `jit` neither is known, and all
        logits are NaN from then on.
        """
        tokens = token_ids(tokens, "[b, t]", vocab_size=self.vocab_size)
        pos, idx = (
            jnp.broadcast_to(host_array(name, x, tokens.shape, of_token=shape), (*tokens.shape, *shape))
            for name, x, shape in (("pos", pos, self.position_shape), ("idx", idx, ()))
        )
        cache = advance(cache, pos, idx)
        decoder = self._decoder(params)
        hidden, layers = decoder(tokens, ForwardPass(Slots(pos, idx), cache, "auto"), None)
        return cache.or_nan(decoder.logits(hidden)), cache._replace(layers=layers)

    def empty_cache(self, batch_size: int, capacity: int) -> Cache:
        """Return an empty cache of `capacity` slots; features have the shapes that each encoding gives them.

        Raises ConfigError for a model of masked tokens.
        """
        self.config.require_causal("a cache")
        sizes = self.dims, self.config.dtype, (batch_size, capacity)
        layers = (empty_layer(encoding, *sizes) for encoding in self.encodings)
        idx = np.full((batch_size, capacity), -1, np.int32)
        empty = jax.tree.map(lambda slot: np.zeros(slot.shape, slot.dtype), tuple(layers))
        return Cache(empty, np.zeros((*idx.shape, *self.position_shape), np.int32), idx, np.zeros((), np.int32))

    def at_length(self, length: int) -> Model:
        """Return the model for the same weights, with every encoding set for windows of `length` tokens."""
        return dataclasses.replace(self, encodings=tuple(e.at_length(length) for e in self.encodings))

    def tabulated(
        self, params: dict[str, Any], length: int, encodings: tuple[Encoding, ...] = ()
    ) -> tuple[Model, dict[str, Any]]:
        """Return the model and parameters for decoding up to `length` tokens, with tables of what depends on position.

        The model depends on `length` alone. Programs compiled for it serve all texts of at most `length` tokens.

        Args:
          params: those of this model.
          length: tokens.
          encodings: the encodings of the layers as `at_length` set them for a text; () for those of this model.
        """
        self._decoder(params)  # refuses those of another model
        layers, shared, tables = dict(params["layers"]), dict(params.get("shared", {})), []
        for n, (own_encoding, encoding) in enumerate(zip(self.encodings, encodings or self.encodings, strict=True)):
            name, key = layer_name(n), shared_name(self.distinct.index(own_encoding))
            attention = layers[name]["attention"]
            table, arrays = tabulate_terms(encoding, self.layer_arrays(params, n), length)
            tables.append(table)
            own = {name: array for name, array in arrays.items() if name not in table.shared}
            shared |= {key: {name: arrays[name] for name in table.shared}} if table.shared else {}
            layers[name] = layers[name] | {"attention": attention | ({"position": own} if own else {})}
        model = dataclasses.replace(self, encodings=tuple(tables))
        if len(model.distinct) < len(self.distinct):  # two tables would share one set of arrays
            return dataclasses.replace(self, encodings=encodings or self.encodings), params
        return model, params | {"layers": layers} | ({"shared": shared} if shared else {})

    @property
    def max_position(self) -> int | None:
        """The last position all layers are defined for, None for no limit."""
        return min((e.max_position for e in self.encodings if e.max_position is not None), default=None)

    def _decoder(self, params: dict[str, Any]) -> Decoder:
        """Return the modules with `params` in them. Raises ConfigError for other names or shapes than this model's."""
        graph, state = _modules(self)
        remedy = "Give the parameters that Model.init or posx.load returned for this model."
        check_params("this model", array_shapes(params), array_shapes(nnx.to_pure_dict(state)), remedy)
        # Both trees sort their keys alike, so leaves of the same names correspond one to one.
        return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params)))


@functools.lru_cache(maxsize=64)
def _modules(model: Model) -> tuple[Any, Any]:
    """Return the graph and the abstract state of a model's modules, traced once for each model."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # Flax would cut parameters over one
        return nnx.split(nnx.eval_shape(lambda: Decoder(model, nnx.Rngs(params=0, position=0))))


def make_model(config: ModelConfig, encoding: Spec, vocab_size: int, train_len: int) -> Model:
    """Make a model with every encoding resolved. Raises ConfigError for sizes or specs that do not fit."""
    model = Model(config, config.encodings(encoding, train_len), vocab_size, config.dims(train_len))
    _ = model.position_shape  # refuses layers that read other numbers of axes
    return model
