"""The rows of `gradwire bench kernels --json` as tables of Markdown: `kernels-table.py kernels-h200.jsonl`."""

import json
import sys
from pathlib import Path
from typing import Any

NAMES = {
    "dgc": "DGC: accumulate, select, settle",
    "error_feedback_topk": "error feedback + top-k",
    "topk": "exact top-k",
    "torch_topk": "`torch.topk`, for comparison",
    "feedback_sign": "error feedback + sign",
    "feedback_int4": "error feedback + int4",
    "qsgd": "QSGD 8 bit, buckets of 512",
    "qsgd_whole": "QSGD 8 bit, whole segments",
    "terngrad": "TernGrad",
    "onebit": "1-bit, two scales",
    "draw": "random-k: draw positions",
    "scatter_mean_8": "mean of 8 sparse messages",
    "rice_encode": "Rice, encode positions",
    "rice_decode": "Rice, decode positions",
    "merge_int4_8": "a server's turn, 8 messages of int4",
    "merge_sign_8": "a server's turn, 8 messages of sign",
}
TINY = ("draw", "rice_encode", "rice_decode")  # their floor is a launch


def name(kernel: str) -> str:
    if kernel in NAMES:
        return NAMES[kernel]
    coder, _, turn = kernel.rpartition("_")
    return f"{NAMES.get(coder, coder)}, {turn}"


def line(row: dict[str, Any]) -> str:
    floor = ("", "") if row["kernel"] in TINY else (f"{row['floor_ms']:.3f}", f"{row['to_floor']:.2f}")
    replayed = f"{row['graph_ms']:.3f}" if row["graph_ms"] else ""
    plain = f"{row['to_reference']:.1f}" if row["kernel"] != "torch_topk" else ""
    return f"| {name(row['kernel'])} | {row['ms']:.3f} | {replayed} | {floor[0]} | {floor[1]} | {plain} |"


def main() -> None:
    rows = [json.loads(text) for text in Path(sys.argv[1]).read_text().splitlines()]
    for size in dict.fromkeys((row["n"], row["segments"]) for row in rows):
        print(f"\n{size[0] / 1e6:.1f} M elements, segments: {size[1]}\n")
        print("| kernel | ms | graph ms | floor ms | x floor | times faster than plain torch |")
        print("|---|--:|--:|--:|--:|--:|")
        print("\n".join(line(row) for row in rows if (row["n"], row["segments"]) == size))


if __name__ == "__main__":
    main()
