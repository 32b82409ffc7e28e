"""Encodings of runs as they were trained, and their effects on pairs of positions, computed by their hooks.

Positions and distances are in tokens, logits as they enter the softmax. For every text a logit is
content-free part + content part. The content-free part is the logit of zero vectors.
"""

import dataclasses
import functools
import logging
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import Slots, attend, attention_weights, batch_features, with_previous_tokens
from posx.attention.decay import mapped_products
from posx.attention.dense import dense
from posx.attention.tiles import TileInputs, with_terms
from posx.contract import abstract_params, acting_hooks, position_shape
from posx.encodings import Dims, Encoding, Nope, build, encoding_name
from posx.errors import PosxError, WorkdirError
from posx.lab.runs.finding import run_folders, run_name
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.load import load_model

MOST_POSITIONS = 256  # of a matrix
_SAME = 1e-4  # below this, a curve over distance says nothing


@dataclasses.dataclass(frozen=True)
class Subject:
    """An encoding to draw, with the arrays that one layer sees."""

    name: str
    origin: str  # where the arrays are from, in words
    encoding: Encoding
    params: dict[str, Any]
    dims: Dims
    trained: bool = False

    @property
    def num_positions(self) -> int:
        """Twice the training length, or all positions at which the encoding is defined if these are fewer."""
        longest = 2 * self.dims.train_len
        last = self.encoding.at_length(longest).max_position
        return longest if last is None else min(longest, last + 1)

    def pair_note(self, words: str) -> str:
        """Return ", " and `words`, which say how pairs of one distance give one number; "" if they are all alike."""
        return "" if self.encoding.shift_invariant else f", {words}"

    def layer_input(self, n: int) -> tuple[Encoding, jax.Array, jax.Array]:
        """Return the encoding for texts of `n` tokens, their positions and a layer input of zeros [n, m]."""
        zeros = jnp.zeros((n, self.dims.model_dim), jnp.float32)
        return self.encoding.at_length(n), jnp.asarray(self.first_axis_positions(np.arange(n))), zeros

    def first_axis_positions(self, pos: np.ndarray) -> np.ndarray:
        """Return positions [n] as the encoding reads them, with zeros on all axes but the first."""
        shape = position_shape(self.encoding)
        return pos.astype(np.int32) if not shape else np.stack([pos] + [0 * pos] * (shape[0] - 1), -1).astype(np.int32)


def catalogue() -> list[Subject]:
    """Return the encodings of the headline figure, as initialised for a small model."""
    dims = Dims(model_dim=64, num_heads=8, head_dim=8, num_layers=1, train_len=64)
    return [initial(name, build(name, dims), dims) for name in ("nope", "sinusoidal", "rope", "t5", "alibi")]


def _warn(name: str, error: PosxError) -> None:
    logging.getLogger(__name__).warning("%s is not drawn: %s", name, error)


def folder_encodings(folder: pathlib.Path, warn: Callable[[str, PosxError], None] = _warn) -> list[Subject]:
    """Return the distinct encodings of the runs below `folder`, as the first run trained each, else as initialised.

    warn: gets the name of each run whose encodings cannot be read, and the error.
    """
    subjects: dict[tuple[str, Encoding, Dims], Subject] = {}
    for path in run_folders(folder, "config.json") if folder.is_dir() else ():
        name = run_name(path, folder)
        try:
            for subject in load_run_encodings(RunFolder(path), name):
                key = (subject.name, subject.encoding, subject.dims)
                if key not in subjects or subject.trained > subjects[key].trained:
                    subjects[key] = subject
        except PosxError as error:
            warn(name, error)
    return sorted(subjects.values(), key=lambda subject: (subject.name, subject.dims.train_len))


def load_run_encodings(folder: RunFolder, name: str) -> list[Subject]:
    """Return the distinct encodings of one run's layers, each with the arrays of its first layer.

    They are as initialised if the run has no weights yet. Raises WorkdirError if learned arrays cannot be read.
    """
    run = folder.read_config()
    several = len(set(run.layers)) > 1
    names = {encoding: encoding_name(encoding) if several else run.encoding for encoding in run.layers}
    was_trained = folder.is_borrowed or folder.newest_step is not None or folder.done_file.exists()
    try:
        model, params, _, step = load_model(folder)
    except WorkdirError:
        if was_trained and any(abstract_params(encoding, run.dims) for encoding in names):
            raise
        return [initial(title, encoding, run.dims) for encoding, title in names.items()]
    subjects = []
    for encoding in model.distinct:
        first = model.encodings.index(encoding)
        arrays = model.layer_arrays(params, first)
        own = arrays.keys() - encoding.shared
        where = f"trained in {name}, step {step}" + (f", layer {first + 1}" if own else "")
        origin = where if arrays else f"of {name}, nothing learned"
        subjects.append(Subject(names[encoding], origin, encoding, arrays, model.dims, trained=True))
    return subjects


def initial(name: str, encoding: Encoding, dims: Dims) -> Subject:
    arrays = encoding.init(jax.random.key(0), dims)
    return Subject(name, "as initialised" if arrays else "nothing learned", encoding, arrays, dims)


def embedding_vectors(subject: Subject) -> np.ndarray | None:
    """Return the vectors [position, channel] that are added to embeddings, or None if none are."""
    encoding, pos, zeros = subject.layer_input(min(subject.num_positions, MOST_POSITIONS))
    return np.asarray(encoding.embed(subject.params, zeros, pos)) if encoding.acts_on("embed") else None


def content_free(subject: Subject, length: int, queries: slice = slice(None)) -> np.ndarray | None:
    """Return the logits of zero vectors [head, query, key] at `length` positions, before `score`; None if all are 0."""
    (encoding, pos, zeros), (q, k) = subject.layer_input(length), _zero_vectors(subject.dims, length)
    q = with_previous_tokens(encoding, "query", q, None)[0]
    of_keys = batch_features(encoding, subject.params, zeros[None], pos)[0]
    features = ({name: array[:, queries] for name, array in of_keys.items()}, of_keys)
    order, logits = jnp.arange(length, dtype=jnp.int32), list[jax.Array]()

    def executor(pairs: TileInputs, **_: Any) -> jax.Array:
        logits.append(with_terms(pairs, mapped_products(pairs)))
        return dense(pairs)

    slots = Slots(pos[queries], order[queries]), Slots(pos, order)
    attend(encoding, subject.params, q[:, queries], k, k, *slots, features=features, executor=executor)
    s = np.asarray(logits[0][0], np.float64)
    return s if np.any(s) else None


def sink_weights(subject: Subject) -> np.ndarray | None:
    """Return the weight of the sink [head, query] for zero vectors; None without a sink."""
    n = min(subject.num_positions, MOST_POSITIONS)
    if not subject.encoding.acts_on("sink"):
        return None
    (encoding, pos, zeros), (q, k) = subject.layer_input(n), _zero_vectors(subject.dims, n)
    w, _ = attention_weights(encoding, subject.params, q, k, pos, x=zeros[None])
    return 1 - np.asarray(w[0], np.float64).sum(axis=-1)


def _zero_vectors(dims: Dims, length: int) -> list[jax.Array]:
    """Return queries and keys [1, n, heads, d] of zeros."""
    return [jnp.zeros((1, length, heads, dims.head_dim), jnp.float32) for heads in (dims.num_heads, dims.kv_heads)]


def content_free_by_distance(subject: Subject, whole: np.ndarray) -> np.ndarray:
    """Return content-free logits [head, distance] from distance 0; `whole` is `content_free` of the first positions.

    They are those of one query if only distances count, else means over all pairs.
    """
    n = subject.num_positions
    if not subject.encoding.shift_invariant:
        diagonals = [np.diagonal(whole, -distance, axis1=1, axis2=2) for distance in range(whole.shape[1])]
        return np.stack([diagonal.mean(axis=1) for diagonal in diagonals], axis=1)
    last = whole[:, -1:] if whole.shape[1] == n else content_free(subject, n, slice(n - 1, n))
    return np.zeros((len(whole), n)) if last is None else last[:, 0, ::-1]


def logit_scales(subject: Subject) -> np.ndarray | None:
    """Return the logit scale of each query [head or 1, position] for a layer input of zeros, None if it is constant."""
    encoding, pos, zeros = subject.layer_input(subject.num_positions)
    features = jax.tree.map(lambda x: x[0], batch_features(encoding, subject.params, zeros[None], pos)[0])
    scales = encoding.logit_scale(subject.params, pos, features)
    return None if scales is None or np.ptp(scales) < _SAME else np.asarray(scales, np.float64)


def match_by_distance(subject: Subject) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (distances [n], products [head, n]) of a unit vector as a query and the same one as a key further back.

    A product is the mean over all directions of the vector: a trace, exact for affine maps, and 1 if position changes
    nothing. The query is the last one, which matters for maps that are not shift-invariant, as those of FoPE. The
    result is None if a `score` changes products, and if maps read the text or look back.
    """
    dims, n = subject.dims, subject.num_positions
    encoding = subject.encoding.at_length(n)
    if (
        encoding.history
        or acting_hooks(encoding, ("features", "score"))
        or not acting_hooks(encoding, ("query", "key"))
    ):
        return None
    distances = np.unique(np.linspace(0, n - 1, min(n, MOST_POSITIONS // 2)).astype(np.int32))
    q = _vector_images(encoding.query, subject, dims.num_heads, np.array([n - 1]))
    k = _vector_images(encoding.key, subject, dims.kv_heads, n - 1 - distances)
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    if (rate := encoding.decay(subject.params)) is not None:  # nats per token [h or 1, d']
        k = k * np.exp(-np.asarray(rate, np.float64) * distances[:, None, None, None])
    products = np.einsum("nchd,rchd->hr", q, k) / dims.head_dim
    return (distances, products) if np.ptp(products) > _SAME else None


def _vector_images(hook: Any, subject: Subject, heads: int, positions: np.ndarray) -> np.ndarray:
    """Return the images of basis vectors under a token map, less that of zero: [position, channel, head, d']."""
    d, n = subject.dims.head_dim, len(positions)
    basis = np.broadcast_to(np.eye(d, dtype=np.float32)[None, :, None, :], (n, d, heads, d)).reshape(n * d, heads, d)
    pos = jnp.asarray(subject.first_axis_positions(np.repeat(positions, d)))
    mapped, zero = (
        np.asarray(hook(subject.params, jnp.asarray(x), pos, {}), np.float64) for x in (basis, np.zeros_like(basis))
    )
    return (mapped - zero).reshape(n, d, heads, -1)


def random_token_change(subject: Subject) -> np.ndarray | None:
    """Return the change of logits of random tokens [head, query, key], relative to each query's own key.

    The change is read off the weights, so it includes the effect of every hook. The result is None if no hook acts, or
    if another panel can show the effect.
    """
    dims, n = subject.dims, min(subject.num_positions, MOST_POSITIONS // 2)
    encoding, rng = subject.encoding.at_length(n), np.random.default_rng(0)
    if not acting_hooks(encoding) or acting_hooks(encoding, ("embed",)) or relative_lengths(subject):
        return None
    shapes = (dims.num_heads, dims.head_dim), (dims.kv_heads, dims.head_dim), (dims.model_dim,)
    q, k, x = (jnp.asarray(rng.standard_normal((1, n, *shape)), jnp.float32) for shape in shapes)

    @functools.partial(jax.jit, static_argnums=0)
    def log_weights(encoding: Encoding, params: Any) -> jax.Array:
        pos = subject.first_axis_positions(np.arange(n))
        return jnp.log(attention_weights(encoding, params, q, k, pos, x=x)[0][0])

    changed = np.asarray(log_weights(encoding, subject.params) - log_weights(Nope(), {}), np.float64)
    changed = changed - np.diagonal(changed, axis1=1, axis2=2)[:, :, None]
    return np.where(np.tri(n, dtype=bool), changed, np.nan)


def with_random_arrays(subject: Subject) -> Subject:
    """Return the subject with random arrays, if it is not trained: arrays that start at zero show nothing."""
    if subject.trained:
        return subject
    rng, scale = np.random.default_rng(0), 1 / math.sqrt(subject.dims.head_dim)
    params = {
        name: jnp.asarray(scale * rng.standard_normal(array.shape), jnp.float32)
        for name, array in subject.params.items()
    }
    return dataclasses.replace(subject, params=params)


def relative_lengths(subject: Subject) -> dict[str, np.ndarray]:
    """Return {use of the vectors: their lengths [distance], mean over heads}."""
    encoding, distances, _ = subject.layer_input(subject.num_positions)
    if not encoding.acts_on("by_distance"):
        return {}
    terms = encoding.by_distance(subject.params, distances)
    vectors = {"for queries": terms.query, "for keys": terms.key, "added to values": terms.value}
    return {name: np.linalg.norm(of, axis=-1).mean(axis=1) for name, of in vectors.items() if of is not None}


def rope_bound(head_dim: int, distances: np.ndarray, base: float = 10000.0) -> np.ndarray:
    """Return RoFormer's bound on RoPE's decay with distance r.

    (2/d) sum_{c=1}^{d/2} |S_c|, S_c = sum_{i<c} exp(i r theta_i).
    Su et al. 2021 (arXiv 2104.09864), section 3.4.3; at r = 0 it is (d/2 + 1) / 2.
    """
    theta = base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    partial = np.cumsum(np.exp(1j * np.asarray(distances, np.float64)[:, None] * theta), axis=1)
    return np.asarray(np.abs(partial).mean(axis=1))
