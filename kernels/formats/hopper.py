"""Codes of 8 bits and of bf16, several at a time, on NVIDIA's GPUs from compute capability 9.0 on.

In steps of 10 bytes a parameter arithmetic takes longer than memory. Of the plain functions
(block8.py, bfloat16.py) the compiler makes code that handles an element at a time; these handle two
or four in a register. Values and codes are those of the plain functions in every bit
(tests/kernels/test_blocks.py and test_words.py, on a GPU).
"""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, tl

# block8's, between a value that is scaled and its code's place in fp32
DOWN_E4M3: tl.constexpr = tl.constexpr(2.0**-113)
DOWN_E5M3: tl.constexpr = tl.constexpr(2.0**-97)


@helper
def upper_halves(pattern):
    """int16: the upper halves of int32 numbers, two in a register."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [pattern], tl.int16, True, 2
    )


FOUR_NUMBERS: tl.constexpr = tl.constexpr((tl.float32,) * 4)


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
def decode_e5m3(words):
    return tl.inline_asm_elementwise(
        DECODE_E5M3, "=&f,=&f,=&f,=f,r", [words], FOUR_NUMBERS, True, 1
    )


# Four codes, $4, become four numbers: what the hardware reads, 2**7 times as large.
DECODE_E4M3: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 first, last;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 last, high;
    mov.b32 {a, b}, first;
    mov.b32 {c, d}, last;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")


@helper
def decode_e4m3(words):
    return tl.inline_asm_elementwise(
        DECODE_E4M3, "=&f,=&f,=&f,=f,r", [words], FOUR_NUMBERS, True, 1
    )


@helper
def larger_halves(left, right):
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [left, right], tl.int32, True, 1
    )


# Of four patterns of scaled magnitudes, $1 to $4, the upper 12 bits, rounded and at most the NaN,
# as bytes: by the random bits $5 to $8 (from 0 to 65535), or to nearest even.
DRAWN = "mad.lo.u32 {r}, ${bits}, 16, ${pattern}; add.u32 {r}, {r}, 8;\n"
NEAREST = (
    "bfe.u32 {r}, ${pattern}, 20, 1; add.u32 {r}, {r}, ${pattern}; add.u32 {r}, {r}, 0x7FFFF;\n"
)
LARGEST = "min.u32 {r}, {r}, {largest};\n"
PACK = """
    prmt.b32 a, a, b, 0x7632;
    prmt.b32 c, c, d, 0x7632;
    shr.u32 a, a, 4;
    shr.u32 c, c, 4;
    prmt.b32 $0, a, c, 0x6420;
"""
SIGNS = """
    prmt.b32 a, ${0}, ${1}, 0x0073;
    prmt.b32 c, ${2}, ${3}, 0x0073;
    prmt.b32 a, a, c, 0x5410;
    lop3.b32 $0, $0, a, 0x80808080, 0xF8;  // x | (y & z)
"""
LEAST = """
    .reg .b32 least;
    .reg .pred some;
    min.u32 least, a, b;
    min.u32 least, least, c;
    min.u32 least, least, d;
    setp.ge.u32 some, least, 0x100000;
    @some bra ENOUGH;
    setp.ne.u32 some, ${0}, 0;
    @some max.u32 a, a, 0x100000;
    setp.ne.u32 some, ${1}, 0;
    @some max.u32 b, b, 0x100000;
    setp.ne.u32 some, ${2}, 0;
    @some max.u32 c, c, 0x100000;
    setp.ne.u32 some, ${3}, 0;
    @some max.u32 d, d, 0x100000;
ENOUGH:
"""


def encoding(rounding: str, is_signed: bool) -> str:
    """The instructions; the values, scaled or not, follow what rounding needs."""
    largest = "0x7FFFFFF" if is_signed else "0xFFFFFFF"
    text = ".reg .b32 a, b, c, d;\n"
    for place, name in enumerate("abcd"):
        line = rounding + LARGEST
        text += line.format(r=name, pattern=1 + place, bits=5 + place, largest=largest)
    operands = range(9, 13) if rounding is DRAWN else range(5, 9)
    more = PACK + SIGNS.format(*operands) if is_signed else LEAST.format(*operands) + PACK
    return "{" + text + more + "}"


ENCODE_E4M3: tl.constexpr = tl.constexpr(encoding(DRAWN, True))
ENCODE_E4M3_NEAREST: tl.constexpr = tl.constexpr(encoding(NEAREST, True))
ENCODE_E5M3: tl.constexpr = tl.constexpr(encoding(DRAWN, False))
ENCODE_E5M3_NEAREST: tl.constexpr = tl.constexpr(encoding(NEAREST, False))
OF_8: tl.constexpr = tl.constexpr("=&r" + ",r" * 8)
OF_12: tl.constexpr = tl.constexpr("=&r" + ",r" * 12)


@helper
def encode_e4m3(value, inverse, bits):
    scaled, pattern = signed_pattern(value, inverse)
    return tl.inline_asm_elementwise(ENCODE_E4M3, OF_12, [pattern, bits, scaled], tl.int8, True, 4)


@helper
def encode_e4m3_nearest(value, inverse):
    scaled, pattern = signed_pattern(value, inverse)
    return tl.inline_asm_elementwise(ENCODE_E4M3_NEAREST, OF_8, [pattern, scaled], tl.int8, True, 4)


@helper
def signed_pattern(value, inverse):
    """The scaled value, with the sign of its code, and the pattern of its magnitude."""
    # the sum makes -0 a 0, but not what is less than 0 and underflows; a NaN there has no sign
    scaled = tl.fma(value, inverse, 0.0)
    return scaled, (tl.abs(scaled) * DOWN_E4M3).to(tl.int32, bitcast=True)


@helper
def encode_e5m3(value, inverse, bits):
    pattern = (tl.abs(value) * inverse * DOWN_E5M3).to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(ENCODE_E5M3, OF_12, [pattern, bits, value], tl.uint8, True, 4)


@helper
def encode_e5m3_nearest(value, inverse):
    pattern = (tl.abs(value) * inverse * DOWN_E5M3).to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(ENCODE_E5M3_NEAREST, OF_8, [pattern, value], tl.uint8, True, 4)
