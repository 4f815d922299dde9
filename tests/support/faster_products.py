"""torch's matrix products of 16-bit numbers, made in fp32 and rounded once.

A processor without AVX-512 has no fast kernel for them: torch multiplies 256 x 256 in bf16 in 72 ms
where fp32 takes 0.7, and a test of a Megatron model took 188 s instead of 6. These products are the
models': a test that compares bits multiplies in the same way on both sides.
"""

import warnings

import torch

NAMES = ("mm", "addmm", "bmm", "baddbmm")
HALVES = (torch.bfloat16, torch.float16)

libraries = []


def make_products_faster():
    """To be called once a process, before anything is multiplied there."""
    if libraries or not hasattr(torch.library, "get_kernel"):  # new in torch 2.10
        return
    libraries.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name in NAMES:
            replace(name)


def replace(name):
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys, *arguments, **named):
        dtype = arguments[0].dtype
        if dtype not in HALVES:
            return kernel.call_boxed(keys, *arguments, **named)
        wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in arguments]
        return kernel.call_boxed(keys, *wide, **named).to(dtype)

    libraries[0].impl(name, product, "CPU", with_keyset=True)
