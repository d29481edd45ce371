"""The benchmark against peers: its figures, and dense GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.cpu import machine, report
from benchmarks.cpu.contestant import Key, Passed, Tokens
from benchmarks.cpu.gguf_files import weight_bytes, write_dense
from benchmarks.cpu.machine import Machine
from benchmarks.cpu.result import Figures, Floor, Result, floors
from d2sd.bench.provenance import provenance
from d2sd.errors import D2SDError


class Fixed:
    """A contestant that always gives the same answers."""

    def __init__(self, key: Key, answers: list[Tokens]) -> None:
        self.key, self._answers = key, answers

    def answer(self, prompts: object) -> Passed:
        return Passed(2.0, 0.5, 3, self._answers)


def test_another_answer_than_plain_decodings_stops_the_benchmark() -> None:
    off, auto = Key("d2sd", "off", "fp32", True), Key("d2sd", "auto", "fp32", False)
    known: dict[Any, list[Tokens]] = {}
    peers.check_answers([Fixed(auto, [[1]]), Fixed(off, [[1]])], [[[0]]], known)
    assert known == {"fp32": [[1]]}
    with pytest.raises(D2SDError, match="differs from plain"):
        peers.check_answers([Fixed(auto, [[2]]), Fixed(off, [[1]])], [[[0]]], {})


def test_figures_of_passes() -> None:
    passed = [Passed(2.0, 0.5, 3, [[1, 2, 3]]), Passed(1.0, 0.5, 2, [[4, 5, 6]])]
    one = Figures.of(Key("llama.cpp", "plain", "F16", True), 1, [passed], [[1, 2, 3], [4, 5, 7]])
    assert one.tokens_per_second == [2.0]
    assert one.step_ms == [400.0]
    assert one.prefill_ms == [500.0]
    assert (one.equal, one.answers) == (1, 2)
    assert one.key.reference == "fp32"


def test_a_floor_is_the_fastest_of_all_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and the products of a step, each of as many bytes as the weights."""
    seen: list[Any] = []
    times = iter([3.0, 5.0, 2.0, 4.0] + [9.0] * 4)

    def best(run: Callable[[], object]) -> float:
        seen.append(run())
        return next(times)

    monkeypatch.setattr(machine, "_OUTPUTS", 16)
    monkeypatch.setattr(machine, "_best", best)
    size = 256 * 1024
    assert machine.read_seconds(size) == 2.0
    total, product, fp32, bf16 = seen
    assert (total.item(), product.tolist()) == (size / 4, [1024.0] * 64)
    assert [one.tolist() for one in fp32] == [[[1024.0] * 16]] * 4
    assert [one.shape for one in bf16] == [(1, 16)] * 8
    assert floors({"fp32": size}, {"fp32": Floor(weight_bytes=size, ms=7.0)})["fp32"].ms == 7.0, "the lower of two"


def test_no_step_is_faster_than_its_limit() -> None:
    """A floor that a plain step beats is none, and the report says why."""
    keys = [
        Key("d2sd", "off", "fp32", True),
        Key("d2sd", "auto", "fp32", False),
        Key("d2sd", "off", "bf16", True),
        Key("llama.cpp", "plain", "Q4_1", True),
    ]
    common: dict[str, Any] = {"prefill_ms": [1.0], "equal": 1, "answers": 1}
    steps, speeds = (15.2, 30.0, 10.0, 14.0), (60.0, 90.0, 100.0, 70.0)
    made = Result(
        provenance=provenance({"name": "tiny"}, "cpu"),
        prompts="",
        max_new_tokens=8,
        notes=[],
        machine=Machine(threads=1, read_gb_per_s=1, gemm_gflops=1),
        floors={
            "fp32": Floor(weight_bytes=538, ms=17.4),
            "bf16": Floor(weight_bytes=269, ms=9.0),
            "Q4_1": Floor(weight_bytes=97, ms=3.0),
        },
        figures=[
            Figures(key=key, in_flight=1, tokens_per_second=[speed], step_ms=[step], **common)
            for key, speed, step in zip(keys, speeds, steps, strict=True)
        ],
    )
    assert made.beaten() == {"fp32": 15.2}
    assert "with fp32 weights took 15.2 ms, less than reading them" in report.markdown(made)


def test_dense_gguf_files_hold_the_dequantized_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    made = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(made, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(tmp_path / "q4_1.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", made[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert weight_bytes(tmp_path / "q4_1.gguf") == 4 * 2 * 20 + 64 * 4
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
    for weights, dtype in (("F32", np.float32), ("F16", np.float16)):
        file = tmp_path / f"{weights}.gguf"
        write_dense(tmp_path / "q4_1.gguf", file, weights)  # type: ignore[arg-type]
        reader = gguf.GGUFReader(file)
        table, norm = reader.tensors
        assert np.array_equal(table.data, expected.astype(dtype))
        assert np.array_equal(norm.data, made[0])
        assert norm.data.dtype == np.float32
        assert reader.fields["llama.block_count"].contents() == 3
        assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
