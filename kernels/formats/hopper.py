"""Codes of 8 bits and of bf16, several at a time, by instructions of NVIDIA's GPUs from compute
capability 9.0 on.

In steps of 10 bytes a parameter arithmetic takes longer than memory. Of the plain functions
(block8.py, bfloat16.py) the compiler makes code that handles an element at a time; these handle two
or four in a register. Values and codes are those of the plain functions in every bit
(tests/kernels/test_hopper.py).
"""

from __future__ import annotations

from megaopt.kernels.optional_triton import cuda_capability_geq, helper, tl


@helper
def available():
    return cuda_capability_geq(9, 0)


# Two codes, $2, become two numbers.
UNPACK_BFLOAT16: tl.constexpr = tl.constexpr("""{
    shl.b32 $0, $2, 16;
    and.b32 $1, $2, 0xFFFF0000;
}""")


@helper
def unpack_bfloat16(code):
    return tl.inline_asm_elementwise(UNPACK_BFLOAT16, "=&f,=f,r", [code], tl.float32, True, 2)


# Four codes, $4, become four numbers. As bf16 a code that is shifted left by 4 is its value times
# 2**-97. An overflow that code 255 alone makes, times 0, is NaN: 3.5 times 1.09375 * 2**126 is
# finite, 3.75 times that is not.
DECODE_E5M3: tl.constexpr = tl.constexpr("""{
    .reg .b32 low, high, huge_low, huge_high, up, large, zero;
    mov.b32 up, 0x70007000;
    mov.b32 large, 0x7E8C7E8C;
    mov.b32 zero, 0;
    prmt.b32 low, $4, 0, 0x4140;
    prmt.b32 high, $4, 0, 0x4342;
    shl.b32 low, low, 4;
    shl.b32 high, high, 4;
    mul.rn.bf16x2 low, low, up;
    mul.rn.bf16x2 high, high, up;
    mul.rn.bf16x2 huge_low, low, large;
    mul.rn.bf16x2 huge_high, high, large;
    fma.rn.bf16x2 low, huge_low, zero, low;
    fma.rn.bf16x2 high, huge_high, zero, high;
    shl.b32 $0, low, 16;
    and.b32 $1, low, 0xFFFF0000;
    shl.b32 $2, high, 16;
    and.b32 $3, high, 0xFFFF0000;
}""")


@helper
def decode_e5m3(code):
    return tl.inline_asm_elementwise(
        DECODE_E5M3, "=&f,=&f,=&f,=f,r", [code], tl.float32, True, 4
    )


# Of four patterns of scaled magnitudes, $1 to $4, the upper 12 bits, rounded by the random bits $5
# to $8 (from 0 to 65535) and at most the NaN, as bytes.
CUT: tl.constexpr = tl.constexpr("""
    .reg .b32 a, b, c, d;
    mad.lo.u32 a, $5, 16, $1;
    mad.lo.u32 b, $6, 16, $2;
    mad.lo.u32 c, $7, 16, $3;
    mad.lo.u32 d, $8, 16, $4;
    add.u32 a, a, 8;
    add.u32 b, b, 8;
    add.u32 c, c, 8;
    add.u32 d, d, 8;
    min.u32 a, a, LARGEST;
    min.u32 b, b, LARGEST;
    min.u32 c, c, LARGEST;
    min.u32 d, d, LARGEST;
""")
PACK: tl.constexpr = tl.constexpr("""
    prmt.b32 a, a, b, 0x7632;
    prmt.b32 c, c, d, 0x7632;
    shr.u32 a, a, 4;
    shr.u32 c, c, 4;
    prmt.b32 $0, a, c, 0x6420;
""")
ENCODE_E4M3: tl.constexpr = tl.constexpr(
    "{" + CUT.value.replace("LARGEST", "0x7FFFFFF") + PACK.value + """
    prmt.b32 a, $9, $10, 0x0073;
    prmt.b32 c, $11, $12, 0x0073;
    prmt.b32 a, a, c, 0x5410;
    lop3.b32 $0, $0, a, 0x80808080, 0xEA;  // the signs of $9 to $12: x | (y & z)
}"""
)


@helper
def encode_e4m3(scaled, pattern, bits):
    return tl.inline_asm_elementwise(
        ENCODE_E4M3,
        "=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [pattern, bits, scaled],
        tl.int8,
        True,
        4,
    )


ENCODE_E5M3: tl.constexpr = tl.constexpr(
    "{" + CUT.value.replace("LARGEST", "0xFFFFFFF") + """
    .reg .b32 least;
    .reg .pred some;
    min.u32 least, a, b;
    min.u32 least, least, c;
    min.u32 least, least, d;
    setp.ge.u32 some, least, 0x100000;
    @some bra ENOUGH;
    setp.ne.u32 some, $9, 0;  // what is not 0 has at least code 1
    @some max.u32 a, a, 0x100000;
    setp.ne.u32 some, $10, 0;
    @some max.u32 b, b, 0x100000;
    setp.ne.u32 some, $11, 0;
    @some max.u32 c, c, 0x100000;
    setp.ne.u32 some, $12, 0;
    @some max.u32 d, d, 0x100000;
ENOUGH:
""" + PACK.value + "}"
)


@helper
def encode_e5m3(value, pattern, bits):
    return tl.inline_asm_elementwise(
        ENCODE_E5M3,
        "=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [pattern, bits, value],
        tl.uint8,
        True,
        4,
    )
