"""Rows: a codec knows the rows of its table, whole, merged or cut, and they are the same on all ranks."""

import pytest
import torch

from gradwire.codecs.codec import codec
from gradwire.codecs.indices import Rows
from gradwire.codecs.stage import EncodeInput
from gradwire.core.keys import Key
from gradwire.core.segments import Segments

TABLE = Segments(
    ("conv", "bias", "embedding", "scalar", "empty", "narrow"),
    ((64, 32, 3, 3), (300,), (500, 70), (), (0, 5), (900, 1)),
)
KEY = Key(seed=0, step=0, rank=0)


def test_tables_know_their_rows() -> None:
    rows = ((64, 288), (1, 300), (500, 70), (1, 1), (0, 5), (900, 1))
    assert TABLE.rows == TABLE.merged().rows == TABLE.merged().merged().rows == rows
    assert TABLE.window(10, 20_000).rows == ((1, 64 * 288 - 10), (1, 300), (1, 20_000 - 64 * 288 - 300))


@pytest.mark.parametrize("table", [TABLE, TABLE.merged(), TABLE.window(10, 20_000)], ids=["layers", "one", "window"])
@pytest.mark.parametrize("spec", ["topk(0.01)", "threshold(3.0)", "topk(0.01) | sign", "hadamard | topk(0.01)"])
def test_decoded_values_do_not_depend_on_the_coder(spec: str, table: Segments) -> None:
    x = torch.randn(table.total, generator=torch.Generator().manual_seed(0))
    plain, rows = codec(f"{spec} | int64"), codec(f"{spec} | rows")
    assert isinstance(rows.indices, Rows)
    payloads = [chain.encode(EncodeInput(x, x, {}, table), KEY).payload for chain in (plain, rows)]
    assert payloads[1].nbytes <= rows.size(table)
    assert torch.equal(plain.decode(payloads[0], table, KEY), rows.decode(payloads[1], table, KEY))
    assert torch.equal(rows.decoder.mean([payloads[1]] * 2, table, [KEY] * 2), rows.decode(payloads[1], table, KEY))


def test_rows_of_a_weight_save_bytes() -> None:
    """A third of the outputs learn: their rows have nearly all of what is sent."""
    table = Segments(("weight",), ((300, 1000),))
    busy = torch.rand(300, 1, generator=torch.Generator().manual_seed(1)) < 0.3
    x = torch.randn(300, 1000, generator=torch.Generator().manual_seed(2)) * torch.where(busy, 10.0, 1.0)
    flat = x.flatten()
    sizes = {
        coder: codec(f"topk(0.001) | sign | {coder}").encode(EncodeInput(flat, flat, {}, table), KEY).payload.nbytes
        for coder in ("rice", "rows")
    }
    assert sizes["rows"] < 0.97 * sizes["rice"]
