// Packed matrices, and activations in the form that multiplies them.
//
// Path: tiles.hpp, matmul.hpp, pack.hpp -> here. A matrix [rows, columns] is stored in panels of 16
// rows so that one register holds one (or, for bf16, a pair of) input columns of all 16 rows.
#pragma once

#include <algorithm>

#include "simd.hpp"

namespace qd {

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT4 = 2, INT8 = 3 };

constexpr int PANEL = LANES;  // rows of a panel
constexpr int GROUP = 32;     // columns that share a scale and a minimum, for INT4 and INT8

inline bool quantised(Kind kind) { return kind == INT4 || kind == INT8; }

// Columns with the padding that a kind needs.
inline int padded_columns(Kind kind, int columns) {
  const int multiple = quantised(kind) ? GROUP : 2;
  return (columns + multiple - 1) / multiple * multiple;
}

// Bytes of one panel. Quantised panels hold, per group, 16 fp16 scales, 16 fp16 minima and the
// codes.
inline size_t panel_bytes(Kind kind, int columns) {
  const size_t padded = static_cast<size_t>(padded_columns(kind, columns));
  switch (kind) {
    case FLOAT32:
      return padded * PANEL * 4;
    case BFLOAT16:
      return padded * PANEL * 2;
    case INT4:
      return padded / GROUP * (64 + GROUP * PANEL / 2);
    case INT8:
      return padded / GROUP * (64 + GROUP * PANEL);
  }
  return 0;
}

struct Matrix {
  const char* data;
  const float* bias;  // [rows], or null
  int32_t kind;
  int32_t rows;
  int32_t columns;
  int32_t padding;

  Kind form() const { return static_cast<Kind>(kind); }
  int panels() const { return (rows + PANEL - 1) / PANEL; }
  const char* panel(int index) const {
    return data + panel_bytes(form(), columns) * static_cast<size_t>(index);
  }
};

// Activations [rows, columns] in the form that a kind of matrix multiplies.
struct Activations {
  Kind kind;
  int rows;
  int columns;    // padded
  void* data;     // float, bf16 or int8
  float* scales;  // [rows, columns / GROUP], quantised kinds only
  float* sums;    // likewise: scale times the sum of the codes

  template <class T>
  T* row(int index) const {
    return static_cast<T*>(data) + static_cast<size_t>(index) * static_cast<size_t>(columns);
  }
  size_t group(int index) const {
    return static_cast<size_t>(index) * static_cast<size_t>(columns / GROUP);
  }
};

// One row of x [columns], scaled by `scale` and, if given, by `weight` [columns], into `out`.
inline void prepare_row(const float* x, const float* weight, float scale, int columns,
                        const Activations& out, int row) {
  const __m512 factor = _mm512_set1_ps(scale);
  const auto load = [&](int at) {
    const __mmask16 live = at < columns ? first_lanes(columns - at) : 0;
    __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(live, x + at), factor);
    return weight ? _mm512_mul_ps(value, _mm512_maskz_loadu_ps(live, weight + at)) : value;
  };
  if (out.kind == FLOAT32) {
    for (int at = 0; at < out.columns; at += LANES)
      _mm512_mask_storeu_ps(out.row<float>(row) + at, first_lanes(out.columns - at), load(at));
    return;
  }
  if (out.kind == BFLOAT16) {
    for (int at = 0; at < out.columns; at += LANES)
      _mm256_mask_storeu_epi16(out.row<bf16>(row) + at, first_lanes(out.columns - at),
                               narrow(load(at)));
    return;
  }
  for (int at = 0; at < out.columns; at += GROUP) {
    const __m512 low = load(at);
    const __m512 high = load(at + LANES);
    const float largest =
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    const __m512i low_codes = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    const __m512i high_codes = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    int8_t* codes = out.row<int8_t>(row) + at;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(low_codes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + LANES), _mm512_cvtepi32_epi8(high_codes));
    const size_t group = out.group(row) + static_cast<size_t>(at / GROUP);
    out.scales[group] = largest / 127.0f;
    out.sums[group] =
        out.scales[group] *
        static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(low_codes, high_codes)));
  }
}

// 1 / sqrt(mean(x^2) + epsilon) over [columns].
inline float norm_scale(const float* x, int columns, float epsilon) {
  __m512 sum = _mm512_setzero_ps();
  for (int at = 0; at < columns; at += LANES) {
    const __m512 value = _mm512_maskz_loadu_ps(first_lanes(columns - at), x + at);
    sum = _mm512_fmadd_ps(value, value, sum);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / static_cast<float>(columns) + epsilon);
}

}  // namespace qd
