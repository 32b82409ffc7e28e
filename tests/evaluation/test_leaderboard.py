"""The leaderboard's verdicts, from cells whose differences are known."""

import tomllib

import numpy as np
import pytest

from configs import leaderboard as config
from experiments.leaderboard import leaderboard as board
from posx.errors import ConfigError
from posx.evaluation.statistics import BLOCK_LEN

BLOCKS = 64
TEXT = np.random.default_rng(0).normal(1.5, 0.1, BLOCKS)  # how hard each block is, the same for all


def cells(encoding, seeds, at_train, at_double):
    """Return cells whose mean losses at L and at 2 L are these, seed by seed."""
    return [
        {"encoding": encoding, "seed": seed, "train_len": 64, "settings": {}, "rows": [
            row(at_train[seed], 64), row(at_double[seed], 128),
        ]}
        for seed in seeds
    ]  # fmt: skip


def row(nll, length):
    return {
        "protocol": "nonoverlapping", "eval_len": length, "status": "ok", "nll": nll, "targets": "t",
        "num_targets": BLOCKS * BLOCK_LEN, "block_len": BLOCK_LEN,
        "block_nll": ((TEXT - TEXT.mean() + nll) * BLOCK_LEN).tolist(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def made():
    near, far = [1.500, 1.502, 1.498], [1.560, 1.562, 1.558]
    wide = [1.4, 1.5, 1.6]
    return [
        *cells("good", range(3), near, near),
        *cells("same", range(3), [1.501, 1.503, 1.499], near),
        *cells("bad", range(3), far, far),
        *cells("falling", range(3), wide, [nll - 0.02 for nll in wide]),
        *cells("once", range(1), far, far),
    ]


@pytest.mark.parametrize(
    ("encoding", "claimed", "than", "verdict"),
    [
        ("good", "below", "bad", "confirmed"),
        ("good", "above", "bad", "contradicted"),
        ("good", "level", "bad", "contradicted"),
        ("good", "below", "same", "open"),
        ("good", "level", "falling", "open"),
        ("good", "below", "once", "open"),
        ("good", "below", "absent", "not run"),
    ],
)
def test_a_claim_is_settled_only_by_the_whole_interval(made, encoding, claimed, than, verdict):
    said = board.claims(made, [{"encoding": encoding, "at": 1, "is": claimed, "than": than, "source": "x"}])
    assert said.endswith(f"| {verdict} |")


def test_level_is_confirmed_within_one_percent(made):
    said = board.claims(made, [{"encoding": "good", "at": 2, "is": "level", "than": "same", "source": "x"}])
    assert said.endswith("| 1.000 (0.993 to 1.007) | confirmed |")


def test_an_encoding_is_held_against_itself_seed_by_seed(made):
    """Seeds 0.1 nats apart that all fall by 0.02: across seeds nothing could be said."""
    said = board.claims(made, [{"encoding": "falling", "at": 2, "is": "below", "than_at": 1, "source": "x"}])
    assert "`falling` at 2 L below that at L" in said and said.endswith("| 0.980 (0.980 to 0.980) | confirmed |")


def test_a_claim_about_a_length_without_a_loss_is_not_judged(made):
    undefined = {"protocol": "nonoverlapping", "eval_len": 128, "status": "undefined"}
    none = [cell | {"encoding": "none", "rows": [cell["rows"][0], undefined]} for cell in made[:3]]
    said = board.claims(made + none, [{"encoding": "none", "at": 2, "is": "below", "than": "bad", "source": "x"}])
    assert said.endswith("| - | no loss |")


def test_cells_of_different_text_are_not_compared(made):
    other = [cell | {"encoding": "other", "rows": [row(1.5, 64) | {"targets": "u"}]} for cell in made[:3]]
    with pytest.raises(ConfigError, match="scored different targets"):
        board.claims(made + other, [{"encoding": "other", "at": 1, "is": "below", "than": "bad", "source": "x"}])


def test_every_published_claim_can_be_answered_by_the_config():
    settings = config.get_config()
    factors = {length / settings.train.length for length in settings.eval.lengths}
    for claim in tomllib.loads(board.CLAIMS.read_text())["claim"]:
        assert {claim["encoding"], claim.get("than", claim["encoding"])} <= set(config.ENTRIES)
        assert {claim["at"], claim.get("than_at", claim["at"])} <= factors
        assert claim["source"] and board.judged(claim["is"], -1, 1) == "open"
        assert ("than" in claim) != ("than_at" in claim)
