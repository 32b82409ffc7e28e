"""The tables of the cost study are those of its measurements."""

import statistics

import numpy as np
import pytest

from experiments.tables import load, spread
from tests.experiments.readme import bodies

ALL = {report["name"]: report for report in load("cost", file="measurements.jsonl")}
NEWER = (
    "fope pope selective_rope key_offset xpos fox cope dape inkling grape_a kerple bam sandwich fire dynamic_bias nape "
    "log_length ssmax llama4_temperature adaptive_temperature"
).split()
POSX, PEER = "posx", "x-transformers"
KINDS = ("forward", "gradient")


def readme(*numbers):
    """Return the tables of those numbers, without what the measurements were compared with."""
    found = [[line for line in bodies("cost")[number] if not line[0].startswith("aimed at")] for number in numbers]
    return found[0] if len(found) == 1 else found


def ratio(top, bottom, form=".2f"):
    """Return the spread of the ratios that were formed in each round, "-" if one side is missing."""
    return spread((a / b for a, b in zip(top, bottom, strict=True)), form) if top and bottom else "-"


def rates(name):
    """Return {(library, encoding): tokens/s in each round} of a report of `train`."""
    return {(row["library"], row["encoding"]): row["tokens_per_second"] for row in ALL[name]["results"]}


def best_rival(found, encoding):
    """Return the rates of the fastest form of the other library, None if it has no such encoding."""
    forms = [rate for (library, name), rate in found.items() if name == encoding and library.startswith(PEER)]
    return max(forms, key=statistics.median, default=None)


def step_over_nope(name, encoding):
    found = rates(name)
    return ratio(found[POSX, "nope"], found[POSX, encoding])


def seconds(name, length, kind, encoding, contestant="posx-blockwise"):
    """Return the seconds of each round of one attention, None if it was not measured."""
    for group in ALL[name]["groups"]:
        for row in group["results"]:
            if (group["length"], *(row[n] for n in ("kind", "encoding", "contestant"))) == (
                length, kind, encoding, contestant
            ):  # fmt: skip
                return row["seconds"]
    return None


def attention_over_nope(name, length, kind, encoding):
    return ratio(seconds(name, length, kind, encoding), seconds(name, length, kind, "nope"))


@pytest.mark.parametrize(
    ("number", "names", "others"),
    [
        (0, ("train_small_devices", "train_medium_devices"),
         ("posx, one device", "posx, pinned processes", "posx, baseline", PEER, "x-transformers, flash",
          "x-transformers, compiled", "x-transformers, flash compiled")),
        (1, ("train_small_2cores", "train_medium_2cores"),
         ("posx, pinned processes", "posx, baseline", "x-transformers, compiled", "x-transformers, flash compiled")),
    ],
)  # fmt: skip
def test_arrangements_and_rivals(number, names, others):
    for place, name in enumerate(names):
        found = rates(name)
        shown = [found.get((library, "rope")) for library in others]
        best = best_rival(found, "rope")
        speeds, over = readme(number)[2 * place : 2 * place + 2]
        assert speeds[1:] == [
            f"{statistics.median(rate):,.0f}" if rate else "-" for rate in (found[POSX, "rope"], *shown)
        ]
        assert over[2:] == [
            ratio(found[POSX, "rope"], rate) if library.startswith(POSX) or rate is best else ""
            for library, rate in zip(others, shown, strict=True)
        ]


def test_best_rivals():
    for line in readme(2):
        found = [rates(name) for name in ("train_small_rivals", "train_medium_rivals")]
        assert line[1:] == [ratio(one[POSX, line[0]], best_rival(one, line[0])) for one in found]


def test_attention_beside_torch():
    forms = ["torch-sdpa", "torch-sdpa-compiled", "torch-sdpa-column"]
    for line in readme(3):
        encoding, *biased = line[0].split(",")
        expected = []
        for length in (1024, 4096):
            for kind in KINDS:
                all_forms = [
                    seconds("attention_devices", length, kind, encoding, f) for f in forms[: 2 if biased else 3]
                ]
                rival = min(filter(None, all_forms), key=statistics.median)
                expected.append(ratio(rival, seconds("attention_devices", length, kind, encoding, POSX)))
        assert line[1:] == expected


def test_steps_of_long_windows():
    for line in readme(4):
        expected = []
        for name in ("train_2048_4cores", "train_2048_devices"):
            found = rates(name)
            for library in (POSX, "posx, baseline"):
                own, nope, base = found[library, line[0]], found[library, "nope"], found["posx, baseline", "nope"]
                expected.append(spread(c / a - c / b for a, b, c in zip(own, nope, base, strict=True)))
        assert line[1:5] == expected


def test_the_whole_catalogue():
    embedding = ("sinusoidal", "learned")
    assert len(readme(5)) == len(ALL["train_all_128"]["results"])
    for line in readme(5):
        steps = [step_over_nope(name, line[0]) for name in ("train_all_128", "train_all_512")]
        calls = ["-" if line[0] in embedding else attention_over_nope("attention_all", 1024, k, line[0]) for k in KINDS]
        assert line[1:] == [*steps, *calls]


def test_encodings_that_change_scores():
    for line in readme(6):
        assert line[1:] == [step_over_nope(name, line[0]) for name in ("train_scores_128", "train_scores_512")]


def test_attention_of_4096_tokens():
    assert {line[0] for line in readme(7)} == {"nope", *NEWER}
    for line in readme(7):
        assert line[1:] == [attention_over_nope("attention_4096", 4096, kind, line[0]) for kind in KINDS]


def test_path():
    for line in readme(8):
        steps = [step_over_nope(name, line[0]) for name in ("train_path_128", "train_path_512")]
        calls = [attention_over_nope("attention_path", length, k, line[0]) for length in (1024, 4096) for k in KINDS]
        assert line[1:] == [*steps, *calls]


TRAINED = {
    "train_small": (10, 11), "train_medium": (12, 13), "train_medium_ratios": (14,), "train_small_bf16": (15, 16),
    "train_medium_bf16": (17, 18),
}  # fmt: skip


@pytest.mark.parametrize(("name", "numbers"), TRAINED.items())
def test_training(name, numbers):
    report, found = ALL[name], rates(name)
    ceiling = statistics.median(report["ceiling"])
    speeds, fairness = [], []
    for row in report["results"]:
        if row["library"] != POSX:
            continue
        own, peer = row["tokens_per_second"], found.get((PEER, row["encoding"]))
        share = f"{statistics.median(own) * row['flops_per_token'] / ceiling:.2f}"
        line = [row["encoding"], spread(own, ",.0f"), share, ratio(found[POSX, "nope"], own)]
        if len(numbers) > 1:
            line += [spread(peer, ",.0f") if peer else "-", ratio(own, peer)]
        speeds.append(line)
        theirs = [
            other for other in report["results"] if (other["library"], other["encoding"]) == (PEER, row["encoding"])
        ]
        sides = [row, *(theirs or [None])]
        sizes = [f"{side['parameters']:,}" if side else "-" for side in sides]
        losses = [(side["losses"][0], np.mean(side["losses"][-report["steps"] :])) if side else () for side in sides]
        fairness.append(
            [row["encoding"], *sizes, *(f"{pair[0]:.2f} to {pair[1]:.2f}" if pair else "-" for pair in losses)]
        )
    assert readme(numbers[0]) == speeds
    assert len(numbers) == 1 or readme(numbers[1]) == fairness


def test_losses_in_bfloat16():
    losses = ALL["bfloat16_losses"]["losses"]
    for line in readme(19):
        means = [
            np.mean(losses[f"{dtype}/{line[0]}"][last - 32 : last])
            for last in (80, 160)
            for dtype in ("float32", "bfloat16")
        ]
        assert line[1:] == [f"{mean:.4f}" for mean in means]


ATTENDED = [
    (number + place, name, length, kind)
    for number, name, lengths in ((20, "attention", (1024, 4096)), (24, "attention_bf16", (4096,)),
                                  (26, "skipping", (1024, 4096, 16384, 32768)))
    for place, (length, kind) in enumerate((length, kind) for length in lengths for kind in KINDS)
]  # fmt: skip


@pytest.mark.parametrize(("number", "name", "length", "kind"), ATTENDED)
def test_attention(number, name, length, kind):
    (group,) = [group for group in ALL[name]["groups"] if group["length"] == length]
    expected = []
    for row in group["results"]:
        if row["kind"] != kind:
            continue
        encoding, contestant = row["encoding"], row["contestant"]
        dense = next(
            filter(None, (seconds(name, length, kind, encoding, who) for who in ("jax.nn", "posx-dense"))), None
        )
        flops = row["useful_flops"] / statistics.median(row["seconds"])
        expected.append([
            encoding, contestant, spread((1e3 * s for s in row["seconds"]), ".2f"), f"{flops / 1e9:.0f}",
            f"{flops / statistics.median(group['ceiling']):.2f}", ratio(dense, row["seconds"]),
            ratio(row["seconds"], seconds(name, length, kind, "nope", contestant)),
        ])  # fmt: skip
    assert readme(number) == expected


def memory(name, kind, encoding, contestant):
    """Return the cells of one contestant: MiB above the call of 64 tokens by length, and the growth."""
    points = [
        p for p in ALL[name]["points"] if (p["kind"], p["encoding"], p["contestant"]) == (kind, encoding, contestant)
    ]
    floor = next(point["value"] for point in points if point["length"] == 64)
    above = {p["length"]: p["value"] - floor for p in points if p["status"] == "ok" and p["length"] > 64}
    lengths = sorted({point["length"] for point in ALL[name]["points"]} - {64})
    failed = {point["length"]: point["status"] for point in points}
    cells = [f"{above[n] / 2**20:,.0f}" if n in above else failed[n] for n in lengths]
    growth = np.polyfit(*np.log(np.array(list(above.items()), float)).T, 1)[0] if len(above) > 1 else None
    return [*cells, "-" if growth is None else f"{growth:.2f}"]


def contestants(name, kind):
    return list(dict.fromkeys((p["encoding"], p["contestant"]) for p in ALL[name]["points"] if p["kind"] == kind))


REMEMBERED = [
    (34, "memory", "forward"), (35, "memory", "gradient"), (38, "memory_dense", "forward"),
    (39, "memory_dense", "gradient"), (40, "memory_model", "model"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "name", "kind"), REMEMBERED)
def test_memory(number, name, kind):
    assert readme(number) == [[*who, *memory(name, kind, *who)] for who in contestants(name, kind)]


@pytest.mark.parametrize(("number", "name"), [(36, "memory_all"), (37, "memory_path")])
def test_memory_of_newer_encodings(number, name):
    expected = [
        [encoding, *(cell for kind in KINDS for cell in memory(name, kind, encoding, who))]
        for encoding, who in contestants(name, "forward")
    ]
    assert readme(number) == expected


@pytest.mark.parametrize(("number", "name"), [(41, "decode"), (42, "decode_newer"), (43, "decode_path")])
def test_decoding(number, name):
    rows = ALL[name]["results"]
    assert readme(number) == [
        [
            row["encoding"], spread(row["cached"], ",.0f"), spread(row["recomputed"], ",.2f"),
            ratio(row["cached"], row["recomputed"], ".1f"), ratio(row["cached"], rows[0]["cached"]),
            f"{row['tokens'] - row['different']} of {row['tokens']}", str(row["wrong"]), str(row["distinct"]),
        ]
        for row in rows
    ]  # fmt: skip


def test_compiling():
    expected = []
    for row in ALL["compile"]["results"]:
        (turn,) = row["turns"]
        cold, warm = (turn[name]["lower"] + turn[name]["compile"] for name in ("cold", "warm"))
        cells = [cold, warm, cold / warm, turn["cold"]["first_step"], turn["warm"]["first_step"]]
        expected.append([row["encoding"], row["executor"], *(f"{x:.2f}" for x in cells), str(turn["warm"]["hits"])])
    assert readme(44) == expected


def test_every_table_of_the_study_is_covered():
    """Whole sweeps (table 9) were timed by hand."""
    several = {n for numbers in TRAINED.values() for n in numbers} | {one[0] for one in (*ATTENDED, *REMEMBERED)}
    assert {*range(9), *several, 19, 36, 37, 41, 42, 43, 44} == {*range(45)} - {9}
    assert len(bodies("cost")) == 45
