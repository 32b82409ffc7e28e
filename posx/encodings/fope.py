"""Fourier position embedding."""

import dataclasses
import math
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, Dims, Encoding, Features, Params, as_float, exact_einsum, fact, normal
from posx.contract.fields import Base, Channels, Heads, Length, at_least
from posx.encodings.angles import check_pairs, inverse_frequencies, sin_cos
from posx.encodings.rope import rotate


@dataclasses.dataclass(frozen=True)
class Fope(Encoding):
    """RoPE with mixed waves: sin_f(p) = sum_n sin(p theta_n) S_nf, cos_f(p) = sum_n cos(p theta_n) C_nf.

    They rotate plane f of each key head in place of sin(p theta_f) and cos(p theta_f). Only the n frequencies theta_c =
    base^(-2c/d) of at least 2 pi / `original_len` are used: their planes complete a turn within it. Its default is the
    training length.

    S and C [g, n, n] are I + N(0, gain^2 2 / ((g + n) n)) for g key heads. They are drawn from `seed` and
    fixed: all layers and runs with one seed share them. For other matrices in other layers, use a layer policy of
    fope(seed=0), fope(seed=1), ... With `learned` they are parameters of each layer. The paper's gain is 0.3 for 60 M
    parameters, 0.4 for 180 M and 0.6 for 1.2 B.

    Planes of the dropped frequencies do not depend on position. "plain" leaves them unrotated (sin = 0, cos = 1).
    "doubled" has sin = cos = 1 there: a rotation by pi/4 that doubles their product. Logits depend on i - j alone only
    if S = C = I.

    Reference: Hua et al. 2025, arXiv 2412.17739; github.com/TsinghuaC3I/Fourier-Position-Embedding, olmo/model.py.
    Differs: that code draws new matrices for each layer and run, and has as many key heads as query heads. Its authors
    confirm "doubled" (its issue 6). It leaves at most d/4 planes. If more frequencies complete a turn, it starts the
    planes from every n-th frequency, and the last from noise alone. vLLM is "plain" and has no such bound.
    """

    base: Base = 10000.0
    gain: Annotated[float, at_least(0)] = 0.3
    original_len: Length | None = None
    dropped: Literal["doubled", "plain"] = "doubled"
    learned: bool = False
    seed: Annotated[int, at_least(0)] = 0
    num_kv_heads: Heads | None = None
    head_dim: Channels | None = None

    shift_invariant = False
    decayed = fact(lambda self: frozenset({"sin", "cos"}) if self.learned else frozenset())
    about = About(
        "arXiv 2412.17739", "better than RoPE: no plane meets unseen angles; rises from 1.5 L in our small study"
    )

    def resolve(self, dims: Dims) -> Self:
        check_pairs("fope", dims)
        return super().resolve(dims).fill_open(original_len=dims.train_len)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        if not self.learned:
            return {}
        n = len(self._frequencies())
        noise = normal(rng, (2, self.num_kv_heads, n, n), self._std(n))
        return dict(zip(("sin", "cos"), jnp.eye(n, dtype=jnp.float32)[None, None] + noise, strict=True))

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        theta = self._frequencies()
        sin, cos = sin_cos(pos, theta)
        s, c = (params["sin"], params["cos"]) if self.learned else self._draw_mixing(len(theta))
        sin = self._mix_waves(sin, s, dropped=1.0 if self.dropped == "doubled" else 0.0)
        cos = self._mix_waves(cos, c, dropped=1.0)
        repeats = vectors.shape[1] // self.num_kv_heads
        return rotate(vectors, jnp.repeat(sin, repeats, axis=1), jnp.repeat(cos, repeats, axis=1))

    key = query

    def _frequencies(self) -> np.ndarray:
        """Return the theta [n] that complete a turn within `original_len`."""
        theta = inverse_frequencies(self.base, self.head_dim)
        return theta[theta >= 2 * np.pi / self.original_len]

    def _mix_waves(self, wave: jax.Array, matrix: Any, dropped: float) -> jax.Array:
        """Return waves [t, n] mixed by `matrix` [g, n, n], and `dropped` for the dropped planes, [t, g, d/2]."""
        series = exact_einsum("tn,gnf->tgf", wave, as_float(matrix))
        missing = self.head_dim // 2 - series.shape[-1]
        return jnp.pad(series, ((0, 0), (0, 0), (0, missing)), constant_values=dropped)

    def _draw_mixing(self, n: int) -> np.ndarray:
        """Return the fixed S and C of the seed, [2, g, n, n]."""
        noise = np.random.default_rng(self.seed).standard_normal((2, self.num_kv_heads, n, n))
        return np.eye(n) + self._std(n) * noise

    def _std(self, n: int) -> float:
        """Return Xavier's deviation. PyTorch counts g n outputs and n n inputs of an array [g, n, n]."""
        return self.gain * math.sqrt(2 / ((self.num_kv_heads + n) * max(n, 1)))
