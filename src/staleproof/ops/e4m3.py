"""E4M3 codes of float32 numbers and back, by integer arithmetic, for use inside Triton kernels.

Integers, because the cast of Triton's interpreter loses NaN and the carry into the exponent.
"""

from __future__ import annotations

from staleproof import device

device.load_triton()

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x):
    """The int32 code of the E4M3 number nearest to x >= 0, ties to even; above 448: 448; NaN: 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    # The exponent bias is 7 in E4M3 and 127 in float32. E4M3 numbers below 2**-6 are 2**-9 apart,
    # and so are float32 numbers from 2**14 on: adding 2**14 rounds to a multiple of 2**-9.
    subnormal = (x + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(bits < 0x3C800000, subnormal, rounded - (120 << 3))
    code = tl.where(code > 0x7E, 0x7E, code)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)


@triton.jit
def decode_e4m3(code):
    """The float32 number of an int32 code from 0 to 0x7E."""
    normal = ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
