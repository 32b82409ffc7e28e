"""Where the scored targets lie: read back from rows of a "model" whose loss at a target is the target's number."""

import numpy as np
import pytest

from posx.errors import ConfigError
from posx.evaluation import Nonoverlapping, PerPosition, Sliding, evaluate

rng = np.random.default_rng(0)
BLOCK = 256


def scored(num_tokens, protocol, lengths, documents=None):
    """One row a length, and the first target of every block [n] of the first of them."""
    stream = np.arange(num_tokens + 1)
    rows = evaluate(lambda t: 1 - t[:, 1:].astype(np.float32), stream, protocol, lengths, documents=documents)
    sums = np.array(rows[0]["block_nll"])
    sizes = np.minimum(BLOCK, rows[0]["num_targets"] - BLOCK * np.arange(len(sums)))
    return rows, np.rint(sums / sizes - (sizes - 1) / 2).astype(int)


def stretches(starts):
    """Stretches as (start, blocks) from the starts of blocks; those that touch are one."""
    breaks = np.flatnonzero(np.diff(starts) != BLOCK) + 1
    return [(int(part[0]), len(part)) for part in np.split(starts, breaks)]


@pytest.mark.parametrize("protocol", [Nonoverlapping(16384), Sliding(16, 16384)])
def test_targets_are_spread_and_equal_at_every_length(protocol):
    rows, starts = scored(400_000, protocol, (64, 96, 512))
    assert len({(row["targets"], tuple(row["block_nll"])) for row in rows}) == 1
    found = stretches(starts)
    assert len(found) == rows[0]["num_stretches"] == 32 and {blocks for _, blocks in found} == {2}
    gaps = np.diff([0, *(at for at, _ in found), 400_000])
    assert gaps.max() < 1.6 * 400_000 / 32


@pytest.mark.parametrize("lengths", [[30_000] * 9, [90_000, 700, 60_000, 300, 400, 50_000, 3000], "uneven"])
def test_every_document_is_touched_by_enough_stretches(lengths):
    sizes = np.array(lengths) if lengths != "uneven" else np.exp(rng.normal(8, 1.5, 60)).astype(int) + 300
    ends = np.cumsum(sizes)
    begins = ends - sizes + 1  # in the stream, whose first token is context only
    (row,), starts = scored(int(ends[-1]), Nonoverlapping(BLOCK * 128), [100], begins)
    touched = {int(np.searchsorted(ends, place, side="right")) for at in starts for place in (at, at + BLOCK - 1)}
    assert row["num_documents"] == len(touched) == len(sizes)


def test_documents_are_counted_if_stretches_touch_some():
    begins = np.arange(1, 99_000, 1000)
    (row,), _ = scored(99_000, Nonoverlapping(2048), [2048], begins)
    assert row["num_stretches"] == 1 and row["num_documents"] == 3, "one stretch of 2048 targets in the middle"
    (row,), _ = scored(99_000, Nonoverlapping(), [2048], begins)
    assert row["num_stretches"] == 1 and row["num_documents"] == 99
    (row,), _ = scored(99_000, Nonoverlapping(), [2048])
    assert row["num_documents"] is None


@pytest.mark.parametrize("lengths", [[300, 20, 7, 500, 1, 96], [1000], [5] * 200])
def test_own_context_is_that_of_the_document_of_a_target(lengths):
    """Counted token by token. The first token of the stream is of no document."""
    count, length = sum(lengths), 64
    document = np.repeat(np.arange(-1, len(lengths)), [1, *lengths])
    own = seen = 0
    for target in range(1, count + 1):
        context = document[target - 1 - (target - 1) % length : target]
        own, seen = own + int((context == document[target]).sum()), seen + len(context)
    for begins, expected in ((1 + np.cumsum([0, *lengths[:-1]]), pytest.approx(own / seen, abs=6e-5)), (None, None)):
        stream = np.arange(count + 1) % 7
        (row,) = evaluate(lambda t: np.full(t.shape, -2.0), stream, Nonoverlapping(), [length], documents=begins)
        assert row["own_context"] == expected


def test_a_stretch_holds_whole_windows_of_the_longest_length():
    _, starts = scored(400_000, Nonoverlapping(65536), (64, 5000))
    assert {blocks * BLOCK for _, blocks in stretches(starts)[:-1]} == {5120}
    rows, _ = scored(400_000, Nonoverlapping(65536), (64, 4096))
    assert rows[1]["num_windows"] == 16
    rows, starts = scored(400_000, Nonoverlapping(8000), (64, 8000))
    assert len(stretches(starts)) == rows[1]["num_windows"] == 1 and rows[0]["num_targets"] == 8000
    # A least length of its own keeps the targets of a look at shorter windows.
    assert (
        scored(400_000, Nonoverlapping(65536, 5000), [64])[0][0]["targets"]
        == (scored(400_000, Nonoverlapping(65536), (64, 5000))[0][0]["targets"])
    )


@pytest.mark.parametrize(("num_targets", "sizes"), [
    (65_536, [16_384] * 4), (32_767, [16_384, 16_383]), (30_000, [16_384, 13_616]), (20_000, [20_000]),
    (16_384, [16_384]),
])  # fmt: skip
def test_long_windows_lie_in_as_many_documents_as_windows(num_targets, sizes):
    """20 documents of 20,000 tokens. A rest of half a window or more is a stretch of its own, at no extra window."""
    begins = np.arange(1, 400_000, 20_000)
    stream = rng.integers(0, 9, 400_001)
    (row,) = evaluate(context, stream, Nonoverlapping(num_targets), [16_384], documents=begins)
    assert row["num_stretches"] == len(sizes) and row["num_windows"] == -(-num_targets // 16_384)
    assert row["num_documents"] >= len(sizes) and row["num_targets"] == num_targets
    expected = np.concatenate([np.arange(1, size + 1) % 16_384 for size in sizes]).astype(float)
    expected[expected == 0] = 16_384
    assert row["block_nll"] == [sum(expected[n : n + BLOCK]) for n in range(0, num_targets, BLOCK)]


def context(tokens):
    """A "model" whose loss is how many tokens of context a target has."""
    return -np.broadcast_to(np.arange(1, tokens.shape[1], dtype=np.float32), (tokens.shape[0], tokens.shape[1] - 1))


def test_windows_restart_at_stretches_and_slide_over_starts():
    stream = rng.integers(0, 9, 400_001)
    (row,) = evaluate(context, stream, Nonoverlapping(32768), [1024])
    assert row["num_stretches"] == 32
    assert row["block_nll"] == [sum(range(n + 1, n + 257)) for n in (0, 256, 512, 768)] * 32
    (row,) = evaluate(context, stream, Sliding(128, 32768), [512])
    assert row["num_stretches"] == 32 and set(row["block_nll"]) == {2 * sum(range(385, 513))}


@pytest.mark.parametrize("length", [300, 384, 448, 512])
def test_each_place_in_a_window_has_as_many_targets(length):
    """A length that does not divide a stretch was scored in part in shorter windows."""
    stream = rng.integers(0, 9, 400_001)
    (row,) = evaluate(context, stream, PerPosition(16384), [length])
    assert row["num_stretches"] == 32 and set(row["position_targets"]) <= {16384 // length, 16384 // length + 1}
    (plain,) = evaluate(context, stream, Nonoverlapping(16384), [length])
    assert plain["nll"] == pytest.approx((length + 1) / 2, rel=2e-2)


@pytest.mark.parametrize("num_targets", [400, 5000, 9_000, 9_900, 9_999, 10_000, 0, 20_000])
@pytest.mark.parametrize("protocol", [Nonoverlapping, lambda n: Sliding(10, n), PerPosition])
def test_ragged_ends_lose_no_target_and_score_none_twice(protocol, num_targets):
    begins = np.array([1, 700, 4000, 4100, 9999])
    rows, starts = scored(10_000, protocol(num_targets), [100], begins)
    have = 10_000 - (100 if rows[0]["protocol"] == "sliding" else 0)
    assert rows[0]["num_targets"] == min(num_targets or have, have)
    assert (np.diff(starts) >= BLOCK).all() and starts[0] >= 10_000 - have
    assert starts[-1] + rows[0]["num_targets"] - BLOCK * (len(starts) - 1) <= 10_000


def test_the_digest_names_places_and_tokens():
    stream = rng.integers(0, 9, 50_001)

    def digest(stream, protocol, **kinds):
        return evaluate(context, stream, protocol, [128], **kinds)[0]["targets"]

    base = digest(stream, Nonoverlapping(8192))
    assert digest(stream, Nonoverlapping(8192)) == digest(stream, PerPosition(8192)) == base
    changed = stream.copy()
    changed[1 + 25_000 // 32 : 1 + 25_000 // 32 + 10] += 1  # within the first stretch, whose middle this is
    assert len({base, digest(changed, Nonoverlapping(8192)), digest(stream, Nonoverlapping(8448))}) == 3
    assert digest(stream, Nonoverlapping(8192), documents=[1, 30_000, 30_300]) != base


@pytest.mark.parametrize("documents", [[[1, 2]], [[1], [2, 3]], [0.5], [-1], [60_000], "abc"])
def test_documents_that_are_no_places_are_refused(documents):
    with pytest.raises(ConfigError, match="documents"):
        evaluate(context, np.arange(50_001), "nonoverlapping", [16], documents=documents)
