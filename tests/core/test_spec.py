"""The spec grammar: what is read, what is refused, and what the error names."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.indices import Gap16
from gradwire.codecs.quantizers import FP16, Sign
from gradwire.codecs.selectors import TopK
from gradwire.core.spec import parse
from gradwire.engine import Method, method
from gradwire.exchanges import Delayed, TwoWay
from gradwire.feedback import MomentumCorrection, NoFeedback, Residual
from strategies import CODECS, EXCHANGES, FEEDBACKS, STAGES


def refusal(spec: object, **beside: str) -> str:
    with pytest.raises(ValueError) as refused:
        method(spec, **beside) if beside or not isinstance(spec, str) else parse(spec)
    return str(refused.value)


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*STAGES, *FEEDBACKS, *EXCHANGES])
def test_a_part_is_read_as_it_is_written(spec: str) -> None:
    assert parse(str(parse(spec))) == parse(spec)
    assert parse(f"  {spec} ") == parse(spec)


@pytest.mark.parametrize("spec", CODECS)
def test_a_chain_is_read_as_it_is_written(spec: str) -> None:
    chain = CODECS[spec]
    assert parse(spec) in (chain, *chain.stages())
    assert codec(spec) == chain and str(codec(spec)) == spec


@given(st.floats(1e-6, 1.0), st.sampled_from(["sign", "fp16", "qsgd(levels=3)"]), st.sampled_from(["gap16", "int32"]))
def test_any_ratio_survives(ratio: float, quantizer: str, coder: str) -> None:
    chain = codec(f"topk({ratio!r}) | {quantizer} | {coder}")
    assert codec(str(chain)) == chain


def test_text_and_python_give_the_same() -> None:
    assert parse("topk(0.01) | sign") == TopK(0.01) | Sign()
    assert parse("topk(ratio=0.01) | fp16 | gap16") == TopK(0.01) | FP16() | Gap16()
    assert parse("delayed(two_way)") == parse("delayed(inner=two_way)") == Delayed(TwoWay())
    assert codec("sign") == codec(Sign()) == codec(codec("sign"))


def test_defaults_are_left_out_but_never_everything() -> None:
    assert str(codec("topk(0.01) | fp32 | rice")) == "topk(0.01)"
    assert str(codec("fp32")) == "fp32"
    assert str(parse("qsgd(levels=127)")) == "qsgd"
    assert str(parse("momentum_correction(0.9, clip=None)")) == "momentum_correction"
    assert str(parse("delayed(auto)")) == "delayed"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typo", "meant"), [("topq(0.1)", "topk"), ("signn", "sign"), ("residul", "residual"), ("all_gather", "allgather")]
)
def test_an_unknown_name_brings_the_nearest(typo: str, meant: str) -> None:
    assert meant in refusal(typo)


def test_an_unknown_name_like_no_other_names_the_command() -> None:
    assert "gradwire codecs" in refusal("xyzzy")


@pytest.mark.parametrize(
    "text", ["", "   ", "topk(0.1", "topk(0.1) |", "| sign", "topk 0.1", "a = 1", "\0", "sign;sign"]
)
def test_bad_syntax_is_refused_with_an_example(text: str) -> None:
    assert "topk(0.01) | sign" in refusal(text)


@pytest.mark.parametrize("text", ["1", "'sign'", "None", "(0.1, 0.2)", "[]", "{}"])
def test_a_literal_is_no_spec(text: str) -> None:
    assert text in refusal(text)


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os')",
        "__import__('os').system('true')",
        "topk(__import__('os').getpid())",
        "topk(0.1).__class__",
        "().__class__.__base__.__subclasses__()",
        "topk(*[0.1])",
        "topk(**{'ratio': 0.1})",
        "(lambda: 0.1)()",
        "[sign for _ in (1,)]",
        "topk(0.1 if True else 0.2)",
        "topk(open('/etc/passwd'))",
        "eval('1')",
        "topk(f'{1}')",
        "topk(ratio := 0.1)",
        "sign + sign",
        "topk(0.1)(0.2)",
        "topk[0]",
        "1 | 2",
        "'a' | 'b'",
        "sign | 3",
        "3 | sign",
        "-sign",
        "await sign",
    ],
)
def test_a_spec_runs_no_code(attack: str) -> None:
    refusal(attack)


def test_very_long_specs_are_refused() -> None:
    for length in (100, 900, 3000, 20_000):
        refusal("sign" + " | sign" * length)
    for text in ("delayed(" * 500 + "auto" + ")" * 500, "-" * 50_000 + "1", "(" * 5000):
        refusal(text)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("topk", "ratio"),
        ("topk(0.1, 0.2)", "topk"),
        ("topk(share=0.1)", "ratio"),
        ("sign(scale='huge')", "huge"),
        ("topk('a')", "'a'"),
        ("terngrad(clip='a')", "'a'"),
        ("residual(decay=None)", "None"),
        ("residual(decay=1.5)", "1.5"),
        ("momentum_correction('a')", "'a'"),
        ("momentum_correction(1.0)", "[0, 1)"),
        ("powersgd(0)", "0"),
        ("powersgd('two')", "'two'"),
        ("powersgd(2.5)", "2.5"),
        ("delayed(powersgd)", "powersgd"),
        ("delayed(delayed)", "delayed"),
        ("delayed(sign)", "sign"),
        ("hadamard(block=3)", "power of two"),
        ("hadamard(block=True)", "True"),
        ("int8(block=True)", "True"),
        ("qsgd(levels=True)", "True"),
        ("dgc(values=3)", "3"),
        ("dgc(ramp='long')", "long"),
        ("ramp(sign, 10)", "ratio"),
        ("ramp(topk(0.001), 0)", "0"),
        ("ramp(3, 10)", "3"),
    ],
)
def test_a_wrong_argument_is_named(spec: str, word: str) -> None:
    assert word in refusal(spec)


@pytest.mark.parametrize("name", ["topk", "randomk", "sampled_topk"])
@pytest.mark.parametrize("ratio", ["0", "0.0", "-0.1", "1.0001", "True", "1e999", "'0.1'", "None"])
def test_a_ratio_lies_above_zero_and_not_above_one(name: str, ratio: str) -> None:
    assert "(0, 1]" in refusal(f"{name}({ratio})")


@pytest.mark.parametrize("spec", ["TopK(0.1)", "EF_SignSGD", "ef-signsgd", "EF-SignSGD", "sign | Gap16"])
def test_other_spellings_bring_the_right_one(spec: str) -> None:
    assert re.search("topk|ef_signsgd|gap16", refusal(spec))


def test_a_missing_argument_of_a_preset_is_named() -> None:
    assert "ramp(spec, steps)" in refusal("ramp(topk(0.1))")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sign | topk(0.1)", ("selector", "quantizer")),
        ("topk(0.1) | hadamard", ("transform", "selector")),
        ("sign | sign", ("quantizer",)),
        ("topk(0.1) | topk(0.1)", ("selector",)),
        ("rice | sign", ("quantizer", "index coder")),
        ("sign | rice", ("rice",)),
        ("randomk(0.1) | int32", ("randomk", "int32")),
        ("hadamard | variance", ("variance",)),
        ("topk(0.1) | residual", ("residual", "chain")),
        ("residual | topk(0.1)", ("residual", "chain")),
        ("allgather | allreduce", ("allgather", "chain")),
        ("topk(0.1) | dgc", ("dgc", "chain")),
        ("dgc | fp16", ("dgc", "chain", "feedback")),
    ],
)
def test_a_chain_out_of_order_is_refused(spec: str, words: tuple[str, ...]) -> None:
    text = refusal(spec)
    assert all(word in text for word in words), text


# -- methods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["topk(0.1)", "sign", "qsgd", "randomk(0.1, shared=False)", "hadamard | int8"])
def test_allreduce_takes_linear_codecs_only(spec: str) -> None:
    text = refusal(spec, exchange="allreduce")
    assert spec in text and "allreduce" in text


def test_exchanges_refuse_what_they_cannot_carry() -> None:
    assert "topk(0.1)" in refusal("topk(0.1)", exchange="two_way")
    assert "topk(0.1)" in refusal("topk(0.1)", exchange="delayed(inner=two_way)")
    assert "sign" in refusal("qsgd", exchange="majority")
    assert "residual" in refusal("threshold(0.001, most=0.1)", feedback="none")
    assert "topk(0.1)" in refusal("topk(0.1)", exchange="powersgd(2)")
    assert "sign" in refusal({0: "fp32", 9: "sign"}, exchange="powersgd(2)")
    assert str(method("fp32", "residual", "powersgd(4)")) == str(method("powersgd(4)"))


def test_parts_in_the_wrong_place_are_refused() -> None:
    assert "'allgather'" in refusal("sign", feedback="allgather")
    assert "'residual'" in refusal("sign", exchange="residual")
    assert "residual" in refusal("residual", feedback="residual")
    assert "allgather" in refusal("allgather", exchange="auto")
    assert "gradwire.gossip" in refusal("choco(ring)", feedback="residual")


@pytest.mark.parametrize("table", [{}, {5: "sign"}, {0: "sign", -1: "sign"}, {3: "sign", 0: "fp32"}])
def test_a_step_table_rises_from_zero(table: dict[int, str]) -> None:
    assert "step 0" in refusal(table)


@pytest.mark.parametrize("key", ["a", "-1", 1.5, None, (0,)])
def test_a_step_is_a_whole_number(key: object) -> None:
    assert repr(key) in refusal({0: "fp32", key: "sign"})


def test_a_step_table_may_be_read_from_a_file_or_written_as_text() -> None:
    whole = method({0: "topk(0.25)", 500: "topk(0.063) | sign"})
    assert method({"0": "topk(0.25)", "500": "topk(0.063) | sign"}) == whole
    assert method("{0: topk(0.25), 500: topk(0.063) | sign}") == whole
    assert method("{0: 'topk(0.25)', 500: 'topk(0.063) | sign'}") == whole
    assert "'x'" in refusal("{'x': sign}", exchange="auto")
    assert "codec" in refusal("{0: 3}", exchange="auto")
    assert "codec" in refusal("{0: dgc(0.25), 500: dgc(0.001)}", exchange="auto")
    for text in ("{sign: topk(0.1)}", "{0: sign, **{}}", "{0: __import__('os')}", "{[]: sign}", "{0: sign}[0]"):
        refusal(text)


def test_a_step_table_changes_the_codec_only() -> None:
    whole = method({0: "fp32", 100: "topk(0.01) | sign"})
    assert [step for step, _ in whole.table] == [0, 100]
    assert whole.feedback == Residual()  # the one that the last codec needs serves from the start
    assert str(whole) == "{0: fp32, 100: topk(0.01) | sign}, feedback=residual, exchange=auto"
    assert "sign" in refusal({0: "fp32", 100: "sign"}, exchange="allreduce")


def test_presets_expand_and_print() -> None:
    printed = {
        "dgc": "topk(0.001), feedback=momentum_correction, exchange=auto",
        "dgc(ratio=0.01, values=fp16, indices=gap16, masking=False)": (
            "topk(0.01) | fp16 | gap16, feedback=momentum_correction(masking=False), exchange=auto"
        ),
        "ef_signsgd": "sign, feedback=residual, exchange=auto",
        "majority_vote": "sign, feedback=none, exchange=majority",
        "dense": "fp32, feedback=none, exchange=auto",
        "powersgd(4)": "feedback=residual, exchange=powersgd(rank=4)",
        "terngrad": "terngrad, feedback=none, exchange=auto",
        "qsgd": "qsgd, feedback=none, exchange=auto",
    }
    assert {spec: str(method(spec)) for spec in printed} == printed
    assert all(isinstance(made, Method) for name, made in _presets().items() if name != "ramp")


def _presets() -> dict[str, object]:
    return {name: made() for name, made in gradwire.registered("preset").items() if name != "ramp"}


@pytest.mark.parametrize(
    ("spec", "feedback"),
    [
        ("fp16", NoFeedback()),
        ("qsgd", NoFeedback()),
        ("natural", NoFeedback()),
        ("randomk(0.1, unbiased=True)", NoFeedback()),
        ("sign", Residual()),
        ("int8", Residual()),
        ("topk(0.1)", Residual()),
        ("topk(0.1) | qsgd", Residual()),
        ("dgc", MomentumCorrection()),
    ],
)
def test_biased_codecs_get_error_feedback(spec: str, feedback: object) -> None:
    assert method(spec).feedback == feedback


def test_options_beside_a_spec_win() -> None:
    whole = method("dgc", feedback="residual", exchange="allgather")
    assert str(whole) == "topk(0.001), feedback=residual, exchange=allgather"


@pytest.mark.parametrize("spec", ["ramp(topk(0.001), steps=500)", "ramp(dgc, 500)", "dgc(ramp=500)"])
def test_a_ramp_takes_the_densities_of_the_paper(spec: str) -> None:
    table = method(spec).table
    densities = [chain.selector.ratio for _, chain in table]
    assert densities == [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    assert [step for step, _ in table] == [0, 125, 250, 375, 500]


def test_a_ramp_keeps_the_rest_of_the_chain() -> None:
    table = method("ramp(topk(0.01) | sign | int32, 3)").table
    assert all(isinstance(chain, Codec) and str(chain).endswith("| sign | int32") for _, chain in table)
    assert [step for step, _ in table] == [0, 1, 2, 3]


class Cycle:
    """Garbage whose collection, amid whatever runs, lets another thread run."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(1e-3)


def test_threads_parse_at_the_same_time() -> None:
    """Python raised "SystemError: AST constructor recursion depth mismatch"."""
    text = "{" + ", ".join(f"{step}: topk(0.{step + 1})" for step in range(200)) + "}"

    def parse_often() -> object:
        for _ in range(60):
            Cycle()
            value = parse(text)
        return value

    with ThreadPoolExecutor(8) as threads:
        values = [done.result() for done in [threads.submit(parse_often) for _ in range(8)]]
    assert values == [parse(text)] * 8
