"""The HTML report: what stands in it, and that it needs nothing else."""

import re
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench_runs import even_run, program, run_of
from sostenuto.errors import Unsupported
from sostenuto.runtime.bench.comparison import Place, compare
from sostenuto.runtime.bench.page import page
from sostenuto.runtime.bench.page_tables import all_measures, headline
from sostenuto.runtime.bench.plots import Ink
from sostenuto.runtime.bench.report import write_report
from sostenuto.runtime.bench.summary import Measured, summarize
from sostenuto.runtime.bench.timelines import program_to_show
from sostenuto.types import ProgramId

draws = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")


class Elements(HTMLParser):
    """What a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.counts: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]


def measured(ratios: tuple[str, ...] = ("1.2", "2")) -> list[Measured]:
    runs = [
        even_run(policy, seed, mean_s + seed, {"ratio": ratio, **notes})
        for seed in (1, 2)
        for ratio in ratios
        for policy, mean_s, notes in (
            ("ours", 50.0, {}),
            ("<theirs>", 100.0, {}),
            ("clairvoyant", 45.0, {"reference": "clairvoyant"}),
        )
    ]
    return [Measured(run, summarize(run, lower_bound_mean_s=30.0)) for run in runs]


@pytest.fixture(scope="module")
def text() -> str:
    """The page of two ratios."""
    return page(measured(), {"seeds": "1, 2", "note": "<b>bold</b>"})


def place() -> Place:
    return compare([m.summary for m in measured()])[0]


@draws
def test_the_page_loads_nothing_from_anywhere(text: str):
    elements = Elements(text)
    assert not {"script", "link", "img", "iframe"} & elements.counts.keys()
    assert all(link.startswith("#") for link in elements.links)


@draws
def test_over_several_ratios_there_are_lines_and_in_each_place_its_own_plots(text: str):
    elements = Elements(text)
    lines, of_each_place = 4, 4
    assert elements.counts["svg"] == lines + 2 * of_each_place
    assert elements.counts["table"] == 4


@draws
def test_at_one_ratio_there_are_bars_in_place_of_lines():
    elements = Elements(page(measured(("2",)), {}))
    assert elements.counts["svg"] == 2 + 4


@draws
def test_the_page_says_settings_policies_and_the_lower_bound(text: str):
    assert "<dt>seeds</dt><dd>1, 2</dd>" in text
    assert "lower bound" in text
    assert "clairvoyant" in text


@draws
def test_names_are_text_and_not_markup(text: str):
    assert "&lt;theirs&gt;" in text
    assert "<theirs>" not in text
    assert "<b>bold</b>" not in text


@draws
def test_the_same_runs_give_the_same_page(text: str):
    assert page(measured(), {"seeds": "1, 2", "note": "<b>bold</b>"}) == text


@draws
def test_runs_without_timelines_have_none():
    runs = measured(("2",))
    for each in runs:
        for engine in each.run.engines:
            engine.used_tokens, engine.decoding = [], []
        for one in each.run.programs:
            one.stretches = []
    assert Elements(page(runs, {})).counts["svg"] == 4


@draws
def test_all_reports_go_into_one_directory(tmp_path: Path):
    write_report(tmp_path / "out", measured(("2",)), {})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.json",
        "report.csv",
        "report.html",
    }


def test_without_matplotlib_the_extra_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=re.escape("pip install 'sostenuto[train]'")):
        write_report(tmp_path / "out", measured(), {})
    assert not (tmp_path / "out").exists()
    write_report(tmp_path / "out", measured(), {}, html=False)
    assert (tmp_path / "out" / "report.csv").exists()


def test_the_best_of_the_policies_is_marked_and_no_reference():
    table = headline(place())
    means = {line.cells[0].text: line.cells[1].is_best for line in table.lines}
    assert means == {"ours": True, "<theirs>": False, "clairvoyant": False}


def test_what_is_alike_for_all_is_not_marked():
    hits = headline(place()).headings.index("hit %")
    assert not any(line.cells[hits].is_best for line in headline(place()).lines)


def test_all_measures_have_a_line_with_a_value_for_each_policy():
    table = all_measures(place())
    assert table.headings == ("", "ours", "<theirs>", "clairvoyant")
    assert {len(line.cells) for line in table.lines} == {4}
    assert len(table.lines) > 25


def test_a_policy_has_one_colour_whatever_value_was_best_for_it():
    ink = Ink(colour={"cap": "#111111", "clairvoyant": "#222222"}, references=frozenset({"clairvoyant"}))
    assert ink.line("cap (best of 8: 3)") == ink.line("cap (best of 8: 5)")
    assert ink.line("clairvoyant")["linestyle"] == "--"


def test_the_program_that_is_shown_is_slow_and_has_a_timeline_everywhere():
    slow = run_of(*(program(f"p{i}", end_s=10.0 + i) for i in range(10)))
    other = run_of(*(program(f"p{i}", end_s=10.0) for i in range(9)), program("p9", failed="refused"))
    assert program_to_show([slow]) == ProgramId("p9")
    assert program_to_show([slow, other]) == ProgramId("p8")
    assert program_to_show([]) is None
