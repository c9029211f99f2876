"""The Triton kernels in the interpreter against the definition, and what the compiler makes of them for real GPUs.

Skipped where Triton is not installed. Nothing here runs on a GPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_the_kernels_in_the_interpreter_equal_the_definition_and_the_authors():
    """Triton decides when it is imported whether it interprets, so these tests have a process of their own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", str(HERE / "interpreted.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]


DATA = ("d_NRV", "y_NPV", "dy_NPV", "dd_NRV")
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
PAPER = [(32, 32, 12, 36), (32, 64, 12, 36), (32, 64, 12, 12), (48, 64, 14, 42), (64, 64, 16, 48), (64, 64, 16, 16)]


def resources(kernel, arch, dims, launch, **flags):
    """Registers per thread, bytes spilled, bytes of shared memory: from the compiler for `arch`."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from rmt.ops.boundary import triton as kernels

    sizes = dict(zip("KVRP", dims, strict=True))
    constants = sizes | {f"{name}B": kernels.block(size) for name, size in sizes.items()}
    constants |= dict(TOKENS=launch.tokens, CENTRED=True, LOW=True, FIRST=False, **flags)
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("N", "d_token", "dy_token"):
            signature[name] = "i32"
        else:
            signature[name] = "fp32" if name == "eps" else "*bf16" if name in DATA else "*fp32"
    # What the launcher finds out by itself: addresses and strides are multiples of 16.
    multiples = [name for name, kind in signature.items() if kind[0] == "*" or name.endswith("_token")]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch.warps, "num_stages": kernels.STAGES}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)[1]
    command = [get_ptxas(arch).path, "-v", f"--gpu-name={target}", "/dev/stdin", "-o", os.devnull]
    log = subprocess.run(command, input=ptx, capture_output=True, text=True).stderr
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", log))
    return int(re.search(r"Used (\d+) registers", log)[1]), spilled, compiled.metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dims", PAPER)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_for_the_papers_models_nothing_spills_and_shared_memory_suffices(arch, dims):
    from rmt.ops.boundary import triton as kernels

    X = torch.empty(1, dims[0], dims[1])
    found = [resources(kernels.forward_kernel, arch, dims, kernels.pick(kernels.FORWARD, X))]
    for read, rest in kernels.passes(X, low=True):
        launch = kernels.pick(kernels.BACKWARD, X)
        found.append(resources(kernels.backward_kernel, arch, dims, launch, FRESH=False, READ=read, REST=rest))
    for registers, spilled, shared in found:
        assert registers <= 255
        assert spilled == 0
        assert shared <= SHARED_LIMIT[arch]
