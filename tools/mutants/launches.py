"""Mutants of dependent launches: who waits, who lets the next kernel in, and where."""

from __future__ import annotations

from tools.mutants.mutant import Mutant, run

LAUNCH, BEGIN = "plugins/shared/dependent_launch.py", "plugins/handover/triton/kernel.py"
ENQUEUE = "plugins/cascade_attention/tensorrt/enqueue.py"
DEPENDENT = run("tests/plugins/test_dependent_launch.py")
FIRST = """\
    row = tl.arange(0, BP)
    inside = row < rows
    is_late = tl.load(late + row, mask=inside, other=0) != 0
"""
WAIT = "    wait_for_prior_kernels()\n"

MUTANTS = [
    Mutant("kernels do not wait for those before", LAUNCH, "        tl.extra.cuda.gdc_wait()\n", "", DEPENDENT),
    Mutant("no kernel lets the next in", LAUNCH, "        tl.extra.cuda.gdc_launch_dependents()\n", "", DEPENDENT),
    Mutant("no launch is dependent", LAUNCH, 'options["launch_pdl"] = True', "pass", DEPENDENT),
    Mutant("launches are dependent before 9.0", LAUNCH, "FIRST_CAPABILITY = 90", "FIRST_CAPABILITY = 80", DEPENDENT),
    Mutant("kernels wait before 9.0", LAUNCH, "cuda_capability_geq(9, 0)", "cuda_capability_geq(8, 0)", DEPENDENT),
    Mutant("the switch is not read", LAUNCH, "os.environ.get(NO_DEPENDENT_LAUNCH)", '""', DEPENDENT),
    Mutant("launches stay as in TensorRT", LAUNCH, "        _allowed.reset(before)\n", "        pass\n", DEPENDENT),
    Mutant("a kernel reads before it waits", BEGIN, f"{WAIT}{FIRST}", f"{FIRST}{WAIT}", DEPENDENT),
    Mutant(
        "launches in TensorRT are dependent",
        ENQUEUE,
        "torch.cuda.stream(theirs), without_dependent_launch()",
        "torch.cuda.stream(theirs)",
        run("tests/plugins/test_onnx.py"),
    ),
]
