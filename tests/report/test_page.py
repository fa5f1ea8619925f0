"""The page, the pictures and the tables, without a browser."""

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gradwire_lab.cli.report import report
from gradwire_lab.report.charts import tradeoff
from gradwire_lab.report.load import load
from gradwire_lab.report.run_groups import tasks
from gradwire_lab.report.summary import best, headline
from run_folders import SPECS, write_grid, write_run

MOST_BYTES = 1_500_000

app = typer.Typer()
app.command()(report)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_grid(root)
    write_run(root, "choco", consensus=True)
    write_run(root, "fp32", metric="perplexity", name="ptb", settings={"data.name": "ptb", "model.name": "lstm"})
    return root


@pytest.fixture(scope="module")
def text(runs: Path) -> str:
    out = runs.parent / f"{runs.name}.html"
    done = CliRunner().invoke(app, [str(runs), "-o", str(out), "--title", "A & B"])
    assert done.exit_code == 0, done.output
    return out.read_text()


def test_the_page_holds_the_data(text: str) -> None:
    assert "<title>A &amp; B</title>" in text
    assert all(spec in text for spec in SPECS)
    assert "digits, cnn" in text and "ptb, lstm" in text
    assert "granularity = &#34;layer&#34;" in text  # the recipe
    specs = _embedded(text, "figures")
    names = {key.removeprefix("digits-cnn-") for key in specs if key.startswith("digits-cnn-")}
    assert names == {
        "metric-over-bytes",
        "metric-over-time",
        "metric-by-epoch",
        "loss-by-step",
        "bytes-by-rule",
        "bytes-by-layer",
        "step-time",
        "consensus-by-epoch",
    }
    assert not any("consensus" in key for key in specs if key.startswith("ptb"))
    assert "fp32" in json.dumps(specs["digits-cnn-metric-over-bytes"])


def test_the_page_is_small_and_loads_nothing(text: str) -> None:
    assert len(text.encode()) < MOST_BYTES
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""(?:src|href|action|data)\s*=\s*["']?\s*(?:https?:)?//""", markup)
    assert not re.search(r"@import|url\(|<iframe|<object|<embed", markup)
    assert "default-src 'none'" in text  # and the browser is told to see to it
    assert not re.search(r"<script[^>]*\ssrc", text)


def test_data_cannot_end_their_script(tmp_path: Path) -> None:
    write_run(tmp_path, "</script><b>")
    out = tmp_path / "report.html"
    assert CliRunner().invoke(app, [str(tmp_path), "-o", str(out)]).exit_code == 0
    assert "</script><b>" not in out.read_text()


def test_pictures_need_no_browser(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = runs.glob("ptb-0")
    done = CliRunner().invoke(app, [str(one), "--png", str(tmp_path), "--svg", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "ptb-lstm-metric-over-bytes.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "ptb-lstm-metric-over-bytes.svg").read_text().startswith("<svg")
    assert not Path("report.html").exists()


def test_charts_for_a_paper(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--format", "pdf", "--format", "svg", "--width", "300", "--no-title", "--specs", "fp32; topk(0.01)|sign"]
    done = CliRunner().invoke(app, [*map(str, runs.glob("digits-*")), *words])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "figures" / "digits-cnn-metric-over-bytes.pdf").read_bytes().startswith(b"%PDF")
    drawn = (tmp_path / "figures" / "digits-cnn-metric-over-bytes.svg").read_text()
    assert "terngrad" not in drawn and "topk(0.01) | sign" in drawn and "Accuracy against" not in drawn
    assert int(re.search(r'width="(\d+)', drawn)[1]) == 300
    refused = CliRunner().invoke(app, [str(runs), "--specs", "int9"])
    assert refused.exit_code == 2 and "'int9'" in refused.stderr and "terngrad" in refused.stderr


@pytest.mark.parametrize("named", ["sign; exchange=two_way", "sign @ sync.exchange=two_way", "sign, exchange two_way"])
def test_a_spec_with_settings_has_the_name_that_compare_takes(tmp_path: Path, named: str) -> None:
    for way in ("two_way", "allgather"):
        write_run(tmp_path, "sign", name=way, settings={"sync.exchange": way})
    done = CliRunner().invoke(app, [str(tmp_path), "--latex", str(tmp_path / "table.tex"), "--specs", named])
    assert done.exit_code == 0, done.output
    assert "allgather" not in (tmp_path / "table.tex").read_text()


@pytest.mark.parametrize("width", [240, 320, 560])
@pytest.mark.parametrize("title", ["--no-title", "--title-in-figures"])
def test_a_figure_has_the_width_that_was_asked_for_and_holds_all_of_its_legend(
    runs: Path, tmp_path: Path, width: int, title: str
) -> None:
    words = ["--svg", str(tmp_path), "--width", str(width), title]
    assert CliRunner().invoke(app, [*map(str, runs.glob("digits-*")), *words]).exit_code == 0
    for path in tmp_path.glob("*.svg"):
        drawn = path.read_text()
        across, down = (float(re.search(rf'<svg[^>]*{side}="([\d.]+)"', drawn)[1]) for side in ("width", "height"))
        assert across == width, path.name
        assert lowest_text(drawn) < down - 8, path.name


def lowest_text(drawn: str) -> float:
    """Where the last text, which is a legend's, lies, in pixels down from the top."""
    lowest, places = 0.0, [(0.0, ET.fromstring(drawn))]
    for above, node in places:
        shift = re.search(r"translate\([^,]+,([-\d.]+)\)", node.get("transform", ""))
        down = above + (float(shift[1]) if shift else 0.0)
        lowest = max(lowest, down) if node.tag.endswith("text") else lowest
        places += [(down, child) for child in node]
    return lowest


def test_names_of_figures_have_no_dot_but_the_extension(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", settings={"model.name": "net.v2.py:make"})
    assert CliRunner().invoke(app, [str(tmp_path / "runs"), "--svg", str(tmp_path / "svg")]).exit_code == 0
    names = [path.name for path in (tmp_path / "svg").iterdir()]
    assert "digits-net-v2-make-metric-over-bytes.svg" in names and all(name.count(".") == 1 for name in names)


def test_latex_tables(runs: Path) -> None:
    done = CliRunner().invoke(app, [str(runs), "--latex", "-"])
    assert done.exit_code == 0, done.output
    assert r"topk(0.01) \textbar{} sign & " in done.stdout and r"$\pm$" in done.stdout
    assert done.stdout.count(r"\begin{tabular}") == done.stdout.count(r"\bottomrule") == 2
    assert done.stdout.count(r"% Needs \usepackage{booktabs}. After \pm: the sample standard deviation") == 2
    rows = [line for line in done.stdout.splitlines() if line.endswith(r"\\")]
    (quantized,) = (row for row in rows if row.startswith("qsgd(4)"))
    assert r" & 7.9$\times$ & " in quantized and "$-$0." in quantized and " -" not in quantized
    assert len({row.count(" & ") for row in rows[:6]}) == 1


def test_latex_tables_have_the_columns_of_a_paper_or_all(tmp_path: Path) -> None:
    for spec, seeds in (("fp32", 2), ("int8", 2), ("sign", 1)):
        for seed in range(seeds):
            write_run(tmp_path, spec, seed, epochs=1)
    few = CliRunner().invoke(app, [str(tmp_path), "--latex", "-"]).stdout
    assert "spec & seeds & test accuracy (\\%) & against fp32 & payload ratio & wire ratio \\\\" in few
    assert "% ranks: 4\n" in few and "% seeds" not in few  # specs differ in seeds, so these keep their column
    every = CliRunner().invoke(app, [str(tmp_path), "--latex", "-", "--all-columns"]).stdout
    assert "spec & ranks & seeds & " in every and " & sent by a rank & wall time \\\\" in every


def test_names_lie_neither_on_each_other_nor_on_points() -> None:
    near = [spot(f"spec number {i}", 1e6 * (1 + i / 100), 90 + i / 50) for i in range(9)]
    far = [spot("fp32", 1e9, 95.0), spot("dgc", 1e5, 80.0)]
    names = [row["group"] for row, _ in tradeoff.placed([*far, *near])]
    assert {"fp32", "dgc"} <= set(names) and len(names) < 11


@pytest.mark.parametrize("width", [156, 236, 480])
def test_the_best_spec_has_its_name_or_none_has(tmp_path: Path, width: int) -> None:
    """Seven specs close to each other; the one that the headline names comes last in the table."""
    for seed in range(3):
        for i, spec in enumerate(("fp32", "int8", "bf16", "fp8", "int6", "int5", "int4")):
            value, more = 0.9 + 0.001 * seed - 0.0001 * ((i * seed) % 3), {"sent": 8e6 / (1 + i / 10)}
            write_run(tmp_path, spec, seed, epochs=1, values=[value], more=more)
    (task,) = tasks([load(folder) for folder in tmp_path.iterdir()])
    assert (chosen := best(task)) is not None and chosen.label in headline(task)
    drawn = tradeoff.metric_over_bytes(task, width).chart.to_dict()
    names = [layer for layer in drawn["layer"] if layer["mark"]["type"] == "text"]
    shown = [row["group"] for layer in names for row in drawn["datasets"][layer["data"]["name"]]]
    assert chosen.label in shown if width == 480 else chosen.label in shown or not shown


def spot(name: str, sent: float, value: float, reach: float = 0.0) -> dict[str, Any]:
    return {"group": name, "sent": sent, "value": value, "low": value - reach, "high": value + reach}


@pytest.mark.parametrize("width", [240, 480])
def test_names_do_not_lie_on_bars(width: int) -> None:
    """Four specs whose long bars stand close to each other, and one far away."""
    rows = [spot("powersgd(2)", 7.5e5, 83.5, 4), spot("int4", 8.8e5, 86.8, 4), spot("int8", 1.6e6, 86.8, 4)]
    rows += [spot("fp32", 6.4e6, 86.8, 4), spot("topk(0.01) | sign", 5.7e4, 69.5, 4)]
    across = [math.log(row["sent"]) for row in rows]
    scale = width / (max(across) - min(across))
    bars = [(scale * (x - min(across)), 250 * (90.8 - row["high"]) / 25.3) for x, row in zip(across, rows, strict=True)]
    found = tradeoff.placed(rows, width)
    assert len(found) >= 3
    for row, (align, dx, dy) in found:
        x, length = scale * (math.log(row["sent"]) - min(across)), 6.2 * len(row["group"])
        y = 250 * (90.8 - row["value"]) / 25.3 + dy
        left = x + dx - {"left": 0, "right": length, "center": length / 2}[align]
        bar_height = 250 * 8 / 25.3
        assert not [bar for bar, top in bars if left < bar < left + length and top < y < top + bar_height], row["group"]


EDGE = ("sign", "fp32")


def test_names_do_not_lie_on_the_line() -> None:
    """It rises to the right of a spec that it does not join."""
    rows = [spot("sign", 1e5, 80.0), spot("fp32", 1e6, 90.0), spot("beside", 8e5, 85.0), spot("far", 9e6, 80.0)]
    places = [dict((row["group"], place) for row, place in tradeoff.placed(rows, edge=edge)) for edge in ((), EDGE)]
    assert [place["beside"][0] for place in places] == ["left", "right"]


def test_bars_are_intervals(tmp_path: Path) -> None:
    for seed, value in enumerate((0.90, 0.92, 0.91)):
        write_run(tmp_path, "fp32", seed, epochs=1, values=[value])
    (task,) = tasks([load(folder) for folder in tmp_path.iterdir()])
    row = tradeoff._row(task, task.groups[0])
    assert row["high"] - row["value"] == pytest.approx(4.302653 * 1.0 / 3**0.5, abs=1e-3)


def test_legends_have_no_labels_of_logs(text: str) -> None:
    figure = _embedded(text, "figures")["digits-cnn-bytes-by-rule"]
    shown = {row["rule"] for rows in figure["datasets"].values() for row in rows}
    assert shown == {"all other tensors", "1-D tensors (biases, norms)"}


def test_every_table_says_what_its_ratios_count(runs: Path, text: str, tmp_path: Path) -> None:
    files = ["--markdown", str(tmp_path / "table.md"), "--latex", str(tmp_path / "table.tex")]
    assert CliRunner().invoke(app, [str(runs), *files]).exit_code == 0
    for table in (text, *(path.read_text() for path in (tmp_path / "table.md", tmp_path / "table.tex"))):
        assert "bytes a rank sends and receives in a float32 ring all-reduce" in table


def test_tables_name_what_made_them(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "docs" / "results.md"
    assert CliRunner().invoke(app, [str(runs), "--markdown", str(out)]).exit_code == 0
    told = out.read_text()
    assert "| topk(0.01) \\| sign | 4 | 3 |" in told
    assert "`gradwire train digits --suffix 'dgc(0.001)'`" in told
    links = re.findall(r"\]\((\S+run\.jsonl)\)", told)
    assert len(links) == 17 and all((out.parent / link).is_file() for link in links)


def test_a_place_that_cannot_be_written_is_named(runs: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("no folder")
    done = CliRunner().invoke(app, [str(runs), "--png", str(taken)])
    assert done.exit_code == 2 and f"{taken}: File exists" in done.stderr


def test_what_cannot_be_reported_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert done.exit_code == 2 and "no run in" in done.output
    write_run(tmp_path, epochs=0, ended=False)
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert done.exit_code == 2 and "nothing to report" in done.output


def test_folders_without_a_run_are_named_and_passed_over(tmp_path: Path) -> None:
    run, refused = write_run(tmp_path), tmp_path / "refused"
    refused.mkdir()
    (refused / "recipe.toml").touch()
    results = tmp_path / "digits-results.md"
    results.touch()
    done = CliRunner().invoke(app, [str(refused), str(run), str(results), "--markdown", "-"])
    assert done.exit_code == 0 and "|" in done.stdout
    assert done.stderr == f"gradwire report: there is no run in {refused}; passed over\n"
    done = CliRunner().invoke(app, [str(refused), "--markdown", "-"])
    assert done.exit_code == 2 and f"no run in {refused}" in done.stderr


def test_an_unfinished_run_is_marked(tmp_path: Path) -> None:
    write_run(tmp_path, ended=False)
    done = CliRunner().invoke(app, [str(tmp_path), "--markdown", "-"])
    assert "fp32 (unfinished)" in done.output


def test_the_room_needs_no_torch() -> None:
    """The package's front door imports torch; the room itself does not."""
    code = (
        "import sys, types, pathlib; import importlib.util as u; "
        "where = u.find_spec('gradwire').submodule_search_locations; "
        "door = types.ModuleType('gradwire'); door.__path__ = list(where); sys.modules['gradwire'] = door; "
        "from gradwire_lab.report import page, table; import gradwire_lab.train.compare; "
        "print([name for name in ('torch', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _embedded(text: str, name: str) -> dict[str, object]:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, flags=re.DOTALL)
    assert found
    told: dict[str, object] = json.loads(found[1])
    return told
