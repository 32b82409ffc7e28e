"""A report in Chromium: what it draws, what each switch changes, and that nothing leaves the file."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from posx.encodings import Dims
from posx.lab.files.checksums import with_checksum
from posx.lab.report import gallery
from posx.lab.report import page as page_file
from posx.lab.report.page import write_report
from tests.lab.commands.test_compare import answer
from tests.lab.commands.test_compare import put as judged
from tests.lab.report.pages import put
from tests.lab.test_baselines import measured, under_window
from tests.made_rows import as_lines

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "Chromium is missing: apt-get install chromium"
    with sync_playwright() as made:
        opened = made.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser):
    """A function that opens a file; at the end the page has said nothing and asked for nothing."""
    said, asked, contexts = [], [], []

    def opened(path, **options):
        context = browser.new_context(**({"viewport": {"width": 1200, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto(path.as_uri())
        drawn(page)
        return page

    yield opened
    assert said == [] and all(url.startswith(("file:", "data:")) for url in asked), (said, asked)
    for context in contexts:
        context.close()


def drawn(page):
    page.wait_for_selector("body[data-drawn=yes]", timeout=30_000)
    return page


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for seed in range(2):
        for encoding in ("rope", "alibi", "t5"):
            put(folder / "sweep", encoding, seed)
    put(folder / "sweep", "rope", 7, name="<img src=x onerror=alert(1)>", layers=["<img src=x onerror=alert(2)>"])
    write_report([folder / "sweep"], folder / "report.html")
    return folder / "report.html"


def paths(page, chart="lengths"):
    """Return the marks of a chart: their paths, places and colours."""
    marks = ("line path", "area path", "symbol path", "rule line")
    return page.eval_on_selector_all(
        ", ".join(f"#{chart} .mark-{mark}" for mark in marks),
        "all => all.map(one => ['d', 'transform', 'stroke', 'y2'].map(name => one.getAttribute(name)).join())",
    )


def test_each_switch_changes_what_is_drawn(show, report):
    page = show(report)
    for switch, value in (
        ("measure", "bpb"), ("measure", "R_k"), ("spread", "seeds"), ("spread", "interval"), ("spread", "none"),
        ("xscale", "linear"), ("yscale", "linear"),
    ):  # fmt: skip
        before = paths(page)
        page.select_option(f"#{switch}", value)
        drawn(page)
        assert paths(page) != before, (switch, value)
    before = paths(page)
    page.locator("#legend label", has_text="alibi").locator("input").uncheck()
    drawn(page)
    assert len(paths(page)) < len(before)
    page.click("#none")
    drawn(page)
    assert paths(page) == [] and "Nothing to draw" in page.locator("#lengths").inner_text()
    page.fill("#filter", "t5")
    assert page.locator("#legend label").count() == 1
    page.click("#all")
    drawn(page)
    assert paths(page)
    before = page.locator("#training").inner_text()
    page.select_option("#against", "4")
    drawn(page)
    assert page.locator("#training").inner_text() != before


def test_axes_hold_all_marks_and_have_ticks_to_the_end(show, report):
    """Ticks begin at or below the lowest value and end at or above the highest; names and marks are in the frame."""
    page = show(report)
    data = json.loads(page.locator("#data").text_content())
    for scale in ("log", "linear"):
        page.select_option("#yscale", scale)
        drawn(page)
        texts = page.locator("#lengths .mark-text.role-axis-label text").all_text_contents()
        ticks = sorted(float(text.replace(",", "")) for text in texts)
        values = [one["mean"] for one in data["panels"][0]["points"] if one["measure"] == "ppl"]
        y = [tick for tick in ticks if tick < 60]  # windows are longer
        assert y[0] <= min(values) and max(values) <= y[-1] and len(y) >= 5
        assert {64, 128, 256} <= set(ticks)
        frame = page.locator("#cost .background").first.bounding_box()
        for mark in page.locator("#cost .mark-symbol path, #cost .mark-text.role-mark text").all():
            box = mark.bounding_box()
            for side, length in (("x", "width"), ("y", "height")):
                assert frame[side] <= box[side] and box[side] + box[length] <= frame[side] + frame[length]


@pytest.mark.parametrize("function", ["logTicks", "evenTicks"])
def test_ticks_cover_every_range(browser, function):
    """From a hair to many decades: some five to a dozen ticks, from below the lowest value to above the highest."""
    axes = (Path(page_file.__file__).parent / "common.js").read_text("utf-8").partition("// ---- axes ----")[2]
    page = browser.new_page()
    for low in (1e-3, 0.97, 1, 3.4, 9.9, 99.8):
        for ratio in (1.0001, 1.02, 1.3, 2, 4.4, 15, 300, 1e5, 1e12):
            ticks = page.evaluate(f"() => {{ {axes}; return {function}({low}, {low * ratio}); }}")
            assert ticks == sorted(set(ticks)) and 4 <= len(ticks) <= 13, (low, ratio, ticks)
            assert ticks[0] <= low and low * ratio <= ticks[-1] and ticks[0] >= 0, (low, ratio, ticks)
    page.close()


def test_tables_sort_and_verdicts_turn(show, report):
    page = show(report)

    def cells(table, n):
        return page.locator(f"#{table} tbody tr > :nth-child({n})").all_inner_texts()

    page.get_by_role("button", name="R_2").click()
    values = [float(text.split()[0]) for text in cells("table", 5)]
    assert values == sorted(values) and page.locator("#table th[aria-sort=ascending]").inner_text() == "R_2"
    page.get_by_role("button", name="R_2").click()
    assert [float(text.split()[0]) for text in cells("table", 5)] == values[::-1]
    ratios = {}
    for one, other in (("alibi", "t5"), ("t5", "alibi")):
        page.select_option("#one", label=one)
        assert set(cells("verdicts", 1)) == {one}
        ratios[one] = float(cells("verdicts", 5)[cells("verdicts", 2).index(other)])
    assert ratios["alibi"] == pytest.approx(1 / ratios["t5"], rel=1e-3)


def test_an_infinite_perplexity_sorts_after_all_others(show, tmp_path):
    for seed, encoding in enumerate(("alibi", "rope", "t5")):
        path = put(tmp_path / "sweep", encoding, seed, lengths=(64, 128)) / "eval.jsonl"
        if encoding == "rope":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            rows[1] |= {"nll": 800.0, "ppl": "inf", "block_nll": None, "bpb": None}
            path.write_text("".join(json.dumps(with_checksum(row)) + "\n" for row in rows))
    write_report([tmp_path / "sweep"], tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    page.locator("summary").click()
    page.locator("#rows").get_by_role("button", name="ppl", exact=True).click()
    place = page.locator("#rows th").all_inner_texts().index("ppl") + 1
    *others, last = page.locator(f"#rows tbody tr > :nth-child({place})").all_inner_texts()
    values = [float(text.replace(",", "")) for text in others]
    assert last == "inf" and len(values) == 8 and values == sorted(values)


def test_page_shows_no_judged_ratio_as_1(show, tmp_path):
    """A ratio of 1.0003 has as many decimals as posx compare gives it, either way round."""
    for name, shift in (("alibi", 0.0003), ("rope", 0.0)):
        judged(tmp_path, name, shift=shift, noise=1e-5)
    write_report([tmp_path], tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    for one, ratio, word in (("alibi", "1.0003", "worse"), ("rope", "0.9997", "better")):
        page.select_option("#one", label=one)
        first = page.locator("#verdicts tbody tr").first.locator("td, th").all_inner_texts()
        assert (first[4], first[7], *first[8:11]) == (ratio, word, "-", "-", "too few seeds (1)"), first
        assert "1.0000" not in first[5], first


def test_windows_of_l_are_thin_lines(show, tmp_path):
    """They are no curve of another encoding, and the caption says so."""
    for name, rows in (("rope", measured()), ("window", under_window("rope", 64))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.jsonl").write_text(as_lines(rows))
    write_report([tmp_path], tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    lines = "all => all.map(one => Number(one.getAttribute('stroke-width')))"
    assert sorted(page.eval_on_selector_all("#lengths .mark-line path", lines)) == [0.9, 2]
    assert "Thin: the same weights" in page.locator("#lengths-text").inner_text()


def test_page_of_a_task_shows_right_answers(show, tmp_path):
    """On a linear scale. Verdicts are differences of shares, which change their sign if they turn."""
    items = np.random.default_rng(0).random(2000)
    for encoding, share in (("alibi", 0.0), ("rope", 0.75)):
        answer(tmp_path, encoding, 0, items < share)
    write_report([tmp_path], tmp_path / "report.html")
    page, right = show(tmp_path / "report.html"), float((items < 0.75).mean())
    assert page.locator("#measure").inner_text() == "share of right answers" and paths(page)
    heads = page.locator("#table th").all_inner_texts()
    assert heads[:4] == ["encoding", "seeds", "right at 64", "right at 128"]
    assert page.locator("#table tbody tr").first.inner_text().split()[:3] == ["rope", "1", f"{right:.4f}"]
    for one, sign, word in (("alibi", "-", "worse"), ("rope", "+", "better")):
        page.select_option("#one", label=one)
        first = page.locator("#verdicts tbody tr").first.locator("td, th").all_inner_texts()
        assert (first[4], first[7]) == (f"{sign}{right:.4f}", word) and f" to {sign}" in first[5], first


def test_numbers_can_be_copied(show, report):
    page = show(report)
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    for format, said in (("json", "JSON"), ("csv", "CSV"), ("latex", "LaTeX")):
        page.click(f"#copy-{format}")
        page.wait_for_function(f"document.getElementById('copied').textContent.includes('{said}')")
        text = page.evaluate("window.copied")
        if format == "json":
            assert {"mean", "encoding", "text_low"} <= json.loads(text)["numbers"][0].keys()
        else:
            assert text.startswith({"csv": "train_len,protocol,", "latex": "% Non-overlapping"}[format])
    page.click("#copy-rows")
    page.wait_for_function("document.getElementById('copied-rows').textContent.includes('rows')")
    rows = json.loads(page.evaluate("window.copied"))
    assert len(rows) > 20 and {"ppl", "encoding", "seed"} <= rows[0].keys()
    page.locator("summary").click()
    page.wait_for_selector("#rows tbody tr")


def test_names_of_runs_do_nothing(show, report):
    page = show(report)
    assert page.locator("#legend label", has_text="onerror").count() == 1
    assert page.locator("main img[src=x]").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(show, report, scheme):
    page = show(report, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    style = "getComputedStyle(document.body)"
    ink, paper = page.evaluate(f"[{style}.color, {style}.backgroundColor]")
    assert ink != paper


def test_print_shows_all_figures(show, report):
    page = show(report)
    page.emulate_media(media="print")
    assert page.locator(".switches >> visible=true").count() == 0
    for chart in ("lengths", "positions", "training", "cost"):
        assert page.locator(f"#{chart} svg").is_visible()
    assert len(page.pdf()) > 20_000


def test_the_keyboard_reaches_every_control(show, report):
    page = show(report)
    controls = "[...document.querySelectorAll('select, input, button, summary')]"
    wanted = page.evaluate(f"{controls}.filter(one => one.checkVisibility()).length")
    seen = set()
    for _ in range(3 * wanted):
        page.keyboard.press("Tab")
        seen.add(page.evaluate(f"{controls}.indexOf(document.activeElement)"))
    assert len(seen - {-1}) == wanted
    assert page.locator("select:not(label select), input:not(label input)").count() == 0  # each has a label


def test_a_thousand_runs_are_drawn(show, tmp_path):
    for n in range(1000):
        settings = {"encoding.name": "rope", "train.seed": n % 4, "train.steps": n // 4, "data": "9f2c11d0aa"}
        put(tmp_path / "sweep", "rope", seed=n % 4, name=f"run{n}", lengths=(64, 128), settings=settings)
    write_report([tmp_path / "sweep"], tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    assert page.locator("#legend label").count() == 250
    assert "30 of 250 curves" in page.locator("#lengths-text").inner_text()


def test_lines_and_bands_end_at_a_failure(show, tmp_path):
    """The failure has a cross over the frame, and its length is on the axis."""
    for seed in range(2):
        path = put(tmp_path / "sweep", "rope", seed, lengths=(64, 128, 256, 512)) / "eval.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[1] |= {"status": "oom"} | dict.fromkeys(("nll", "ppl", "bpb", "block_nll"), None)
        path.write_text(as_lines(rows))
    write_report([tmp_path / "sweep"], tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    for mark in ("line", "area"):
        assert page.locator(f"#lengths .mark-{mark} path").get_attribute("d").count("M") == 2, mark
    frame = page.locator("#lengths .background").first.bounding_box()
    places = [mark.bounding_box() for mark in page.locator("#lengths .mark-symbol path").all()]
    assert sum(place["y"] < frame["y"] for place in places) == 1
    assert "128" in page.locator("#lengths .mark-text.role-axis-label text").all_text_contents()
    assert "Crosses over the frame" in page.locator("#lengths-text").inner_text()


def test_a_panel_without_a_value_says_so(show, tmp_path):
    """Nothing of the panel that was shown before stays."""
    for protocol, status in (("nonoverlapping", "oom"), ("sliding", "ok"), ("sliding_windows", "oom")):
        facts = {} if status == "ok" else dict.fromkeys(("nll", "ppl", "bpb", "block_nll"), None)
        put(tmp_path / "sweep" / protocol, "rope", protocol=protocol, status=status, **facts)
    write_report([tmp_path / "sweep"], tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    for panel, text in enumerate(("Nothing to draw", "perplexity per token", "Nothing to draw")):
        page.select_option("#panel", str(panel))
        drawn(page)
        assert text in page.locator("#lengths").inner_text(), panel
        assert page.locator("#measure option").count() == (3 if panel == 1 else 1)
    assert "rope: out of memory at" in page.locator("#notes").inner_text()


def test_a_report_of_losses_by_position_alone_is_drawn(show, tmp_path):
    path = put(tmp_path / "sweep", "rope") / "eval.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "per_position" in line))
    write_report([tmp_path / "sweep"], tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    assert page.locator("#positions svg").is_visible() and page.locator("#h-lengths").is_hidden()


def test_charts_show_the_warnings_of_their_numbers(show, tmp_path):
    for n, encoding in enumerate(("rope", "alibi")):
        settings = {"encoding.name": encoding, "train.length": 64, "train.seed": 0, "data": str(n) * 64}
        put(tmp_path / "sweep", encoding, settings=settings, tokenizer=f"bpe-{n}")
    write_report([tmp_path / "sweep"], tmp_path / "report.html")
    page = show(tmp_path / "report.html")
    assert "different tokenizers" in page.locator("#positions-notes").inner_text()
    assert "different training texts" in page.locator("#training-warning").inner_text()


def test_sliders_of_the_gallery_redraw_the_curve(show, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "ENCODINGS", ("nope", "alibi", "rope"))
    gallery.write_gallery(
        Dims(model_dim=16, num_heads=2, head_dim=8, num_layers=1, train_len=16), tmp_path / "gallery.html"
    )
    page = show(tmp_path / "gallery.html")
    line = page.locator("#e-rope .mark-line path").first
    before = line.get_attribute("d")
    page.locator("#e-rope input[type=range]").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#e-rope[data-drawn=yes]")
    assert line.get_attribute("d") != before
    assert page.locator("#e-rope output").first.inner_text() == "20000"
    page.fill("#filter", "alibi")
    assert page.locator("#gallery > section >> visible=true").count() == 1
