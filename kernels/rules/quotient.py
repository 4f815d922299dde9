"""n / (sqrt(x) + eps), each operation rounded to nearest, eight elements at a time.

A correctly rounded root and division are short sequences of fused multiply-adds, but for operands
whose quotient, or a remainder, leaves the normal numbers. The compiler asks that of each operation
of each element, and branches. Here one branch asks it of eight elements, which takes 11
instructions an element less of 100: what moments of 8 bits in blocks need (table.py).
"""

from __future__ import annotations

from megaopt.kernels.optional_triton import cuda_capability_geq, helper, tl

TOGETHER: tl.constexpr = tl.constexpr(8)
# Operands: results $0 to $7, n $8 to $15, x $16 to $23, eps $24 (and in 7 more).
# The sequences are CUDA's own. They are right where no step leaves the normal numbers: for
# x >= 2**-100 (the remainder of the root is a multiple of 2**-148), for eps <= 2**62, so that
# 2**-50 <= sqrt(x) + eps < 2**65, and for |n| >= 2**-60, so that the quotient is at least 2**-125
# and its remainder a multiple of 2**-107. Beyond, an x or n that is infinite or NaN, a negative x
# and a quotient that overflows make the sum of the quotients' magnitudes infinite or NaN.
_SHORT = """
    rsqrt.approx.ftz.f32 r, $X;
    mul.rn.f32 y, $X, r;
    mul.rn.f32 r, r, 0f3F000000;
    neg.f32 t, y;
    fma.rn.f32 t, t, y, $X;
    fma.rn.f32 y, t, r, y;
    add.rn.f32 y, y, $24;
    rcp.approx.ftz.f32 r, y;
    neg.f32 y, y;
    fma.rn.f32 t, y, r, 0f3F800000;
    fma.rn.f32 r, r, t, r;
    mul.rn.f32 q, $N, r;
    fma.rn.f32 t, y, q, $N;
    fma.rn.f32 q, r, t, q;
    fma.rn.f32 t, y, q, $N;
    fma.rn.f32 $Q, r, t, q;
    abs.f32 t, $N;
    min.f32 least, least, t;
    min.u32 least_x, least_x, $X;
    abs.f32 t, $Q;
    add.f32 sum, sum, t;
"""
_LONG = """
    sqrt.rn.f32 y, $X;
    add.rn.f32 y, y, $24;
    div.rn.f32 $Q, $N, y;
"""


def _eight(lines: str) -> str:
    each = range(8)
    places = [{"$Q": f"${i}", "$N": f"${i + 8}", "$X": f"${i + 16}"} for i in each]
    return "".join(
        lines.replace("$Q", at["$Q"]).replace("$N", at["$N"]).replace("$X", at["$X"])
        for at in places
    )


QUOTIENTS: tl.constexpr = tl.constexpr(
    "{ .reg .f32 r, y, t, q, sum, least; .reg .u32 least_x; .reg .pred is_short;\n"
    "mov.f32 sum, 0f00000000; mov.f32 least, 0f7F800000; mov.u32 least_x, 0xFFFFFFFF;\n"
    + _eight(_SHORT)
    + """
    setp.lt.f32 is_short, sum, 0f7F800000;
    setp.ge.and.f32 is_short, least, 0f21800000, is_short;  // 2**-60
    setp.ge.and.u32 is_short, least_x, 0x0D800000, is_short;  // 2**-100
    setp.le.and.f32 is_short, $24, 0f5E800000, is_short;  // 2**62
    @is_short bra DONE;
"""
    + _eight(_LONG)
    + "DONE:\n}"
)
CONSTRAINTS: tl.constexpr = tl.constexpr(",".join(["=&f"] * 8 + ["f"] * 24))


@helper
def quotient(numerator, square, eps):
    """Numerator / (sqrt(square) + eps), fp32."""
    # a tile of the step, [rows, 8]: each thread has eight
    if cuda_capability_geq(8, 0) and numerator.shape[-1] == TOGETHER:
        result = tl.inline_asm_elementwise(
            QUOTIENTS, CONSTRAINTS, [numerator, square, eps], tl.float32, True, 8
        )
    else:
        result = tl.math.div_rn(numerator, tl.math.sqrt_rn(square) + eps)
    return result
