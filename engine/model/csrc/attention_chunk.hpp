// Attention of a few query heads over one chunk of a context: scores, softmax, weighted values.
//
// Path: attention.hpp -> here. Keys are turned so that a register holds one unit of 16 tokens;
// scores then need no sum across a register. All sums have a fixed order.
#pragma once

#include <vector>

#include "matmul.hpp"

namespace qd {

constexpr int CHUNK = 256;     // tokens of context whose scores are held at once
constexpr int MOST_HEADS = 4;  // query heads (over all queries of a task) in one pass over a chunk
constexpr int MOST_HEAD_DIM = 256;
constexpr int CACHE_LINE = 64;  // bytes

struct AttentionShape {
  int heads;
  int kv_heads;
  int head_dim;
  int window;  // 0: none
  float scale;
  float cap;

  int group() const { return heads / kv_heads; }
};

// One layer's cache on this rank: [slots, kv_heads, head_dim] of T.
template <class T>
struct Cache {
  T* keys;
  T* values;
};

template <class T>
constexpr int UNIT = 4 / sizeof(T);  // values in 32 bits: scores are made of 32-bit units

inline void store_values(float* to, __m512 value, __mmask16 live) {
  _mm512_mask_storeu_ps(to, live, value);
}
inline void store_values(bf16* to, __m512 value, __mmask16 live) {
  _mm256_mask_storeu_epi16(to, live, narrow(value));
}

inline __m512 unit_dot(__m512 sum, __m512i keys, __m512i query, float*) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(keys), _mm512_castsi512_ps(query), sum);
}
inline __m512 unit_dot(__m512 sum, __m512i keys, __m512i query, bf16*) {
  return dot_pairs(sum, keys, query);
}

// ---------------------------------------------------------------- before attention

// One head [head_dim], optionally normed, turned by its position's angles, and stored. cos_sin: the
// cosines of the head_dim / 2 angles, then their sines.
template <class T>
void turn_head(const float* head, const float* norm, float epsilon, const float* cos_sin,
               int head_dim, T* to) {
  const int half = head_dim / 2;
  const float scale = norm ? norm_scale(head, head_dim, epsilon) : 1.0f;
  for (int at = 0; at < half; at += LANES) {
    const __mmask16 live = first_lanes(half - at);
    __m512 first = _mm512_maskz_loadu_ps(live, head + at);
    __m512 second = _mm512_maskz_loadu_ps(live, head + half + at);
    if (norm) {
      first = _mm512_mul_ps(_mm512_mul_ps(first, _mm512_set1_ps(scale)),
                            _mm512_maskz_loadu_ps(live, norm + at));
      second = _mm512_mul_ps(_mm512_mul_ps(second, _mm512_set1_ps(scale)),
                             _mm512_maskz_loadu_ps(live, norm + half + at));
    }
    const __m512 cos = _mm512_maskz_loadu_ps(live, cos_sin + at);
    const __m512 sin = _mm512_maskz_loadu_ps(live, cos_sin + half + at);
    store_values(to + at, _mm512_fmsub_ps(first, cos, _mm512_mul_ps(second, sin)), live);
    store_values(to + half + at, _mm512_fmadd_ps(second, cos, _mm512_mul_ps(first, sin)), live);
  }
}

// ---------------------------------------------------------------- one task of attention

// Running softmax of the heads of a task: largest score, sum of weights, weighted values.
struct State {
  std::vector<float> largest, total, values;

  void reset(int heads, int head_dim) {
    largest.assign(static_cast<size_t>(heads), -INFINITY);
    total.assign(static_cast<size_t>(heads), 0.0f);
    values.assign(static_cast<size_t>(heads * head_dim), 0.0f);
  }

  // Joins one more chunk of a head; a chunk without a visible token changes nothing.
  void join(int head, float chunk_largest, float chunk_total, const float* chunk_values,
            int head_dim) {
    if (chunk_largest == -INFINITY) return;
    const size_t h = static_cast<size_t>(head);
    const float top = std::max(largest[h], chunk_largest);
    const float keep = std::exp(largest[h] - top), add = std::exp(chunk_largest - top);
    largest[h] = top;
    total[h] = total[h] * keep + chunk_total * add;
    float* own = values.data() + h * static_cast<size_t>(head_dim);
    for (int at = 0; at < head_dim; at += LANES) {
      const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(own + at), _mm512_set1_ps(keep));
      _mm512_storeu_ps(
          own + at, _mm512_fmadd_ps(_mm512_loadu_ps(chunk_values + at), _mm512_set1_ps(add), kept));
    }
  }
};

// What a thread needs for one chunk.
template <class T>
struct Workspace {
  alignas(64) __m512i turned[CHUNK / LANES * MOST_HEAD_DIM];  // keys: [tile][unit][16 tokens]
  alignas(64) float weights[MOST_HEADS][CHUNK];               // scores, then for fp32 weights
  alignas(64) int32_t weight_pairs[MOST_HEADS][CHUNK / 2];    // two bf16 each
  alignas(64) float sums[MOST_HEADS][MOST_HEAD_DIM];
  const T* keys[CHUNK];
  const T* values[CHUNK];
  State state;
};

// 16 x 16 units of 32 bits, rows become columns.
inline void transpose(__m512i (&r)[LANES]) {
  __m512i t[LANES];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

template <class T>
void turn_keys(Workspace<T>& work, int tile, int offset, int head_dim) {
  const int units = head_dim / UNIT<T>;
  __m512i* to = work.turned + tile * units;
  for (int first = 0; first < units; first += LANES) {
    __m512i block[LANES];
    const __mmask16 live = first_lanes(units - first);
    for (int t = 0; t < LANES; ++t)
      block[t] =
          _mm512_maskz_loadu_epi32(live, work.keys[tile * LANES + t] + offset + first * UNIT<T>);
    transpose(block);
    for (int u = 0; u < std::min(LANES, units - first); ++u) to[first + u] = block[u];
  }
}

// Loops over an array of registers must be unrolled wherever they are, or GCC keeps it in memory.
template <int ROWS, int COLUMNS>
inline void clear(__m512 (&sum)[ROWS][COLUMNS]) {
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; ++c) sum[r][c] = _mm512_setzero_ps();
}

// Scores of 16 tokens for HEADS query heads. Every fourth unit goes to the same sum, so that there
// are sums enough to hide the latency of a dot product even for one head.
template <class T, int HEADS>
inline void score_tile(const __m512i* keys, const T* const* queries, int units,
                       __m512 (&scores)[HEADS]) {
  __m512 sum[HEADS][4];
  clear(sum);
  for (int u = 0; u < units; u += 4) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __m512i key = keys[u + part];
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h) {
        const int32_t* query = reinterpret_cast<const int32_t*>(queries[h]) + u + part;
        sum[h][part] =
            unit_dot(sum[h][part], key, _mm512_set1_epi32(*query), static_cast<T*>(nullptr));
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; ++h)
    scores[h] =
        _mm512_add_ps(_mm512_add_ps(sum[h][0], sum[h][1]), _mm512_add_ps(sum[h][2], sum[h][3]));
}

// sums[h][column..] = weights[h] over tokens first..last times 16 * REGISTERS columns of their
// values.
template <int HEADS, int REGISTERS>
void weigh_values(Workspace<float>& work, int first, int last, int offset, int column) {
  __m512 sum[HEADS][REGISTERS];
  clear(sum);
  for (int t = first; t < last; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i) {
      const __m512 value = _mm512_loadu_ps(work.values[t] + offset + column + i * LANES);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h)
        sum[h][i] = _mm512_fmadd_ps(_mm512_set1_ps(work.weights[h][t]), value, sum[h][i]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i)
      _mm512_store_ps(work.sums[h] + column + i * LANES, sum[h][i]);
}

// The same in pairs of tokens, whose values are interleaved, with weights rounded to bf16 as
// transformers rounds them. Interleaving mixes the columns of the two halves; the last permutation
// puts them in order.
template <int HEADS, int REGISTERS>
void weigh_values(Workspace<bf16>& work, int first, int last, int offset, int column) {
  constexpr int LOADS = (REGISTERS + 1) / 2;  // of 32 columns
  __m512 sum[HEADS][2 * LOADS];
  clear(sum);
  for (int t = first & ~1; t < last; t += 2) {
#pragma GCC unroll 4
    for (int i = 0; i < LOADS; ++i) {
      const __mmask32 live = REGISTERS - 2 * i >= 2 ? 0xFFFFFFFFu : 0xFFFFu;
      const __m512i even =
          _mm512_maskz_loadu_epi16(live, work.values[t] + offset + column + i * 2 * LANES);
      const __m512i odd =
          _mm512_maskz_loadu_epi16(live, work.values[t + 1] + offset + column + i * 2 * LANES);
      const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h) {
        const __m512i weights = _mm512_set1_epi32(work.weight_pairs[h][t / 2]);
        sum[h][2 * i] = dot_pairs(sum[h][2 * i], low, weights);
        sum[h][2 * i + 1] = dot_pairs(sum[h][2 * i + 1], high, weights);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; ++h) {
#pragma GCC unroll 4
    for (int i = 0; i < LOADS; ++i) {
      float* to = work.sums[h] + column + i * 2 * LANES;
      const __m512i first_half =
          _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
      const __m512i second_half = _mm512_add_epi32(first_half, _mm512_set1_epi32(8));
      _mm512_store_ps(to, _mm512_permutex2var_ps(sum[h][2 * i], first_half, sum[h][2 * i + 1]));
      if (REGISTERS - 2 * i >= 2)
        _mm512_store_ps(to + LANES,
                        _mm512_permutex2var_ps(sum[h][2 * i], second_half, sum[h][2 * i + 1]));
    }
  }
}

inline void store_weights(Workspace<float>& work, int head, int at, __m512 weights) {
  _mm512_store_ps(work.weights[head] + at, weights);
}

inline void store_weights(Workspace<bf16>& work, int head, int at, __m512 weights) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(work.weight_pairs[head] + at / 2), narrow(weights));
}

// The visible tokens of one query head within a chunk that begins at token `base`.
struct Sight {
  int first;
  int last;
};

// The tokens of a tile that a query head sees, as a mask.
inline __mmask16 seen(const Sight& sight, int tile) {
  const int begin = sight.first - tile * LANES, end = sight.last - tile * LANES;
  if (end <= 0 || begin >= LANES) return 0;
  return static_cast<__mmask16>(first_lanes(end) & ~(begin > 0 ? first_lanes(begin) : 0));
}

// One pass of HEADS query heads over the tokens of a chunk that any of them sees. `offset` is that
// of their KV head in a token's keys and values.
template <class T, int HEADS>
void attend_chunk(Workspace<T>& work, const AttentionShape& shape, int offset,
                  const T* const* queries, const Sight* sights, float* largest, float* total) {
  Sight any = sights[0], all = sights[0];
  for (int h = 1; h < HEADS; ++h) {
    any = {std::min(any.first, sights[h].first), std::max(any.last, sights[h].last)};
    all = {std::max(all.first, sights[h].first), std::min(all.last, sights[h].last)};
  }
  const int units = shape.head_dim / UNIT<T>, first_tile = any.first / LANES;
  const int last_tile = (any.last + LANES - 1) / LANES;
  const __m512 scale = _mm512_set1_ps(shape.scale), nothing = _mm512_set1_ps(-INFINITY);
  __m512 top[HEADS];
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; ++h) top[h] = nothing;
  for (int tile = first_tile; tile < last_tile; ++tile) {
    __m512 scores[HEADS];
    score_tile<T, HEADS>(work.turned + tile * units, queries, units, scores);
    const bool whole = all.first <= tile * LANES && (tile + 1) * LANES <= all.last;
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) {
      scores[h] = _mm512_mul_ps(scores[h], scale);
      if (shape.cap != 0.0f) scores[h] = soft_cap(scores[h], shape.cap);
      if (!whole) scores[h] = _mm512_mask_mov_ps(nothing, seen(sights[h], tile), scores[h]);
      top[h] = _mm512_max_ps(top[h], scores[h]);
      _mm512_store_ps(work.weights[h] + tile * LANES, scores[h]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; ++h) {
    largest[h] = _mm512_reduce_max_ps(top[h]);
    __m512 sum = _mm512_setzero_ps();
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const __m512 score = _mm512_load_ps(work.weights[h] + tile * LANES);
      const __mmask16 live = _mm512_cmp_ps_mask(score, nothing, _CMP_NEQ_UQ);
      const __m512 weight =
          _mm512_maskz_mov_ps(live, exponential(_mm512_sub_ps(score, _mm512_set1_ps(largest[h]))));
      sum = _mm512_add_ps(sum, weight);
      store_weights(work, h, tile * LANES, weight);
    }
    total[h] = _mm512_reduce_add_ps(sum);
  }
  for (int column = 0; column < shape.head_dim; column += 4 * LANES) {
    switch (std::min(4, (shape.head_dim - column) / LANES)) {
      case 1:
        weigh_values<HEADS, 1>(work, any.first, any.last, offset, column);
        break;
      case 2:
        weigh_values<HEADS, 2>(work, any.first, any.last, offset, column);
        break;
      case 3:
        weigh_values<HEADS, 3>(work, any.first, any.last, offset, column);
        break;
      default:
        weigh_values<HEADS, 4>(work, any.first, any.last, offset, column);
    }
  }
}

}  // namespace qd
