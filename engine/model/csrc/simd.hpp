// AVX-512 building blocks. bf16 and VNNI dot products are emulated where the CPU has none.
//
// Path: matmul.hpp, attention.hpp, layer.hpp and sample.hpp -> here.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace qd {

using bf16 = uint16_t;

constexpr int LANES = 16;  // fp32 values of one register

inline __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>(count >= LANES ? 0xFFFF : (1u << count) - 1u);
}

inline __m512 widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Rounds to nearest even. NaN stays NaN.
inline __m256i narrow(__m512 values) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values));
#else
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
#endif
}

inline float widen_one(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// sum += a.even * b.even + a.odd * b.odd, over pairs of bf16.
inline __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  const __m512 a_even = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
  const __m512 b_even = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
  const __m512 a_odd = _mm512_castsi512_ps(_mm512_and_si512(a, high));
  const __m512 b_odd = _mm512_castsi512_ps(_mm512_and_si512(b, high));
  return _mm512_fmadd_ps(a_odd, b_odd, _mm512_fmadd_ps(a_even, b_even, sum));
#endif
}

// sum += the four products of unsigned and signed bytes in each lane; exact.
inline __m512i dot_bytes(__m512i sum, __m512i unsigned_bytes, __m512i signed_bytes) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
#else
  const __m512i even = _mm512_set1_epi16(0x00FF);
  const __m512i low = _mm512_and_si512(unsigned_bytes, even);
  const __m512i high = _mm512_srli_epi16(unsigned_bytes, 8);
  const __m512i signed_low = _mm512_srai_epi16(_mm512_slli_epi16(signed_bytes, 8), 8);
  const __m512i signed_high = _mm512_srai_epi16(signed_bytes, 8);
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(low, signed_low));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(high, signed_high));
#endif
}

// exp(x) to 2 ulp; below -104 it is 0, above 88.7 infinity.
inline __m512 exponential(__m512 x) {
  const __m512 clamped = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)),
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), clamped);
  rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 series = _mm512_set1_ps(1.9875691500e-4f);
  for (const float term :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f}) {
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(term));
  }
  series =
      _mm512_fmadd_ps(series, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(series, power);
}

inline __m512 hyperbolic_tangent(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 squared = exponential(_mm512_add_ps(x, x));
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(squared, one)));
}

inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

inline __m512 gelu_tanh(__m512 x) {
  const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 inner = _mm512_mul_ps(_mm512_set1_ps(0.7978845608f),
                                     _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x));
  const __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
  return _mm512_fmadd_ps(half, hyperbolic_tangent(inner), half);
}

// cap * tanh(x / cap), or x where cap is 0.
inline __m512 soft_cap(__m512 x, float cap) {
  if (cap == 0.0f) return x;
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.0f / cap));
  return _mm512_mul_ps(_mm512_set1_ps(cap), hyperbolic_tangent(scaled));
}

}  // namespace qd
