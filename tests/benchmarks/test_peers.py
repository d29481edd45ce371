"""The benchmark against peers: a tiny bundle without llama.cpp, dense GGUF files, tables and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.cpu import report
from benchmarks.cpu.contestant import Key, Passed, Tokens, ended
from benchmarks.cpu.gguf_files import weight_bytes, write_dense
from benchmarks.cpu.machine import Machine, weight_count
from benchmarks.cpu.result import Figures
from d2sd.errors import D2SDError
from tests.d2sd.serve.conftest import build_tiny
from tests.tiny import tiny_decoder

LIMITS = {"max_batch": 8, "max_context": 256, "page_size": 16}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    decoder = tiny_decoder("qwen3", layers=2, head_dim=16)  # which the compiled kernels take
    return build_tiny(tmp_path_factory.mktemp("peers"), decoder=decoder, limits=LIMITS)


def test_a_tiny_bundle_is_measured(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    result = peers.Benchmark(bundle, tmp_path, tmp_path, 1, 8, 2, 1, buffer=1 << 20).run()
    found = {(str(one.key), one.in_flight): one for one in result.figures}
    modes = {1: ["generate", "prompt lookup"], 4: ["static batches of 4"]}  # four prompts cannot be eight in flight
    assert found.keys() == {
        (f"{name}, {weights}", in_flight)
        for in_flight, peer in modes.items()
        for name in ("d2sd off", "d2sd auto", *(f"transformers {mode}" for mode in peer))
        for weights in ("fp32", "bf16")
    }
    for one in result.figures:
        assert len(one.tokens_per_second) == 2
        assert one.answers == 8
        assert min(one.step_ms + one.prefill_ms + one.tokens_per_second) > 0
        assert one.equal == 8 or one.key.product != "d2sd"
    assert found["transformers generate, fp32", 1].equal == 8
    assert result.floors["fp32"].weight_bytes == 2 * result.floors["bf16"].weight_bytes
    text = report.markdown(result)
    assert "pip install llama-cpp-python" in text
    assert "| d2sd auto | bf16 |" in text
    report.plot(result, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_a_bundle_of_rounded_weights_is_refused(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path, limits=LIMITS, precision="bf16")
    with pytest.raises(D2SDError, match="--set precision=fp32"):
        peers.Benchmark(bundle, tmp_path, tmp_path, 1, 8, 2, 1, buffer=1 << 20).run()


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


def test_an_answer_ends_with_its_first_stop_token() -> None:
    assert ended([5, 2, 0, 2], {0, 2}) == [5, 2]
    assert ended([5, 6], {0}) == [5, 6]


def test_floor_of_a_machine(bundle: Path) -> None:
    machine = Machine.measured(1, 1 << 20, 64)
    assert machine.read_gb_per_s > 0
    assert machine.gemm_gflops > 0
    assert Machine(threads=1, read_gb_per_s=20, gemm_gflops=1).floor(538_000_000) == pytest.approx(26.9)
    decoder = tiny_decoder("qwen3", layers=2, head_dim=16)
    assert weight_count(bundle / "target") == sum(one.numel() for one in decoder.parameters())


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
