"""All lanes, in the order in which they run: the shortest first, so that a fault shows early."""

from __future__ import annotations

from tests.lanes.lane import Lane

#: What every program is made of. Only `lint`, `test`, `test-slow` and `readme` cover documents.
PRODUCT = ("d2sd", "plugins", "modeling", "runtime", "convert", "train", "recipes", "models")
ENGINE = ("plugins", "modeling", "runtime", "d2sd/policies.py", "d2sd/calibration.py")
TOOLS = ("pyproject.toml", "constraints", "tests/conftest.py", "tests/tiny.py", "tests/convert/helpers.py")
SERVED = ("plugins", "modeling", "runtime", "d2sd", ":!d2sd/bench", ":!d2sd/build", ":!d2sd/viz", ":!d2sd/cli")
KERNELS = ("plugins/**/triton/**", "plugins/shared", "tests/ptx", "tools/ptxsim")
#: Random engines and what they are compared with.
HARNESS = ("tests/runtime", ":!tests/runtime/*test_*.py")
#: What `make engines` leaves to other lanes.
NOT_OF_ENGINES = ("ptx", "cuda", "runtime/test_warm_up.py", "test_readme.py", "lanes")
#: The page of the results itself is in no lane.
RESULTS = ":!docs/results/checks.*"  # of git: all but these

LANES = {
    "lint": Lane(
        "format, lint and types of every file",
        ("lint",),
        (".", RESULTS),
        counts=r"Success: no issues found in (?P<passed>\d+) source files",
        unit="files",
        minutes=1,
    ),
    "test": Lane("the tests of every change: README's second command", ("test",), (".", RESULTS), minutes=5),
    "step-files": Lane(
        "the files that one decode step runs through stay below their limit",
        ("step-files",),
        (*ENGINE, "benchmarks/step_files.py", "tools/cuda", "tests/cuda", "tests/runtime"),
        counts=r"(?P<passed>\d+) files in a step",
        unit="files",
        minutes=1,
    ),
    "client-test": Lane(
        "six client libraries and agent frameworks against the server",
        ("client-test",),
        ("d2sd/serve", "d2sd/bundle", "tests/d2sd/serve/openai/clients", "constraints/clients.txt"),
        minutes=3,
    ),
    "test-slow": Lane(
        "real models, engines of three architectures, whole commands", ("test-slow",), (".", RESULTS), minutes=16
    ),
    "gpu-dry": Lane(
        "the GPU suite, all but its launches, in an environment without a GPU",
        ("gpu-suite", "DRY=1"),
        ("benchmarks/gpu", "benchmarks/gpu_suite.sh", "benchmarks/gpu_pack.sh", *ENGINE, *TOOLS),
        counts=r"\d+ cases: (?P<passed>\d+) ok, (?P<skipped>\d+) skipped, (?P<failed>\d+) failed",
        unit="cases",
        minutes=6,
    ),
    "triton-test": Lane(
        "d2sd inside a real Triton Inference Server",
        ("triton-test",),
        (
            "d2sd/serve",
            ":!d2sd/serve/openai",
            ":!d2sd/serve/dynamo",
            "d2sd/bundle",
            *ENGINE,
            "tests/d2sd/serve/triton",
            *TOOLS,
        ),
        minutes=6,
    ),
    "trtllm": Lane(
        "d2sd's tree in a stand-in for TensorRT-LLM's path, each text against plain decoding",
        ("trtllm",),
        ("d2sd/integrations", "convert/trtllm", "tests/d2sd/integrations", *ENGINE),
        minutes=5,
    ),
    "readme": Lane(
        "README's commands as they are written, in new environments of every CPython",
        ("readme",),
        ("README.md", "tests/test_readme.py", "d2sd/cli", *PRODUCT[-2:], *TOOLS),
        minutes=25,
    ),
    "attack": Lane(
        "hostile requests beside honest clients",
        ("attack",),
        (
            "d2sd/serve",
            ":!d2sd/serve/triton",
            ":!d2sd/serve/dynamo",
            "d2sd/bundle",
            "runtime",
            "benchmarks/attack",
            "tools/hostile",
        ),
        counts=r"(?P<passed>\d+) requests sent, (?P<failed>\d+) faults",
        unit="requests",
        minutes=15,
    ),
    "soak-steps": Lane(
        "engines whose host is one step late, under random load, and 500 steps on a stand-in for CUDA's runtime",
        ("soak-steps",),
        (*ENGINE, *HARNESS, ":!tests/runtime/differential.py", "tools/cuda", "tests/cuda/runtime"),
        counts=r"(?P<passed>\d+) steps, (?P<failed>\d+) differ",
        unit="steps",
        minutes=12,
    ),
    "arm": Lane(
        "the CPU library for aarch64, compiled by a cross compiler and executed under emulation",
        ("arm",),
        ("plugins/cpu", "modeling/native.py", "tests/arm", "constraints/arm.txt", "tests/plugins/cpu/test_linear.py"),
        minutes=5,
    ),
    "ptx": Lane(
        "the kernels' PTX executed for four architectures, the step on fake CUDA tensors, its launches and bytes",
        ("ptx",),
        (
            *ENGINE,
            "tools/ptxsim",
            "tools/cuda",
            "tests/ptx",
            "tests/cuda",
            "tests/runtime/test_warm_up.py",
            "tests/runtime/fake_day.py",
        ),
        minutes=60,
    ),
    "dynamo-test": Lane(
        "workers behind Dynamo's frontend, killed, drained and overloaded",
        ("dynamo-test",),
        (
            "d2sd/serve",
            ":!d2sd/serve/openai",
            ":!d2sd/serve/triton",
            "d2sd/bundle",
            *ENGINE,
            "tests/d2sd/serve/dynamo",
            *TOOLS,
        ),
        minutes=11,
    ),
    "engines": Lane(
        "what CI samples, whole: TensorRT engines, trees under the interpreter, tokens and exact mode in every case",
        ("engines",),
        (*PRODUCT, "tests", *(f":!tests/{one}" for one in NOT_OF_ENGINES)),
        minutes=45,
    ),
    "differential": Lane(
        "random engines with broken weights, each answer against plain decoding alone",
        ("differential", "STEPS=60000"),
        (*ENGINE, *HARNESS),
        counts=r"(?P<passed>\d+) steps, \d+ episodes, (?P<failed>\d+) differing",
        unit="steps",
        minutes=25,
    ),
    "kernels": Lane(
        "every variant of the Triton kernels for every architecture: shared memory, registers, loads in flight",
        ("kernels",),
        (*KERNELS, "benchmarks/compile_kernels.py", "benchmarks/machine_code.py", "benchmarks/sass.py"),
        counts=r"(?P<passed>\d+) keep every rule, \d+ unchanged since; (?P<failed>\d+) break",
        unit="kernels",
        minutes=30,
    ),
    "mutants": Lane(
        "does a test notice? each mutant of every kernel and of the graphs' code",
        ("mutants",),
        (
            *KERNELS,
            "runtime/cuda_graphs",
            "tools/mutants",
            "tools/cuda",
            "tests/cuda/runtime",
            "tests/plugins/kernels",
            "tests/plugins/test_dependent_launch.py",
            "tests/plugins/test_onnx.py",
            *(f"tests/runtime/cuda_graphs/test_{name}.py" for name in ("steps", "context", "soak")),
        ),
        counts=r"(?:(?P<passed>\d+) mutants, |(?P<failed>\d+) not as expected)",
        unit="mutants",
        minutes=45,
    ),
}
