"""The Triton program beyond the interpreter: it compiles for GPUs that are not here."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Compiles for a GPU that is not there: in a process of its own, because this one may have
# bound the program to the interpreter already.
COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import torch
from radix_rope.rotary import triton_kernel, triton_program
from radix_rope.rotary.spec import RopeSpec, standard_inv_freq

dtype, neox, dim, rot, off, heads, capability = eval(sys.argv[1])
spec = RopeSpec(dim, rot, off, neox, standard_inv_freq(rot, 1e4))
key = torch.zeros(64, heads, dim).to(getattr(torch, dtype))
constants = triton_kernel._constants(key, key.clone() if heads > 1 else None, spec, True)
constants.pop("V_PIECES")
arguments = {
    "addresses": "*i64", "tables": "*fp32", "lookup": "*fp32", "src": "*i64", "dst": "*i64",
    "row": "*i64", "still": "*i8", "tokens": "i32",
}
names = triton_program.move_program.arg_names
source = ASTSource(
    triton_program.move_program,
    signature={name: arguments.get(name, "constexpr") for name in names},
    constexprs={(names.index(name),): value for name, value in constants.items()},
    attrs={
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in arguments.items() if kind.startswith("*")
    },
)
options = {"num_warps": 4, "enable_fp_fusion": False}
compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
print(compiled.asm["ptx"])
"""


@pytest.mark.parametrize(
    "case",
    [
        ("float32", True, 128, 128, 0, 8, 80),
        ("bfloat16", True, 128, 128, 0, 8, 90),
        ("float16", False, 80, 40, 0, 4, 90),
        ("bfloat16", False, 576, 64, 512, 1, 90),
        ("float8_e4m3fn", True, 128, 128, 0, 8, 90),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_compiles_for_nvidia_with_wide_accesses_and_no_fused_multiply_add(
    case: tuple[object, ...],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, repr(case)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ptx = done.stdout
    # Rows are read and written 16 bytes at a time where their alignment allows it; the byte
    # codes of fp8 are decoded one by one and written four at a time.
    assert re.search(r"ld\.global\S*\.v4", ptx)
    assert re.search(r"st\.global\S*\.v4", ptx)
    # Same bits as the other kernels: every product and every sum is rounded.
    assert not re.search(r"\bfma\.rn", ptx)
