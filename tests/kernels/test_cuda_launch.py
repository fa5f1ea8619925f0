"""Launches by few facts: addresses that are handed on belong to tensors that are still there."""

import gc
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from gradwire.kernels.cuda import launch as launches
from gradwire.kernels.cuda import scatter


class Compiled:
    """Stands in for a compiled kernel, and writes down what it is handed."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def test_a_table_is_there_as_long_as_its_address_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launches, "_known", {})
    compiled = Compiled()
    kernel = {(1, 1, 1): lambda *arguments, **options: compiled}
    table = torch.arange(5)
    held, address = weakref.ref(table), table.data_ptr()
    launches.launch(kernel, 1, "facts", (torch.zeros(3),), (table, 7))
    del table
    gc.collect()
    assert held() is not None, "the launch goes by its address"
    launches.launch(kernel, 1, "facts", (torch.zeros(3),), (torch.arange(5), 7))
    assert compiled.calls[-1][-2:] == (address, 7)


def test_a_mean_is_written_by_what_was_compiled_for_such_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Any] = []
    monkeypatch.setattr(scatter, "launch", lambda kernel, programs, facts, *about, **options: known.append(facts))
    there, indices = torch.zeros(100), torch.tensor([3, 50])
    for offset, n in ((0, 60), (1, 60), (0, 65)):
        scatter.scatter_mean_(there[offset : offset + n], torch.ones(2), indices, (0, 2), 1)
    assert known[0] == known[1] and len(set(known)) == 3
