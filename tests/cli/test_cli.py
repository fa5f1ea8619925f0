from pathlib import Path

import pytest
from typer.testing import CliRunner

import gradwire
from gradwire_lab.cli.docstring_cards import HEADINGS, cards
from gradwire_lab.cli.main import app
from spawn import run_ranks

ROOT = Path(__file__).parent.parent.parent
WIDE = {"COLUMNS": "200"}


def run(*words: str):
    return CliRunner().invoke(app, list(words), env=WIDE)


def registered() -> list[str]:
    return [name for kind in HEADINGS for name in gradwire.registered(kind)]


def test_the_version():
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"gradwire {gradwire.__version__}\n")


def test_help_has_the_first_paragraph_of_every_command():
    shown = " ".join(run("-h").stdout.replace("│", " ").split())
    assert "train Train a recipe." in shown and "bench Measure" in shown
    assert "step Time a training step without a network" in " ".join(run("bench", "-h").stdout.split())


def test_a_name_alone_prints_its_card():
    done = CliRunner().invoke(app, ["codecs", "topk"], env={"COLUMNS": "80"})
    assert done.exit_code == 0 and "arxiv.org" in done.stdout and "topk(0.01)" in done.stdout
    assert "ef21" not in done.stdout
    refused = run("codecs", "tokp")
    assert refused.exit_code == 2 and "topk" in refused.stderr


def test_a_preset_prints_its_arguments_and_where_its_formulas_are():
    shown = " ".join(run("codecs", "onebit_adam").stdout.split())
    assert (
        "arguments start=None, beta=0.9, per=4096" in shown
        and "steps=None" in shown
        and "The variance is frozen after the start" in shown
    )
    assert "gradwire codecs common_momentum and gradwire codecs two_way" in shown
    assert "formulas" not in run("codecs", "dense").stdout


def test_codecs_lists_every_name():
    done = run("codecs")
    assert done.exit_code == 0
    for name in registered():
        assert name in done.stdout


def codecs_in(*words: str) -> list[str]:
    return CliRunner().invoke(app, ["codecs", *words], env={"COLUMNS": "80"}).stdout.splitlines()


def listing(rank: int, world: int) -> list[str]:
    return codecs_in()


def test_a_name_takes_one_line_of_a_narrow_terminal():
    # In a process of its own: other tests may have registered names here.
    (lines,) = run_ranks(listing, 1)
    names = [line for line in lines if line.startswith("  ")]
    found = [card.name for kind in HEADINGS for card in cards(kind) if card.module.startswith("gradwire.")]
    assert [line.split()[0] for line in names if line.strip()] == found
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    assert "topk The largest entries of each segment Aji 2017" in {" ".join(line.split()) for line in names}


def test_papers_are_found_by_name():
    sources = {card.name: card.source for kind in HEADINGS for card in cards(kind)}
    assert sources["threshold"] == "Strom 2015" and sources["adaptive_threshold"] == "Dutta 2020"
    assert sources["local_sgd"] == "Stich 2019" and sources["post_local_sgd"] == "Lin 2020"
    assert sources["noop"] == "" and sources["zero_one_adam"] == "Lu 2023"


def test_the_card_of_a_preset_says_what_it_stands_for():
    assert "exchange=powersgd" in "".join(codecs_in("powersgd"))
    assert "feedback=momentum_correction" in "".join(codecs_in("dgc"))


@pytest.mark.parametrize("kind", HEADINGS)
def test_every_card_has_a_title_and_a_spec_that_can_be_read(kind):
    for card in cards(kind):
        assert card.title, card.name
        assert card.examples, card.name
        for spec in card.examples:
            assert gradwire.parse(spec) is not None


def page(rank: int, world: int) -> str:
    return run("codecs", "--markdown").stdout


def test_the_page_is_up_to_date():
    # In a process of its own: other tests may have registered names here.
    assert run_ranks(page, 1) == [(ROOT / "docs" / "codecs.md").read_text()], "run `make docs`"


def test_show_spells_a_codec_out():
    done = run("show", "topk(0.01) | sign")
    assert done.exit_code == 0
    assert "topk(0.01) | sign | rice" in done.stdout
    assert "residual" in done.stdout
    assert "allgather" in done.stdout
    size = gradwire.codec("topk(0.01) | sign").size(gradwire.core.segments.Segments.single(1_000_000))
    assert f"{size:,} bytes" in done.stdout


@pytest.mark.parametrize(("workers", "both"), [(4, "6.0x"), (16, "7.1x")])
def test_show_counts_the_second_leg(workers: int, both: str):
    done = run("show", "int4", "--exchange", "two_way", "--workers", str(workers))
    words = " ".join(done.stdout.split())
    assert "531,252 bytes for a million parameters, 7.5x smaller than float32" in words
    assert f"and 1/{workers} of it for the second leg of two_way, {both} smaller with both" in words
    assert "second leg" not in run("show", "int4", "--exchange", "allgather").stdout


@pytest.mark.parametrize(("workers", "size"), [(1, 16), (2, 14), (4, 13)])
def test_show_counts_the_memory_of_one_rank(workers: int, size: int):
    """A server keeps the errors of its slice alone."""
    words = " ".join(run("show", "onebit_adam", "--workers", str(workers)).stdout.split())
    assert f"all memory together is {size} bytes per parameter" in words


def test_show_expands_a_preset_by_step():
    done = run("show", "dgc(0.001, ramp=400)")
    assert done.exit_code == 0
    assert "momentum_correction" in done.stdout
    for step, ratio in ((0, 0.25), (100, 0.0625), (400, 0.001)):
        assert f"{step}: topk({ratio})" in done.stdout
        assert f"topk({ratio}) | fp32 | rice" in done.stdout


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("topk(0.01) | sign", "SGD; it starves AdamW"),
        ("powersgd(2)", "SGD; it starves AdamW"),
        ("zero_one_adam", "gradwire.AdamW"),
        ("dgc(0.001)", "gradwire.SGD, or SGD without momentum"),
        ("int4", None),
    ],
)
def test_show_names_the_optimizer(spec: str, words: str | None):
    text = " ".join(run("show", spec).stdout.split())
    assert "optimizer" not in text if words is None else f"optimizer {words}" in text


def test_show_counts_low_rank_factors():
    done = run("show", "powersgd(2)", "--workers", "8")
    assert "16,000 bytes for a million parameters, 250.0x" in done.stdout  # 2 * (1000 + 1000) float32


def test_show_takes_local_steps():
    done = run("show", "diloco(H=5)", "--exchange", "allreduce")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "diloco(H=5) = H=5, fp32" in text and "5 local steps, then one message" in text
    assert "4,000,000 bytes for a million parameters, 5.0x smaller than float32 in each step" in text
    assert "6,000,000 bytes by each of 4 ranks in a round, 5.0x less" in text


@pytest.mark.parametrize(
    ("spec", "memory"),
    [
        ("diloco(H=5)", "8 bytes per parameter: outer weights with momentum 8, on the host with"),
        ("sparseloco(H=1)", "8 bytes per parameter: outer weights 4, on the host with outer_device='cpu', errors 4;"),
        ("sparseloco(H=1, keep=1.0)", "12 bytes per parameter: outer weights 4,"),
        ("streaming_diloco", "13 bytes per parameter: outer weights with momentum 8,"),  # and a server's errors
    ],
)
def test_show_counts_all_that_a_worker_with_local_steps_holds(spec: str, memory: str):
    assert f"all memory together is {memory}" in " ".join(run("show", spec).stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("H=30, fragments=1", "30 local steps, then one message:"),
        ("H=30", "30 local steps, and 3 fragments, which are sent in turn, 10 steps apart;"),
        (
            "H=10, fragments=('a.*', 'b.*', '*')",
            "10 local steps, and 3 fragments, which are sent in turn, 3 to 4 steps",
        ),
        ("H=4, stagger=False", "4 local steps, then a message for each of 3 fragments;"),
    ],
)
def test_show_says_when_fragments_are_sent(arguments: str, words: str):
    assert f"round {words}" in " ".join(run("show", f"streaming_diloco({arguments})").stdout.split())


def test_show_takes_a_schedule_of_rounds():
    done = run("show", "local_schedule({0: diloco(H=2), 30: diloco(H=5)})")
    text = " ".join(done.stdout.split())
    assert "from step 0 round 2 local steps" in text and "from step 30 round 5 local steps" in text
    assert "2.0x smaller than float32 in each step" in text and "5.0x smaller than float32 in each step" in text


def test_show_takes_feedback_and_exchange():
    done = run("show", "sign", "--feedback", "ef21", "--exchange", "two_way")
    assert done.exit_code == 0
    assert "ef21" in done.stdout
    assert "two_way" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tokp(0.01)"], "there is nothing called 'tokp'; did you mean topk?"),
        (["nosuch"], "see `gradwire codecs`. A name of your own: "),
        (["sparseloco(h=5)"], "got an unexpected keyword argument 'h'; did you mean H?"),
        (["int5"], "import the module that registers it, or --import FILE.py"),
        (["sign | topk(0.01)"], "a selector cannot follow the quantizer"),
        (["topk(3)"], "must be in (0, 1]"),
        (["dense("], "it opens and closes different numbers of parentheses"),
        (["topk(0,01)"], "decimals have a point, not a comma"),
        (["topk(1%)"], "0.01 for one percent"),
        (["topk(0.01) + sign"], "stages are joined by |"),
        (["int4; exchange=two_way"], "exchange stands beside a spec, as the argument exchange= or as --set"),
        (["fp32, sign"], "specs of a list are separated by semicolons"),
        (["residual"], "not a way to compress"),
        (["topk(0.01)", "--exchange", "allreduce"], "allreduce adds payloads"),
    ],
)
@pytest.mark.parametrize("command", ["show", "demo"])
def test_a_bad_spec_gets_a_sentence(command, words, sentence):
    done = run(command, *words)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_the_demo_compares_with_dense():
    done = run("demo", "topk(0.05) | sign", "fp16", "--workers", "2", "--epochs", "1")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    progress = [line for line in lines if "epoch  1/1" in line]
    assert ["left" in line for line in progress] == [True, True, False]
    rows = {spec: line for spec in ("dense", "topk(0.05) | sign", "fp16") for line in lines if f" {spec} " in line}
    assert len(rows) == 3
    assert "1.0" in rows["dense"]
    assert "MB" in rows["fp16"]
