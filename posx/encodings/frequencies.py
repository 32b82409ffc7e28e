"""Rules for the frequencies of RoPE's planes: rope(frequencies=yarn(factor=8)).

A rule is used in training, or on a trained model at evaluation alone. It turns the base and the number d of rotated
channels into frequencies theta_c, c = 0 .. d/2 - 1, and one factor of cosines and sines. Logits are multiplied by the
factor's square. f is `factor`, how many times longer the texts become. L is `original_len`, by default the training
length. A factor of 1 is RoPE, but for `dynamic_ntk` beyond L. Frequencies are computed in float64 on the host.
"""

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np

from posx.contract import Dims, Value
from posx.contract.fields import Heads, Length, Tokens, above, at_least, at_most, snake_case
from posx.encodings.angles import inverse_frequencies
from posx.errors import ConfigError

Factor = Annotated[float, at_least(1)]


@dataclasses.dataclass(frozen=True, init=False)
class FrequencyRule(Value):
    """A rule for the frequencies of RoPE's planes.

    Fields `original_len` and `length` are the training length if they are None. A rule that changes with the length of
    the text has a `length`, which `at_length` sets. A rule that does not depend on the base sets `reads_base` to
    False.
    """

    reads_base: ClassVar[bool] = True

    def frequencies(self, base: float, width: int) -> np.ndarray:
        """Return theta [c] in radians per token, or [g, c] if key heads differ, for `width` rotated channels.

        It is a NumPy array, computed before tracing.
        """
        raise ConfigError(f"{type(self).__name__} does not define frequencies(base, width).")

    def checked(self, base: float, width: int) -> np.ndarray:
        """Return `frequencies`. Raises ConfigError for another type or shape."""
        frequencies = self.frequencies(base, width)
        if (
            not isinstance(frequencies, np.ndarray)
            or frequencies.ndim not in (1, 2)
            or frequencies.shape[-1] != width // 2
        ):
            given = f"{type(frequencies).__name__} {list(getattr(frequencies, 'shape', ()))}"
            raise ConfigError(
                f"{type(self).__name__}.frequencies must return a NumPy array of {width // 2} numbers, not {given}."
            )
        return frequencies

    @property
    def magnitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    def resolve(self, dims: Dims) -> Self:
        names = {field.name for field in dataclasses.fields(self)} & {"original_len", "length"}
        return super().resolve(dims).fill_open(**dict.fromkeys(names, dims.train_len))

    def at_length(self, length: int) -> Self:
        """Return the rule for texts of `length` tokens."""
        changed: dict[str, Any] = {"length": length} if hasattr(self, "length") else {}
        return dataclasses.replace(super().at_length(length), **changed)


@dataclasses.dataclass(frozen=True)
class Geometric(FrequencyRule):
    """theta_c = base^(-2c/d).

    Reference: Su et al. 2021, arXiv 2104.09864.
    """

    def frequencies(self, base: float, width: int) -> np.ndarray:
        return inverse_frequencies(base, width)


@dataclasses.dataclass(frozen=True)
class Linear(FrequencyRule):
    """theta_c / f, position interpolation: position f p has the angles of p.

    Reference: Chen et al. 2023, arXiv 2306.15595.
    """

    factor: Factor

    def frequencies(self, base: float, width: int) -> np.ndarray:
        return inverse_frequencies(base, width) / self.factor


@dataclasses.dataclass(frozen=True)
class Ntk(FrequencyRule):
    """theta_c of the base b f^(d/(d-2)): the fastest plane stays, the slowest is divided by f.

    Reference: bloc97 2023, "NTK-aware scaled RoPE"; Peng et al. 2023, arXiv 2309.00071, section 3.1.
    """

    factor: Factor

    def frequencies(self, base: float, width: int) -> np.ndarray:
        return _ntk(base, width, self.factor)


@dataclasses.dataclass(frozen=True)
class DynamicNtk(FrequencyRule):
    """`ntk` with f n/L - (f - 1) in place of f, for a text of n > L tokens. It is RoPE up to L.

    Reference: emozilla 2023; "dynamic" of Hugging Face.
    Differs: n is the number of tokens in the window, or of prompt and new tokens together. All keys of a text then
    have one set of frequencies. Hugging Face caches keys that were rotated at shorter lengths.
    """

    factor: Factor
    original_len: Length | None = None
    length: Tokens | None = None

    def frequencies(self, base: float, width: int) -> np.ndarray:
        n = max(self.length, self.original_len) / self.original_len
        return _ntk(base, width, self.factor * n - (self.factor - 1))


@dataclasses.dataclass(frozen=True)
class NtkByParts(FrequencyRule):
    """theta_c of planes with more than `fast` turns in L, theta_c / f with fewer than `slow`, a ramp between.

    The weight of theta_c is (L theta_c / 2 pi - slow) / (fast - slow), from 0 to 1.

    Reference: Peng et al. 2023, arXiv 2309.00071, section 3.2.
    """

    factor: Factor
    original_len: Length | None = None
    slow: Annotated[float, "turns", at_least(0)] = 1.0
    fast: Annotated[float, "turns", at_least(0)] = 32.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ramp(self)

    def frequencies(self, base: float, width: int) -> np.ndarray:
        theta = inverse_frequencies(base, width)
        turns = self.original_len * theta / (2 * np.pi)
        kept = np.clip((turns - self.slow) / (self.fast - self.slow), 0, 1)
        return theta * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3(FrequencyRule):
    """`ntk_by_parts` with other names and numbers: the rule of Llama 3.1 and later.

    Reference: Llama 3 team 2024, arXiv 2407.21783; "llama3" of Hugging Face.
    """

    factor: Factor = 8.0
    original_len: Length | None = None
    low_freq_factor: Annotated[float, "turns", at_least(0)] = 1.0
    high_freq_factor: Annotated[float, "turns", at_least(0)] = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ramp(self, "low_freq_factor", "high_freq_factor")

    def frequencies(self, base: float, width: int) -> np.ndarray:
        parts = NtkByParts(self.factor, self.original_len, self.low_freq_factor, self.high_freq_factor)
        return parts.frequencies(base, width)


@dataclasses.dataclass(frozen=True)
class Yarn(FrequencyRule):
    """`ntk_by_parts` and logits times m(f)^2, m(f) = 0.1 ln f + 1.

    The released code ramps over the index of the plane. The ramp starts at the plane with `fast` turns in L, rounded
    down, and ends at the plane with `slow` turns, rounded up. `truncate` off does not round. ramp = "turns" is the ramp
    of the paper, over the turns. `attention_factor` replaces m. So does m(f, mscale) / m(f, mscale_all_dim) if both are
    given, with m(f, s) = 0.1 s ln f + 1.

    Reference: Peng et al. 2023, arXiv 2309.00071, sections 3.3 and 3.4; "yarn" of Hugging Face.
    Differs: Hugging Face reads `truncate` outside of parameters that are nested by layer type.
    """

    factor: Factor
    original_len: Length | None = None
    slow: Annotated[float, "turns", above(0)] = 1.0
    fast: Annotated[float, "turns", above(0)] = 32.0
    ramp: Literal["index", "turns"] = "index"
    truncate: bool = True
    attention_factor: Annotated[float, above(0)] | None = None
    mscale: Annotated[float, at_least(0)] = 0.0
    mscale_all_dim: Annotated[float, at_least(0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ramp(self)

    def resolve(self, dims: Dims) -> Self:
        both = self.mscale and self.mscale_all_dim
        m = _growth(self.factor, self.mscale) / _growth(self.factor, self.mscale_all_dim) if both else 0.0
        return super().resolve(dims).fill_open(attention_factor=m or _growth(self.factor))

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def frequencies(self, base: float, width: int) -> np.ndarray:
        if self.ramp == "turns":
            return NtkByParts(self.factor, self.original_len, self.slow, self.fast).frequencies(base, width)
        theta = inverse_frequencies(base, width)
        first, last = (
            width * math.log(self.original_len / (2 * np.pi * turns)) / (2 * math.log(base))
            for turns in (self.fast, self.slow)
        )
        first, last = (math.floor(first), math.ceil(last)) if self.truncate else (first, last)
        first, last = max(first, 0), min(last, width - 1)  # not width / 2 - 1: so does the release
        divided = np.clip((np.arange(width // 2) - first) / (last - first or 0.001), 0, 1)
        return theta * (1 - divided + divided / self.factor)


@dataclasses.dataclass(frozen=True)
class Longrope(FrequencyRule):
    """theta_c / `long_factors`_c for a text of more than L tokens, else theta_c / `short_factors`_c.

    Cosines and sines are multiplied by sqrt(1 + ln f / ln L), or by `attention_factor`.

    Reference: Ding et al. 2024, arXiv 2402.13753; "longrope" of Hugging Face.
    Differs: all keys of a text have one set, as in `dynamic_ntk`. Left out: unscaled first tokens, the search.
    """

    short_factors: tuple[Annotated[float, above(0)], ...] = ()
    long_factors: tuple[Annotated[float, above(0)], ...] = ()
    factor: Factor = 1.0
    original_len: Annotated[int, "tokens", at_least(2)] | None = None
    attention_factor: Annotated[float, above(0)] | None = None
    length: Tokens | None = None

    def resolve(self, dims: Dims) -> Self:
        resolved = super().resolve(dims)
        return resolved.fill_open(
            attention_factor=math.sqrt(1 + math.log(self.factor) / math.log(resolved.original_len))
        )

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def frequencies(self, base: float, width: int) -> np.ndarray:
        name = "long_factors" if self.length > self.original_len else "short_factors"
        if len(factors := getattr(self, name)) != width // 2:
            raise ConfigError(f"longrope: {name} has {len(factors)} numbers, but {width // 2} planes rotate")
        return inverse_frequencies(base, width) / np.array(factors)


@dataclasses.dataclass(frozen=True)
class Proportional(FrequencyRule):
    """theta_c / f for the first int(`share` d / 2) planes. The slower planes do not rotate.

    Reference: p-RoPE, Barbero et al. 2024, arXiv 2410.06205; "proportional" of Hugging Face.
    Differs: `rotary_dim` of `rope` is another rule, which spaces the frequencies of the rotated planes alone.
    """

    share: Annotated[float, at_least(0), at_most(1)] = 1.0
    factor: Factor = 1.0

    def frequencies(self, base: float, width: int) -> np.ndarray:
        theta = inverse_frequencies(base, width)
        return np.where(np.arange(len(theta)) < int(self.share * width / 2), theta / self.factor, 0)


@dataclasses.dataclass(frozen=True)
class WholeTurns(FrequencyRule):
    """theta_c of the planes that complete a turn within L, 0 for slower ones, which would meet unseen angles beyond L.

    Reference: HoPE, Chen et al. 2024, arXiv 2410.21216.
    """

    original_len: Length | None = None

    def frequencies(self, base: float, width: int) -> np.ndarray:
        theta = inverse_frequencies(base, width)
        return np.where(theta >= 2 * np.pi / self.original_len, theta, 0)


@dataclasses.dataclass(frozen=True)
class Clip(FrequencyRule):
    """theta_c for all but the slowest `planes`, which fall to 0 along half a cosine, or at once if `hard`.

    Reference: Li et al. 2026, arXiv 2602.05258, CoPE; github.com/hrlics/CoPE.
    Differs: `cope` in posx is the contextual position encoding of 2024. A `hard` clip of the planes that complete no
    turn is `whole_turns`.
    """

    planes: Annotated[int, "planes", at_least(0)] = 0
    hard: bool = False

    def frequencies(self, base: float, width: int) -> np.ndarray:
        theta = inverse_frequencies(base, width)
        if self.planes > len(theta):
            raise ConfigError(f"clip: planes={self.planes} is more than the {len(theta)} planes that rotate")
        fall = 0 if self.hard else (1 + np.cos(np.linspace(0, np.pi, self.planes))) / 2
        theta[len(theta) - self.planes :] *= fall
        return theta


@dataclasses.dataclass(frozen=True)
class Resonance(FrequencyRule):
    """2 pi / round(2 pi / theta_c) of the rule `of`: each wavelength is a whole number of tokens.

    Every angle of a plane then occurs within one wavelength, and is not new beyond L if the wavelength is shorter.

    Reference: Wang et al. 2024, arXiv 2403.00071.
    """

    of: FrequencyRule = Geometric()

    reads_base = property(lambda self: self.of.reads_base)  # type: ignore[assignment]

    @property
    def magnitude(self) -> float:
        return self.of.magnitude

    def frequencies(self, base: float, width: int) -> np.ndarray:
        theta = self.of.frequencies(base, width)
        moving = np.where(theta > 0, theta, 1)
        return np.where(theta > 0, 2 * np.pi / np.round(2 * np.pi / moving), 0)


@dataclasses.dataclass(frozen=True)
class Mobius(FrequencyRule):
    """pi (2c + 1) / L in the first round(`share` g) of g key heads: L tokens turn each plane by an odd half turn.

    The other heads are `geometric`.

    Reference: Möbius RoPE 2026, arXiv 2607.21405, read second hand.
    """

    share: Annotated[float, at_least(0), at_most(1)] = 0.25
    original_len: Length | None = None
    num_kv_heads: Heads | None = None

    def frequencies(self, base: float, width: int) -> np.ndarray:
        odd = np.pi * np.arange(1, width, 2) / self.original_len
        heads = np.arange(self.num_kv_heads)[:, None]
        return np.where(heads < round(self.share * self.num_kv_heads), odd, inverse_frequencies(base, width))


@dataclasses.dataclass(frozen=True)
class Periodic(FrequencyRule):
    """2 pi / `periods`_c: plane c makes a whole turn in a whole number of tokens. Planes cycle through the periods.

    Heads see distances modulo M, the least common multiple of the periods: logits of r and of r + M tokens are equal. A
    plane of period 1 does not rotate.

    Reference: Jerad et al. 2026, arXiv 2608.11909, definition 2.1 and proposition 2.2.
    Differs: they allow 2 pi a / m with any whole a, and read rotations from a table at i mod m. Here a is 1, and angles
    are exact to 1e-6 radians. The periods of their runs are written in their code alone, which we have not seen.
    """

    reads_base: ClassVar[bool] = False
    periods: tuple[Annotated[int, "tokens", at_least(1)], ...]

    def frequencies(self, base: float, width: int) -> np.ndarray:
        if not 1 <= len(self.periods) <= width // 2:
            raise ConfigError(
                f"periodic: periods has {len(self.periods)} numbers. Name 1 to {width // 2}, since {width // 2} planes "
                "rotate."
            )
        return 2 * np.pi / np.resize(self.periods, width // 2)


def _ntk(base: float, width: int, factor: float) -> np.ndarray:
    if width == 2 and factor > 1:
        raise ConfigError("ntk: it needs at least 4 rotated channels, since a single plane cannot both stay and slow")
    return inverse_frequencies(base * factor ** (width / max(width - 2, 1)), width)


def _check_ramp(rule: FrequencyRule, slow: str = "slow", fast: str = "fast") -> None:
    low, high = getattr(rule, slow), getattr(rule, fast)
    if not low < high:
        raise ConfigError(f"{snake_case(type(rule))}: {slow}={low} must be below {fast}={high}")


def _growth(factor: float, scale: float = 1.0) -> float:
    """Return m(f, s)."""
    return 0.1 * scale * math.log(factor) + 1


#: Every rule by name.
RULES: dict[str, type[FrequencyRule]] = {snake_case(cls): cls for cls in (
    Geometric, Linear, Ntk, DynamicNtk, NtkByParts, Llama3, Yarn, Longrope, Proportional, WholeTurns, Clip, Resonance,
    Mobius, Periodic,
)}  # fmt: skip
