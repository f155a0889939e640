// The AMX instructions of amx.hpp as functions, for tests on CPUs without them.
//
// Path: amx.hpp, when built with QD_EMULATE_AMX -> here. After Intel's Software Developer's Manual.
#pragma once

#include "simd.hpp"

namespace qd::amx::emulated {

struct Register {
  unsigned char bytes[16][64];
};

inline Register& at(int index) {
  static thread_local Register registers[8];
  return registers[index];
}

inline void load(int index, const void* from, size_t stride) {
  for (size_t row = 0; row < 16; ++row)
    std::memcpy(at(index).bytes[row], static_cast<const char*>(from) + row * stride, 64);
}

inline void store(int index, void* to, size_t stride) {
  for (size_t row = 0; row < 16; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, at(index).bytes[row], 64);
}

inline void multiply(int sum, int left, int right) {
  for (int row = 0; row < 16; ++row) {
    float* sums = reinterpret_cast<float*>(at(sum).bytes[row]);
    const bf16* a = reinterpret_cast<const bf16*>(at(left).bytes[row]);
    for (int pair = 0; pair < 16; ++pair) {
      const bf16* b = reinterpret_cast<const bf16*>(at(right).bytes[pair]);
      for (int column = 0; column < 16; ++column)
        for (int half = 0; half < 2; ++half)
          sums[column] += widen_one(a[2 * pair + half]) * widen_one(b[2 * column + half]);
    }
  }
}

}  // namespace qd::amx::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(palette) static_cast<void>(palette)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(index) qd::amx::emulated::at(index) = {}
#define _tile_loadd(index, from, stride) qd::amx::emulated::load(index, from, stride)
#define _tile_stored(index, to, stride) qd::amx::emulated::store(index, to, stride)
#define _tile_dpbf16ps(sum, left, right) qd::amx::emulated::multiply(sum, left, right)
