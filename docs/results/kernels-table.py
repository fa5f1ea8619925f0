"""The rows of `gradwire bench kernels --json` as tables of Markdown: `kernels-table.py kernels-h200.jsonl`."""

import json
import sys
from pathlib import Path
from typing import Any

from gradwire_lab.bench.kernels import COMPOSED

NAMES = {
    "torch_dgc": "DGC in plain torch, threshold sampled",
    "dgc": "DGC, in place",
    "dgc_turns": "DGC, as a lane",
    "dgc_bf16": "DGC of a bf16 gradient, in place",
    "error_feedback_topk": "error feedback + top-k, in place",
    "error_feedback_topk_turns": "error feedback + top-k, as a lane",
    "error_feedback_half": "error feedback + half of all, in place",
    "error_feedback_zeros": "error feedback + top-k of mostly zeros, in place",
    "torch_topk": "top-k in plain torch",
    "topk": "exact top-k",
    "topk_half": "exact top-k, half of all",
    "topk_zeros": "exact top-k of mostly zeros",
    "topk_ties": "exact top-k of equal magnitudes",
    "chunk_topk": "4 of every 4096",
    "torch_sign": "sign in plain torch, encode",
    "torch_qsgd": "QSGD in plain torch, buckets of 512, encode",
    "torch_int4": "int4 in plain torch, encode",
    "qsgd": "QSGD 8 bit, buckets of 512",
    "qsgd_whole": "QSGD 8 bit, whole segments",
    "terngrad": "TernGrad",
    "onebit": "1-bit, two scales",
    "draw": "random-k: draw positions",
    "scatter_mean_8": "mean of 8 sparse messages",
    "scatter_mean_there_8": "mean of 8 sparse messages, into gradients",
    "rice_encode": "Rice, encode positions",
    "rice_decode": "Rice, decode positions",
    "rows_encode": "rows, encode positions",
    "rows_decode": "rows, decode positions",
    "bitmap_encode": "bitmap, encode positions",
    "bitmap_decode": "bitmap, decode positions",
    "powersgd": "PowerSGD of rank 4, all of a step",
    "powersgd_orthonormal": "PowerSGD of rank 4, orthonormal columns",
}
# Their floor is a launch.
TINY = ("draw", "rice_encode", "rice_decode", "rows_encode", "rows_decode", "powersgd_orthonormal")


def name(kernel: str) -> str:
    if kernel in NAMES:
        return NAMES[kernel]
    first, _, rest = kernel.partition("_")
    if first == "feedback":
        coder, _, lane = rest.partition("_")
        return f"error feedback + {coder}, {'as a lane' if lane else 'in place'}"
    if first == "merge":
        return f"a server's turn, 8 messages of {rest.partition('_')[0]}"
    coder, _, turn = kernel.rpartition("_")
    return f"{NAMES.get(coder, coder)}, {turn}"


def ratio(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:.{digits}f}"


def line(row: dict[str, Any], replayed: bool, took: dict[str, float]) -> str:
    tiny, composed = row["kernel"] in TINY, row["reference_ms"] == row["ms"]
    suffix = " (composed)" if composed and "torch" not in row["kernel"] else ""
    cells = [name(row["kernel"]) + suffix, f"{row['ms']:.3f}"]
    cells += [ratio(row["graph_ms"], 3)] if replayed else []
    cells += [f"{row['bytes_per_element']:.4g}", ratio(None if tiny else row["floor_ms"], 3)]
    cells += [ratio(None if tiny else row["to_floor"], 2), ratio(None if composed else row["to_reference"], 1)]
    composed_ms = took.get(COMPOSED.get(row["kernel"], ""))
    return f"| {' | '.join([*cells, ratio(composed_ms and composed_ms / row['ms'], 1)])} |"


def main() -> None:
    rows = [json.loads(text) for text in Path(sys.argv[1]).read_text().splitlines()]
    replayed = any(row["graph_ms"] for row in rows)
    columns = ["ms", *(["graph ms"] if replayed else []), "bytes", "floor ms", "x floor"]
    columns += ["times faster than the definition", "than plain torch"]
    for size in dict.fromkeys((row["n"], row["segments"]) for row in rows):
        print(f"\n{size[0] / 1e6:.1f} M elements, segments: {size[1]}\n")
        print(f"| kernel | {' | '.join(columns)} |")
        print(f"|---|{'--:|' * len(columns)}")
        mine = [row for row in rows if (row["n"], row["segments"]) == size]
        took = {row["kernel"]: row["ms"] for row in mine}
        print("\n".join(line(row, replayed, took) for row in mine))


if __name__ == "__main__":
    main()
