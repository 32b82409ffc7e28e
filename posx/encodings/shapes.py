"""What the hooks of an encoding give, checked against the contract by shapes alone: nothing is computed.

`build` does this for the sizes of a model, `attend` for those of q, k and v, so that a hook that gives another shape is
one line and not a traceback out of a compiled step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.encodings.base import Encoding, Features, Params, Relative, Tile, wide_dtype
from posx.encodings.checks import check_fact
from posx.errors import ConfigError, PosxError

Struct = jax.ShapeDtypeStruct


class Call(NamedTuple):
    """The sizes and types of one use of an encoding, without batch and tokens, or whatever has those; no values."""

    q: Any  # [h, d]
    k: Any  # [g, d], the width may be another one than q's
    v: Any  # [g, d], and here
    pos: Any  # the positions' type
    x: Any  # [m], the input of `features`; None where they are given
    q_features: Features  # {name: [...]}
    k_features: Features
    keys_mapped: bool  # k and v are what `key` and `value` gave

    @property
    def heads(self) -> str:
        (h, d), (g, k_width), (_, v_width) = self.q.shape, self.k.shape, self.v.shape
        return f"q has {h} heads of {d}, k and v {g} of {k_width} and {v_width}"


class Hooks:
    """Calls every hook that acts, with as many tokens as no other axis has, so that no two can be mistaken.

    After `check`, `called` holds what each hook was given and what it gave: {hook: (arguments after params, result)}.
    """

    def __init__(self, encoding: Encoding, params: Params, call: Call):
        self.encoding, self.params, self.call = encoding, params, call
        self.called: dict[str, tuple[tuple[Any, ...], Any]] = {}
        taken = {size for x in (call.q, call.k, call.v, call.x) if x is not None for size in x.shape} | {1}
        q, k, n = itertools.islice((size for size in itertools.count(3) if size not in taken), 3)
        #: Sizes by letter, of queries, keys and distances those of this check.
        self.sizes = {"h": call.q.shape[0], "g": call.k.shape[0], "q": q, "k": k, "n": n}

    def acts(self, hook: str) -> bool:
        return self.encoding.acts_on(hook)

    def check(self) -> None:
        """Raises ConfigError for the first hook that does not give what the formula needs."""
        self._check_history()
        call, h = self.call, self.sizes["h"]
        q, k, v = (self._tokens(letter, x) for letter, x in (("q", call.q), ("k", call.k), ("k", call.v)))
        q_features, k_features = self._features()
        mapped_q, mapped_k, mapped_v = self._map("query", q, q_features), k, v
        if not call.keys_mapped:
            mapped_k, mapped_v = self._map("key", k, k_features), self._map("value", v, k_features)
        self._check_meeting(mapped_q, mapped_k)
        scores = Struct((h, q.shape[0], k.shape[0]), wide_dtype(call.q.dtype))
        width = mapped_v.shape[2]
        o = self._map("output", Struct((q.shape[0], h, width), scores.dtype), q_features)
        if not call.keys_mapped and o.shape[2] != v.shape[2]:
            raise ConfigError(
                f"{self.encoding}.output must give [q, h, d], d = {v.shape[2]} as values come in, not {shown(o)} "
                f"({self._where})"
            )
        q_pos, k_pos = self._pos("q"), self._pos("k")
        if self.acts("regime"):
            found = self._call("regime", q_pos, k_pos)
            if getattr(found, "shape", None) != (q.shape[0], k.shape[0]) or not jnp.issubdtype(
                found.dtype, jnp.integer
            ):
                raise ConfigError(f"{self.encoding}.regime must give whole numbers [q, k], not {shown(found)}")
        if self.acts("decay"):
            self._expect("decay", self._call("decay"), "h or 1, d'", **{"d'": mapped_q.shape[-1]})
        if self.acts("temperature"):
            self._expect("temperature", self._call("temperature", q_pos, q_features), "h or 1, q", "q")
        self._check_bias(q_pos, k_pos)
        if self.acts("potential"):
            self._expect("potential", self._call("potential", q_pos, q_features), "q, h or 1, *")
        if self.acts("relative"):
            self._check_relative({"query": q.shape[2], "key": k.shape[2], "value": width})
        if self.acts("score"):
            raw_k, tilde_k = (Struct((x.shape[0], h, x.shape[2]), x.dtype) for x in (k, mapped_k))
            visible = Struct(scores.shape[1:], jnp.bool_)
            factor = Struct((1, q.shape[0], 1), scores.dtype)
            tile = Tile._make((q, raw_k, mapped_q, tilde_k, q_features, k_features, q_pos, k_pos, factor, visible))
            self._expect("score", self._call("score", scores, tile), "h, q, k")
        if self.acts("mix"):
            self._expect("mix", self._call("mix", scores, q_pos, k_pos), "q, h, d", d=width)

    def check_embed(self) -> None:
        """The hook that comes before attention."""
        if self.acts("embed"):
            x = self._tokens("q", self.call.x)
            self._expect("embed", self._call("embed", x, self._pos("q")), "q, m", m=x.shape[1])

    def _features(self) -> tuple[Features, Features]:
        """Features of queries and of keys; the second call goes on from what the first one carried."""
        call = self.call
        if call.x is None or not self.acts("features"):
            return self._tokens("q", call.q_features), self._tokens("k", call.k_features)
        carry, found = None, []
        for letter in ("q", "k"):
            x = self._seen("features", self._tokens(letter, call.x))
            given = self._call("features", x, self._pos(letter), carry)
            if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Mapping)):
                raise ConfigError(f"{self.encoding}.features must give ({{name: [t, ...]}}, carry), not {shown(given)}")
            if carry is not None and _shapes(given[1]) != _shapes(carry):
                raise ConfigError(
                    f"{self.encoding}.features: the carry changes from {_shapes(carry)} to {_shapes(given[1])}, so a "
                    "cache cannot hold it"
                )
            features, carry = given
            for name, array in features.items():
                if not hasattr(array, "shape") or array.shape[:1] != (self.sizes[letter],):
                    raise ConfigError(
                        f"{self.encoding}.features gives {name!r} {shown(array)} where [{letter}, ...] is wanted "
                        f"({self._where})"
                    )
            found.append(dict(features))
        return found[0], found[1]

    def _map(self, hook: str, vectors: Struct, features: Features) -> Struct:
        if not self.acts(hook):
            return vectors
        letters = "k, g" if hook in ("key", "value") else "q, h"
        found = self._call(hook, self._seen(hook, vectors), self._pos(letters[0]), features)
        if not (isinstance(found, tuple) and hook in ("query", "key") and self.acts("regime")):
            return self._expect(hook, found, f"{letters}, *")
        maps = [self._expect(f"{hook}[{n}]", one, f"{letters}, *") for n, one in enumerate(found)]
        if len({one.shape for one in maps}) != 1:
            raise ConfigError(f"{self.encoding}.{hook}: its maps must have one width, not {_shapes(maps)}")
        t, heads, width = maps[0].shape
        return Struct((t, heads, len(maps), width), maps[0].dtype)

    def _check_history(self) -> None:
        history = self.encoding.history
        check_fact(f"{type(self.encoding).__name__}.history", "history", history, None)
        if idle := [hook for hook in history if not self.acts(hook)]:
            raise ConfigError(f"{self.encoding}.history names {idle[0]}, which this encoding does not define")

    def _check_meeting(self, q: Struct, k: Struct) -> None:
        """Mapped queries and keys, [t, h, d'] or [t, h, regimes, d'], meet in products."""
        encoding = self.encoding
        if q.shape[2:] != k.shape[2:]:
            widths = " and ".join(
                f"{name} {x.shape[-1]} wide" + (f" in {x.shape[2]} regimes" if len(x.shape) == 4 else "")
                for name, x in (("queries are", q), ("keys", k))
            )
            raise ConfigError(
                f"{encoding}.{'query' if self.acts('query') else 'key'}: {widths}, but they meet in a product; give "
                f"both the same channels ({self._where})"
            )
        if self.acts("regime") and (len(q.shape) != 4 or encoding.caches_mapped_keys):
            why = "query and key must give a tuple of maps" if len(q.shape) != 4 else "caches_mapped_keys must be False"
            raise ConfigError(f"{encoding} has regimes: {why}")

    def _seen(self, hook: str, x: Struct) -> Struct:
        """x [t, ...] with the tokens before each one, as far as the hook looks back."""
        n = self.encoding.history.get(hook, 0)
        return Struct((x.shape[0], 1 + n, *x.shape[1:]), x.dtype) if n else x

    def _check_bias(self, q_pos: Struct, k_pos: Struct) -> None:
        """What is free of content: curve and bias. A bias that follows from the curve needs no look."""
        if self.acts("curve"):
            distance = Struct((self.sizes["n"],), jnp.result_type(float))
            self._expect("curve", self._call("curve", distance), "h or 1, n")
        own = type(self.encoding).bias is not Encoding.bias
        if self.acts("bias") or (self.acts("curve") and own):
            self._expect("bias", self._call("bias", q_pos, k_pos), "h or 1, q, k")

    def _check_relative(self, widths: dict[str, int]) -> None:
        found = self._call("relative", self._pos("n"))
        if not isinstance(found, Relative) or all(part is None for part in found):
            raise ConfigError(f"{self.encoding}.relative must give Relative(query=..., ...), not {shown(found)}")
        for name, part in found._asdict().items():
            if name in widths and part is not None:
                self._expect(f"relative.{name}", part, "n, h or 1, d", d=widths[name])
            elif part is not None:
                self._expect(f"relative.{name}", part, "n, h or 1")

    def _tokens(self, letter: str, tree: Any) -> Any:
        return jax.tree.map(lambda x: Struct((self.sizes[letter], *x.shape), x.dtype), tree)

    def _pos(self, letter: str) -> Struct:
        return Struct((self.sizes[letter],), self.call.pos)

    def _call(self, hook: str, *arguments: Any) -> Any:
        """The shapes that `hook` gives; what it raises becomes one line."""
        shapes = (f"{list(x.shape)}" if hasattr(x, "shape") else "..." for x in arguments)
        made = f"{self.encoding}.{hook}(params, {', '.join(shapes)})"
        try:
            found = jax.eval_shape(getattr(self.encoding, hook), self.params, *arguments)
        except PosxError:
            raise
        except KeyError as error:
            has = ", ".join(self.params) or "nothing"
            raise ConfigError(f"{made} reads {error}, which is not there; params has: {has} ({self._where})") from error
        except Exception as error:  # the user's own code
            raise ConfigError(f"{made} raises {one_line(error)} ({self._where})") from error
        self.called[hook] = arguments, found
        return found

    def _expect(self, what: str, found: Any, *wanted: str, **widths: int) -> Any:
        """`found`, where it is floats of one of the `wanted` shapes: letters or 1, "*" for any size."""
        sizes: dict[str, Any] = {"1": 1, "*": "*", **self.sizes, **widths}
        forms = [[[sizes[name] for name in axis.split(" or ")] for axis in form.split(", ")] for form in wanted]
        if is_float(found) and any(_fits(found.shape, form) for form in forms):
            return found
        in_numbers = [", ".join(" or ".join(map(str, dict.fromkeys(axis))) for axis in form) for form in forms]
        letters, numbers = (" or ".join(f"[{text}]" for text in texts) for texts in (wanted, in_numbers))
        raise ConfigError(
            f"{self.encoding}.{what} gives {shown(found)} where {letters} = {numbers} is wanted ({self._where})"
        )

    @property
    def _where(self) -> str:
        tokens = ", ".join(f"{letter} = {self.sizes[letter]}" for letter in "qkn")
        return f"{self.call.heads}; {tokens}"


def _fits(shape: tuple[int, ...], form: list[list[Any]]) -> bool:
    return len(shape) == len(form) and all(size in axis or "*" in axis for size, axis in zip(shape, form, strict=True))


def is_float(found: Any) -> bool:
    return hasattr(found, "dtype") and jnp.issubdtype(found.dtype, jnp.floating)


def shown(found: Any) -> str:
    """A result in a few words: the shape of an array of floats, else its type too."""
    if hasattr(found, "shape"):
        return f"{list(found.shape)}{'' if is_float(found) else f' of {found.dtype}'}"
    return "None" if found is None else f"a {type(found).__name__}"


def one_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)
