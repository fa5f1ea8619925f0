"""A few tests of each Triton kernel under Triton's interpreter, where there is no GPU; `make interpret` runs all.

Kernels are interpreted only where the environment says so before they are imported, hence in a process of their own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CHOSEN = {
    "test_cuda_conditional.py": [""],
    "test_cuda_rice.py": [
        "test_codes[random-513-100000]",
        "test_codes[clustered-1030-8589934592]",
        "test_several_messages_at_once[random-1024-2000]",
        "test_damaged_messages_are_told_and_stay_inside",
        "test_damaged_messages_by_groups",
    ],
    "test_cuda_segment_stats.py": [
        "test_sums_of_long_segments[mixed-sides]",
        "test_sums_of_long_segments[mixed-peak]",
        "test_steps_and_turns_of_long_segments",
    ],
    "test_cuda_momentum.py": [
        "test_next_momentum[5000-torch.bfloat16-True-True]",
        "test_signs_of_momentum[blocks-True-False-True]",
        "test_signs_of_momentum[long-False-True-False]",
        "test_a_gradient_of_sixteen_bits_that_begins_anywhere",
        "test_a_servers_turn[blocks-3-True]",
        "test_selections_of_momentum[several-True-2]",
        "test_selections_of_momentum_of_a_gradient_in_pieces[aligned]",
        "test_signs_of_momentum_of_a_gradient_in_pieces[odd]",
        "test_a_product_is_written_to_pieces[aligned]",
        "test_entries_times_a_factor[0.004-3-odd]",
    ],
    "test_cuda_apply_momentum.py": [""],
    "test_cuda_codecs.py": ["test_messages[topk(0.05) | gap16]", "test_messages[int4]", "test_steps[sign-two_way]"],
    "test_cuda_kernels.py": [
        "test_topk[ties-(1000,)]",
        "test_topk[normal-(5000, 0, 3001)]",
        "test_one_pass_selection[torch.bfloat16-(5000, 0, 3001)-nesterov]",
        "test_memories_that_take_turns[True-momentum]",
        "test_accumulation[True-nesterov]",
        "test_selection_of_odd_magnitudes[zeros]",
        "test_any_range_gives_the_same[ties-1e-30]",
        "test_any_range_gives_the_same[near-3.0]",
        "test_any_range_of_half_gives_the_same[normal-(0.5, 0.9)]",
        "test_very_many_of_the_largest_numbers_among_zeros",
        "test_many_equals_in_several_chunks",
        "test_most_chunks_of_equals_have_no_winner[(70000, 140001)]",
        "test_streams_share_a_plan_and_no_scratch",
        "test_draws[(5000, 0, 3001)]",
        "test_draws_in_their_order[(5000, 0, 3001)]",
        "test_coders[(8, 0, 9)]",
        "test_signs_of_short_blocks[torch.float32-many]",
        "test_zeros_for_what_is_not_finite[nan-5003-torch.bfloat16]",
        "test_messages_that_lie_anywhere[(16, 4096, 20, 5003)]",
        "test_casts",
        "test_natural[(5000, 0, 3001)]",
        "test_feedback[torch.bfloat16-(1000,)]",
        "test_feedback[torch.float32-(5000, 0, 3001)]",
        "test_feedback_from_one_place_to_another[torch.bfloat16-(1, 3, 2)]",
        "test_feedback_of_values_as_they_are[5003-momentum-False]",
        "test_feedback_of_values_as_they_are[1000-decay-True]",
        "test_chunks_of_all_kinds[4-4096-ties]",
        "test_chunks_of_all_kinds[41-4096-zeros]",
        "test_scatter_mean[3]",
        "test_scatter_mean_where_many_meet[4]",
        "test_scatter_mean_into_what_is_there[3]",
        "test_no_damaged_message_writes_elsewhere",
        "test_a_servers_turn[True-3-(1000,)]",
        "test_a_sample_that_misleads[0.5-far]",
        "test_gradients_that_repeat_and_jump[0.005-momentum]",
    ],
}


pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which all of them run"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="all of them are being interpreted"),
    pytest.mark.timeout(600),  # the first takes forty seconds of a core, at low priority
]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the chosen tests, and records what they launch."""
    file = tmp_path_factory.mktemp("launches") / "launches.pickle"
    chosen = [f"{HERE / file}::{name}".removesuffix("::") for file, names in CHOSEN.items() for name in names]
    said = run("-m", "pytest", "-q", *chosen, TRITON_INTERPRET="1", GRADWIRE_LAUNCHES=str(file))
    assert "skipped" not in said.rstrip().rpartition("\n")[2], said
    return file


def run(*arguments: str, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_triton_kernels(launches: Path) -> None:
    assert launches.exists()


def test_triton_kernels_compile(launches: Path) -> None:
    """For a Hopper GPU that need not be there: the interpreter takes what the compiler refuses."""
    said = run(str(HERE.parent / "triton_launches.py"), str(launches))
    assert int(said.split()[0]) > 40
