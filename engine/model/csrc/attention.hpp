// Rotary embedding, the store into the paged cache, and attention over it, without gathering it.
//
// Path: layer.hpp -> here. Attention walks a row's context in chunks of 256 tokens at fixed positions
// and joins the chunks in order, so its sums do not depend on how a prompt was chunked, on the batch
// or on the threads. Softmax over chunks after Milakov and Gimelshein (2018).
#pragma once

#include <vector>

#include "matmul.hpp"

namespace qd {

constexpr int CHUNK = 256;        // tokens of context whose scores are held at once
constexpr int QUERY_BLOCK = 16;   // queries of one prefill task; they share the turned keys
constexpr int MOST_HEADS = 4;     // query heads (over all queries of a task) in one pass over a chunk
constexpr int MOST_HEAD_DIM = 256;
constexpr int LONG_CHUNKS = 4;    // chunks of a decode task before it is split

// A ragged batch; see engine/model/inputs.py.
struct Batch {
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* kv_slots;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  const int32_t* block_tables;
  int32_t tokens;
  int32_t rows;
  int32_t table_width;
  int32_t block_size;
};

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

inline void store_values(float* to, __m512 value, __mmask16 live) { _mm512_mask_storeu_ps(to, live, value); }
inline void store_values(bf16* to, __m512 value, __mmask16 live) { _mm256_mask_storeu_epi16(to, live, narrow(value)); }
inline __m512 load_values(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load_values(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }

inline __m512 unit_dot(__m512 sum, __m512i keys, __m512i query, float*) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(keys), _mm512_castsi512_ps(query), sum);
}
inline __m512 unit_dot(__m512 sum, __m512i keys, __m512i query, bf16*) { return dot_pairs(sum, keys, query); }

// ---------------------------------------------------------------- before attention

// One head [head_dim], optionally normed, turned by its position's angles, and stored. cos_sin: the
// cosines of the head_dim / 2 angles, then their sines.
template <class T>
void turn_head(const float* head, const float* norm, float epsilon, const float* cos_sin, int head_dim, T* to) {
  const int half = head_dim / 2;
  const float scale = norm ? norm_scale(head, head_dim, epsilon) : 1.0f;
  for (int at = 0; at < half; at += LANES) {
    const __mmask16 live = first_lanes(half - at);
    __m512 first = _mm512_maskz_loadu_ps(live, head + at);
    __m512 second = _mm512_maskz_loadu_ps(live, head + half + at);
    if (norm) {
      first = _mm512_mul_ps(_mm512_mul_ps(first, _mm512_set1_ps(scale)), _mm512_maskz_loadu_ps(live, norm + at));
      second = _mm512_mul_ps(_mm512_mul_ps(second, _mm512_set1_ps(scale)), _mm512_maskz_loadu_ps(live, norm + half + at));
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
  void join(int head, float chunk_largest, float chunk_total, const float* chunk_values, int head_dim) {
    if (chunk_largest == -INFINITY) return;
    const size_t h = static_cast<size_t>(head);
    const float top = std::max(largest[h], chunk_largest);
    const float keep = std::exp(largest[h] - top), add = std::exp(chunk_largest - top);
    largest[h] = top;
    total[h] = total[h] * keep + chunk_total * add;
    float* own = values.data() + h * static_cast<size_t>(head_dim);
    for (int at = 0; at < head_dim; at += LANES) {
      const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(own + at), _mm512_set1_ps(keep));
      _mm512_storeu_ps(own + at, _mm512_fmadd_ps(_mm512_loadu_ps(chunk_values + at), _mm512_set1_ps(add), kept));
    }
  }
};

// What a thread needs for one chunk.
template <class T>
struct Workspace {
  alignas(64) __m512i turned[CHUNK / LANES * MOST_HEAD_DIM];  // keys: [tile][unit][16 tokens]
  alignas(64) float weights[MOST_HEADS][CHUNK];
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
void turn_keys(Workspace<T>& work, int tile, int head_dim) {
  const int units = head_dim / UNIT<T>;
  __m512i* to = work.turned + tile * units;
  for (int first = 0; first < units; first += LANES) {
    __m512i block[LANES];
    const __mmask16 live = first_lanes(units - first);
    for (int t = 0; t < LANES; ++t) block[t] = _mm512_maskz_loadu_epi32(live, work.keys[tile * LANES + t] + first * UNIT<T>);
    transpose(block);
    for (int u = 0; u < std::min(LANES, units - first); ++u) to[first + u] = block[u];
  }
}

// Scores of 16 tokens for HEADS query heads; even and odd units are summed apart, then together.
template <class T, int HEADS>
void score_tile(const __m512i* keys, const T* const* queries, int units, __m512 (&scores)[HEADS]) {
  __m512 even[HEADS], odd[HEADS];
  for (int h = 0; h < HEADS; ++h) even[h] = odd[h] = _mm512_setzero_ps();
  for (int u = 0; u < units; u += 2) {
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) {
      const int32_t* query = reinterpret_cast<const int32_t*>(queries[h]) + u;
      even[h] = unit_dot(even[h], keys[u], _mm512_set1_epi32(query[0]), static_cast<T*>(nullptr));
      odd[h] = unit_dot(odd[h], keys[u + 1], _mm512_set1_epi32(query[1]), static_cast<T*>(nullptr));
    }
  }
  for (int h = 0; h < HEADS; ++h) scores[h] = _mm512_add_ps(even[h], odd[h]);
}

// sums[h][0..16*REGISTERS] = weights[h] over tokens first..last times their values, from `column` on.
template <class T, int HEADS, int REGISTERS>
void weigh_values(Workspace<T>& work, int first, int last, int column) {
  __m512 sum[HEADS][REGISTERS];
  for (auto& line : sum)
    for (__m512& value : line) value = _mm512_setzero_ps();
  for (int t = first; t < last; ++t) {
    __m512 value[REGISTERS];
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i) value[i] = load_values(work.values[t] + column + i * LANES);
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) {
      const __m512 weight = _mm512_set1_ps(work.weights[h][t]);
#pragma GCC unroll 4
      for (int i = 0; i < REGISTERS; ++i) sum[h][i] = _mm512_fmadd_ps(weight, value[i], sum[h][i]);
    }
  }
  for (int h = 0; h < HEADS; ++h)
    for (int i = 0; i < REGISTERS; ++i) _mm512_store_ps(work.sums[h] + column + i * LANES, sum[h][i]);
}

// The visible tokens of one query head within a chunk that begins at token `base`.
struct Sight {
  int first;
  int last;
};

// One pass of HEADS query heads over a chunk of which tokens first..last may matter to any of them.
template <class T, int HEADS>
void attend_chunk(Workspace<T>& work, const AttentionShape& shape, const T* const* queries, const Sight* sights, float* largest, float* total) {
  int first = CHUNK, last = 0;
  for (int h = 0; h < HEADS; ++h) {
    first = std::min(first, sights[h].first);
    last = std::max(last, sights[h].last);
  }
  const int units = shape.head_dim / UNIT<T>;
  __m512 top[HEADS];
  for (__m512& value : top) value = _mm512_set1_ps(-INFINITY);
  for (int tile = first / LANES; tile * LANES < last; ++tile) {
    __m512 scores[HEADS];
    score_tile<T, HEADS>(work.turned + tile * units, queries, units, scores);
    for (int h = 0; h < HEADS; ++h) {
      const int begin = sights[h].first - tile * LANES, end = sights[h].last - tile * LANES;
      const __mmask16 live = static_cast<__mmask16>((end > 0 ? first_lanes(end) : 0) & ~(begin > 0 ? first_lanes(begin) : 0));
      const __m512 score = soft_cap(_mm512_mul_ps(scores[h], _mm512_set1_ps(shape.scale)), shape.cap);
      const __m512 masked = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), live, score);
      top[h] = _mm512_max_ps(top[h], masked);
      _mm512_store_ps(work.weights[h] + tile * LANES, masked);
    }
  }
  for (int h = 0; h < HEADS; ++h) {
    largest[h] = _mm512_reduce_max_ps(top[h]);
    __m512 sum = _mm512_setzero_ps();
    for (int tile = first / LANES; tile * LANES < last; ++tile) {
      float* at = work.weights[h] + tile * LANES;
      const __m512 score = _mm512_load_ps(at);
      const __mmask16 live = _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
      const __m512 weight = _mm512_maskz_mov_ps(live, exponential(_mm512_sub_ps(score, _mm512_set1_ps(largest[h]))));
      sum = _mm512_add_ps(sum, weight);
      _mm512_store_ps(at, weight);
    }
    total[h] = _mm512_reduce_add_ps(sum);
  }
  for (int column = 0; column < shape.head_dim; column += 4 * LANES) {
    switch (std::min(4, (shape.head_dim - column) / LANES)) {
      case 1: weigh_values<T, HEADS, 1>(work, first, last, column); break;
      case 2: weigh_values<T, HEADS, 2>(work, first, last, column); break;
      case 3: weigh_values<T, HEADS, 3>(work, first, last, column); break;
      default: weigh_values<T, HEADS, 4>(work, first, last, column);
    }
  }
}

// Queries first_query..+queries of a row (counted from its first new token) with one KV head, over
// chunks first_chunk..last_chunk. `partial` < 0: the result goes to the output, else to that place.
struct Task {
  int row;
  int first_query;
  int queries;
  int first_chunk;
  int last_chunk;
  int partial;
};

template <class T>
class Attention {
 public:
  Attention(const AttentionShape& shape, const Batch& batch, const Cache<T>& cache, const T* queries, float* out)
      : shape_(shape), batch_(batch), cache_(cache), queries_(queries), out_(out) {}

  // Joins all chunks of the task in work.state; with a partial place there is one chunk.
  void run(const Task& task, int kv_head, Workspace<T>& work) const {
    const int heads = task.queries * shape_.group();
    work.state.reset(heads, shape_.head_dim);
    for (int chunk = task.first_chunk; chunk < task.last_chunk; ++chunk) {
      locate(task, kv_head, chunk, work);
      for (int head = 0; head < heads; head += MOST_HEADS) {
        switch (std::min(MOST_HEADS, heads - head)) {
          case 1: pass<1>(task, kv_head, chunk, head, work); break;
          case 2: pass<2>(task, kv_head, chunk, head, work); break;
          case 3: pass<3>(task, kv_head, chunk, head, work); break;
          default: pass<4>(task, kv_head, chunk, head, work);
        }
      }
    }
  }

  // The joined result of a head of a task to out [tokens, heads, head_dim].
  void finish(const Task& task, int kv_head, const State& state) const {
    for (int head = 0; head < task.queries * shape_.group(); ++head) {
      const size_t h = static_cast<size_t>(head);
      const __m512 inverse = _mm512_set1_ps(1.0f / state.total[h]);
      const float* from = state.values.data() + h * static_cast<size_t>(shape_.head_dim);
      float* to = out_ + head_offset(task, kv_head, head);
      for (int at = 0; at < shape_.head_dim; at += LANES)
        _mm512_storeu_ps(to + at, _mm512_mul_ps(_mm512_loadu_ps(from + at), inverse));
    }
  }

 private:
  size_t head_offset(const Task& task, int kv_head, int head) const {
    const int token = batch_.query_starts[task.row] + task.first_query + head / shape_.group();
    return (static_cast<size_t>(token) * static_cast<size_t>(shape_.heads) +
            static_cast<size_t>(kv_head * shape_.group() + head % shape_.group())) * static_cast<size_t>(shape_.head_dim);
  }

  // Positions before the row's first new token.
  int past(int row) const {
    return batch_.context_lengths[row] - (batch_.query_starts[row + 1] - batch_.query_starts[row]);
  }

  // Addresses of the chunk's keys and values, and the keys turned. Places without a token get the
  // first token's address: they are read and masked.
  void locate(const Task& task, int kv_head, int chunk, Workspace<T>& work) const {
    const int base = chunk * CHUNK;
    const int last = std::min(CHUNK, past(task.row) + task.first_query + task.queries - base);
    const int32_t* table = batch_.block_tables + static_cast<size_t>(task.row) * static_cast<size_t>(batch_.table_width);
    for (int t = 0; t < (last + LANES - 1) / LANES * LANES; ++t) {
      const int token = base + (t < last ? t : 0);
      const size_t slot = static_cast<size_t>(table[token / batch_.block_size]) * static_cast<size_t>(batch_.block_size) + static_cast<size_t>(token % batch_.block_size);
      const size_t at = (slot * static_cast<size_t>(shape_.kv_heads) + static_cast<size_t>(kv_head)) * static_cast<size_t>(shape_.head_dim);
      work.keys[t] = cache_.keys + at;
      work.values[t] = cache_.values + at;
    }
    const int oldest = past(task.row) + task.first_query - base;
    const int first = shape_.window ? std::max(0, oldest - shape_.window + 1) : 0;
    for (int tile = first / LANES; tile * LANES < last; ++tile) turn_keys(work, tile, shape_.head_dim);
  }

  template <int HEADS>
  void pass(const Task& task, int kv_head, int chunk, int head, Workspace<T>& work) const {
    const T* queries[HEADS];
    Sight sights[HEADS];
    float largest[HEADS], total[HEADS];
    for (int h = 0; h < HEADS; ++h) {
      queries[h] = queries_ + head_offset(task, kv_head, head + h);
      const int position = past(task.row) + task.first_query + (head + h) / shape_.group() - chunk * CHUNK;
      sights[h].last = std::clamp(position + 1, 0, CHUNK);
      sights[h].first = shape_.window ? std::clamp(position - shape_.window + 1, 0, sights[h].last) : 0;
    }
    attend_chunk<T, HEADS>(work, shape_, queries, sights, largest, total);
    for (int h = 0; h < HEADS; ++h) work.state.join(head + h, largest[h], total[h], work.sums[h], shape_.head_dim);
  }

  AttentionShape shape_;
  Batch batch_;
  Cache<T> cache_;
  const T* queries_;
  float* out_;
};

// The tasks of one KV head. Rows of one query and a long context are split into their chunks.
inline void plan_tasks(const Batch& batch, int window, std::vector<Task>& tasks, int& partials) {
  tasks.clear();
  partials = 0;
  for (int row = 0; row < batch.rows; ++row) {
    const int queries = batch.query_starts[row + 1] - batch.query_starts[row];
    const int past = batch.context_lengths[row] - queries;
    for (int first = 0; first < queries; first += QUERY_BLOCK) {
      const int count = std::min(QUERY_BLOCK, queries - first);
      const int oldest = window ? std::max(0, past + first - window + 1) : 0;
      const int first_chunk = oldest / CHUNK;
      const int last_chunk = (past + first + count + CHUNK - 1) / CHUNK;
      const bool split = queries == 1 && last_chunk - first_chunk > LONG_CHUNKS;
      if (!split) tasks.push_back({row, first, count, first_chunk, last_chunk, -1});
      for (int chunk = first_chunk; split && chunk < last_chunk; ++chunk)
        tasks.push_back({row, first, count, chunk, chunk + 1, partials++});
    }
  }
}

}  // namespace qd
