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

INTERPRETED = """
import warnings; warnings.simplefilter("ignore")
import sys; sys.path[:0] = [{here!r}]
import torch
from rmt.ops.boundary import Norming, definition, write_read
torch.use_deterministic_algorithms(True)

def check(N, K, V, R, P, gain, kind, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    def draw(*shape, scale=1.0, low=False):
        x = scale * torch.randn(*shape, generator=generator)
        return (x.to(dtype) if low else x).requires_grad_()
    steps = []
    for pieces in ((R,), (P,), (P, 1, 2)):
        shape = dict(full=(K, V), value=(V,), none=None)[gain]
        weights = draw(K, R, scale=R**-0.5), (None if shape is None else draw(*shape)), draw(sum(pieces), K)
        steps.append((draw(N, R, V, low=True), *weights, pieces))
    norm = Norming(kind, 0.1)
    def run(steps, ops):
        state, values = None, []
        for d, write, gains, read, pieces in steps:
            if ops is None:
                state, y = definition(state, d, write, gains, norm, read)
                values += y.split(pieces, dim=-2)
            else:
                state, y = write_read(state, d, write, gains, norm, read, pieces, ops)
                values += y
        loss = sum((y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum() for y in values)
        return values, torch.autograd.grad(loss, [x for step in steps for x in step[:4] if x is not None])
    def double(x):
        return x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) else x
    exact = [tuple(double(x) for x in step) for step in steps]
    for ours, true in zip(run(steps, "triton"), run(exact, None), strict=True):
        largest = max(x.abs().max() for x in true)
        for one, other in zip(ours, true, strict=True):
            error = ((one.double() - other).abs().max() / largest).item()
            assert error <= tolerance, (N, K, V, R, P, gain, kind, dtype, error)

f32, bf16 = torch.float32, torch.bfloat16
check(5, 5, 6, 3, 4, "full", "layernorm", f32, 1e-5)
check(1, 1, 3, 1, 2, "value", "rmsnorm", f32, 1e-5)
check(33, 16, 16, 12, 17, "none", "layernorm", f32, 1e-5)
check(18, 64, 48, 4, 5, "full", "rmsnorm", f32, 1e-5)
check(9, 32, 64, 12, 33, "full", "layernorm", bf16, 2e-2)
check(9, 64, 64, 4, 5, "full", "layernorm", bf16, 2e-2)
print("equal")
"""


def test_the_kernels_in_the_interpreter_equal_the_definition():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = INTERPRETED.format(here=str(HERE))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "equal"


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
