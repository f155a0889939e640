// From a row-major fp32 matrix to the panels of matmul.hpp.
//
// Path: native_ops.py at load and at a weight update -> api.cpp -> here.
#pragma once

#include "packed.hpp"

namespace qd {

// Scale and minimum of a group, and its codes 0..levels, so that scale * code + minimum ~ values.
struct GroupCodes {
  float scale;
  float minimum;
  uint8_t codes[GROUP];
};

inline uint16_t to_half(float value) {
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
}

// Rounds to the range between the smallest and the largest value, then fits scale and minimum to
// the codes by least squares: exact again for values that a 4-bit format had made.
inline GroupCodes quantise_int4(const float* values, int count) {
  GroupCodes group{};
  const auto [low, high] = std::minmax_element(values, values + count);
  group.scale = (*high - *low) / 15.0f;
  group.minimum = *low;
  double codes = 0, squares = 0, sums = 0, products = 0;
  for (int i = 0; i < count; ++i) {
    const float steps = group.scale > 0.0f ? (values[i] - *low) / group.scale : 0.0f;
    group.codes[i] = static_cast<uint8_t>(std::clamp(std::lround(steps), 0l, 15l));
    codes += group.codes[i];
    squares += group.codes[i] * group.codes[i];
    sums += values[i];
    products += group.codes[i] * static_cast<double>(values[i]);
  }
  const double spread = count * squares - codes * codes;
  if (spread > 0) {
    group.scale = static_cast<float>((count * products - codes * sums) / spread);
    group.minimum = static_cast<float>((sums - group.scale * codes) / count);
  }
  return group;
}

inline GroupCodes quantise_int8(const float* values, int count) {
  GroupCodes group{};
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
  group.scale = _cvtsh_ss(to_half(largest / 127.0f));
  group.minimum = -128.0f * group.scale;
  for (int i = 0; i < GROUP; ++i) {
    const float value = i < count && group.scale > 0.0f ? values[i] / group.scale : 0.0f;
    group.codes[i] = static_cast<uint8_t>(std::clamp(std::lround(value), -127l, 127l) + 128);
  }
  return group;
}

inline void place_codes(Kind kind, const GroupCodes& group, int lane, char* to) {
  reinterpret_cast<uint16_t*>(to)[lane] = to_half(group.scale);
  reinterpret_cast<uint16_t*>(to + 32)[lane] = to_half(group.minimum);
  uint8_t* codes = reinterpret_cast<uint8_t*>(to + 64);
  for (int k = 0; k < GROUP; ++k) {
    const int quad = k / 4, byte = lane * 4 + k % 4;
    if (kind == INT8) {
      codes[quad * 64 + byte] = group.codes[k];
    } else {
      codes[quad / 2 * 64 + byte] |= static_cast<uint8_t>(group.codes[k] << (quad % 2 * 4));
    }
  }
}

inline void pack_row(Kind kind, const float* row, int columns, int lane, char* panel) {
  if (kind == FLOAT32) {
    for (int k = 0; k < columns; ++k) reinterpret_cast<float*>(panel)[k * PANEL + lane] = row[k];
    return;
  }
  if (kind == BFLOAT16) {
    bf16* pairs = reinterpret_cast<bf16*>(panel);
    for (int k = 0; k < columns; ++k) {
      const __m256i rounded = narrow(_mm512_set1_ps(row[k]));
      pairs[k / 2 * 2 * PANEL + lane * 2 + k % 2] =
          static_cast<bf16>(_mm256_extract_epi16(rounded, 0));
    }
    return;
  }
  const size_t step = panel_bytes(kind, GROUP);
  for (int first = 0; first < columns; first += GROUP) {
    const int count = std::min(GROUP, columns - first);
    const GroupCodes group =
        kind == INT4 ? quantise_int4(row + first, count) : quantise_int8(row + first, count);
    place_codes(kind, group, lane, panel + step * static_cast<size_t>(first / GROUP));
  }
}

// Packs rows [rows, columns] into panels; `to` is zeroed by the caller.
inline void pack(Kind kind, const float* from, int rows, int columns, char* to) {
  const size_t bytes = panel_bytes(kind, columns);
  for (int row = 0; row < rows; ++row)
    pack_row(kind, from + static_cast<size_t>(row) * static_cast<size_t>(columns), columns,
             row % PANEL, to + bytes * static_cast<size_t>(row / PANEL));
}

// One value of a quantised panel.
inline float unpack_code(Kind kind, const char* panel, int lane, int column) {
  const char* group = panel + panel_bytes(kind, GROUP) * static_cast<size_t>(column / GROUP);
  const int quad = column % GROUP / 4, byte = lane * 4 + column % 4;
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(group + 64);
  const int code =
      kind == INT8 ? codes[quad * 64 + byte] : codes[quad / 2 * 64 + byte] >> (quad % 2 * 4) & 15;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(group);
  return _cvtsh_ss(scales[lane]) * static_cast<float>(code) + _cvtsh_ss(scales[PANEL + lane]);
}

// One row of a packed matrix back as fp32, times `scale`: for reading weights, and for embeddings
// out of a packed output layer.
inline void unpack_row(const Matrix& w, int row, float scale, float* to) {
  const char* panel = w.panel(row / PANEL);
  const int lane = row % PANEL;
  for (int k = 0; k < w.columns; ++k) {
    if (w.form() == FLOAT32) {
      to[k] = scale * reinterpret_cast<const float*>(panel)[k * PANEL + lane];
    } else if (w.form() == BFLOAT16) {
      to[k] = scale *
              widen_one(reinterpret_cast<const bf16*>(panel)[k / 2 * 2 * PANEL + lane * 2 + k % 2]);
    } else {
      to[k] = scale * unpack_code(w.form(), panel, lane, k);
    }
  }
}

}  // namespace qd
