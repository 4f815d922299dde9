"""Launches every kernel again as Triton does, and directly; and once more with other arguments.

On a GPU that is not there (gpu_compiler.py). The last line of the output says what was found: for
each launch the kernel and whether both ways passed the same, and for each change of an argument the
ways that were taken.
"""

import json
import sys

import gpu_compiler
import torch
import triton
from triton.runtime.jit import JITFunction

from megaopt.kernels.calling import call

FIRST, OTHER = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
passed: list[tuple] = []
looked: list[JITFunction] = []
"""By Triton, at which kernel and which arguments."""


class Launcher(gpu_compiler.Launcher):
    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        enter(metadata)
        # a compiled kernel has a launcher of its own
        passed.append((self, x, y, z, stream, function, packed, enter, leave, *arguments))
        leave(metadata)


run = JITFunction.run


def noted(self, *args, grid, warmup, **options):
    looked.append((self, args, grid, dict(options)))
    return run(self, *args, grid=grid, warmup=warmup, **options)


def taken(launch):
    """What a launch passed on, and whether Triton looked at it."""
    passed.clear()
    looked.clear()
    launch()
    (found,) = passed
    return found, bool(looked)


def equal(one, other):
    """Tensors are compared as objects: `==` would compare their elements."""
    return len(one) == len(other) and all(
        a is b if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def compared(function, arguments, grid, options):
    """Whether a direct launch passes the very arguments that Triton's own passes."""
    triton_way, was_looked_at = taken(lambda: function[grid](*arguments, **options))
    assert was_looked_at
    own = {name: value for name, value in options.items() if name != "enable_fp_fusion"}
    direct, is_looked_at = taken(lambda: call(function, grid[0], arguments, own))
    assert options["enable_fp_fusion"] is False
    return {
        "kernel": function.fn.__name__,
        "direct": not is_looked_at,
        "same": equal(direct, triton_way),
    }


@triton.jit(do_not_specialize=["count", "factor"])
def small_kernel(table_ptr, other_ptr, third_ptr, count, factor, WHICH: triton.language.constexpr):
    triton.language.store(table_ptr, count)


def changes():
    """For each kind of change, by name: whether Triton looks at its first and second launch."""
    words = FIRST.view(torch.int32)
    start = ((FIRST, None, None, 3, 0.5), {"WHICH": 1})
    launches = {
        "the same": start,
        "another tensor": ((OTHER, None, None, 3, 0.5), {"WHICH": 1}),
        "8 bytes further": ((FIRST[1:], None, None, 3, 0.5), {"WHICH": 1}),
        "16 bytes further": ((FIRST[2:], None, None, 3, 0.5), {"WHICH": 1}),
        "another dtype": ((words, None, None, 3, 0.5), {"WHICH": 1}),
        "no None": ((FIRST, OTHER, None, 3, 0.5), {"WHICH": 1}),
        "None in another's place": ((FIRST, None, OTHER, 3, 0.5), {"WHICH": 1}),
        "one": ((FIRST, None, None, 1, 0.5), {"WHICH": 1}),
        "sixteen": ((FIRST, None, None, 16, 0.5), {"WHICH": 1}),
        "the least narrow": ((FIRST, None, None, -(2**31), 0.5), {"WHICH": 1}),
        "the largest narrow": ((FIRST, None, None, 2**31 - 1, 0.5), {"WHICH": 1}),
        "wide": ((FIRST, None, None, 2**31, 0.5), {"WHICH": 1}),
        "wide, below 0": ((FIRST, None, None, -(2**31) - 1, 0.5), {"WHICH": 1}),
        "huge": ((FIRST, None, None, 2**63, 0.5), {"WHICH": 1}),
        "a whole factor": ((FIRST, None, None, 3, 2), {"WHICH": 1}),
        "no factor": ((FIRST, None, None, 3, None), {"WHICH": 1}),
        "another constant": ((FIRST, None, None, 3, 0.5), {"WHICH": 2}),
        "more warps": ((FIRST, None, None, 3, 0.5), {"WHICH": 1, "num_warps": 8}),
    }
    taken(lambda: call(small_kernel, 1, *start))
    found = {}
    for name, (arguments, options) in launches.items():
        own, first = taken(lambda a=arguments, o=options: call(small_kernel, 1, a, o))
        again, second = taken(lambda a=arguments, o=options: call(small_kernel, 1, a, o))
        options = {**options, "enable_fp_fusion": False}
        right, _ = taken(lambda a=arguments, o=options: small_kernel[(1,)](*a, **o))
        found[name] = [first, second, equal(own, right) and equal(again, right)]
    return found


def hooked():
    """Names that a profiler's hook is given of a direct launch; and whether a pre-run hook ran."""
    names = []
    hooks = triton.knobs.runtime.launch_enter_hook
    note = lambda metadata: names.append(metadata.get()["name"])  # noqa: E731
    hooks.add(note)
    launch = lambda: call(small_kernel, 1, (FIRST, None, None, 3, 0.5), {"WHICH": 1})  # noqa: E731
    _, is_looked_at = taken(launch)
    hooks.remove(note)
    taken(launch)
    before = []
    small_kernel.add_pre_run_hook(lambda *_, **__: before.append(True))
    taken(launch)
    small_kernel.pre_run_hooks.clear()
    return {"names": names, "direct": not is_looked_at, "before": len(before)}


def main():
    gpu_compiler.Driver.launcher_cls = Launcher
    JITFunction.run = noted
    gpu_compiler.main()
    launches = list({(f, *map(id, a), str(o)): (f, a, g, o) for f, a, g, o in looked}.values())
    found = [compared(*each) for each in launches]
    print(json.dumps({"launches": found, "changes": changes(), "hooked": hooked()}))


if __name__ == "__main__":
    sys.exit(main())
