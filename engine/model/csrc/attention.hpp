// Attention over the paged cache, without gathering it: tasks, chunks and how they are joined.
//
// Path: layer.hpp -> here -> attention_chunk.hpp. A row's context is walked in chunks of 256 tokens
// at fixed positions, joined in order, so the sums do not depend on how a prompt was chunked, on
// the batch or on the threads. Softmax over chunks after Milakov and Gimelshein (2018).
#pragma once

#include "attention_chunk.hpp"

namespace qd {

constexpr int QUERY_BLOCK = 16;  // queries of one prefill task; they share the turned keys
constexpr int LONG_CHUNKS = 4;   // chunks of a decode task before it is split

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

// Queries first_query..+queries of a row (counted from its first new token) over chunks
// first_chunk..last_chunk, all heads: a token's keys of all KV heads are neighbours in memory.
// `partial` < 0: the result goes to the output, else to that place.
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
  Attention(const AttentionShape& shape, const Batch& batch, const Cache<T>& cache,
            const T* queries, float* out)
      : shape_(shape), batch_(batch), cache_(cache), queries_(queries), out_(out) {}

  // Joins all chunks of the task in work.state, head by head of each query.
  void run(const Task& task, Workspace<T>& work) const {
    work.state.reset(task.queries * shape_.heads, shape_.head_dim);
    for (int chunk = task.first_chunk; chunk < task.last_chunk; ++chunk) {
      const Sight any = locate(task, chunk, work);
      for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
        const int offset = kv_head * shape_.head_dim;
        for (int tile = any.first / LANES; tile * LANES < any.last; ++tile)
          turn_keys(work, tile, offset, shape_.head_dim);
        const int members = task.queries * shape_.group();
        for (int member = 0; member < members; member += MOST_HEADS) {
          switch (std::min(MOST_HEADS, members - member)) {
            case 1:
              pass<1>(task, kv_head, chunk, member, work);
              break;
            case 2:
              pass<2>(task, kv_head, chunk, member, work);
              break;
            case 3:
              pass<3>(task, kv_head, chunk, member, work);
              break;
            default:
              pass<4>(task, kv_head, chunk, member, work);
          }
        }
      }
    }
  }

  // The joined result of a task to out [tokens, heads, head_dim].
  void finish(const Task& task, const State& state) const {
    const size_t width = static_cast<size_t>(shape_.head_dim);
    float* to = out_ + head_offset(task, 0, 0);
    for (int head = 0; head < task.queries * shape_.heads; ++head) {
      const size_t h = static_cast<size_t>(head);
      const __m512 inverse = _mm512_set1_ps(1.0f / state.total[h]);
      for (size_t at = h * width; at < (h + 1) * width; at += LANES)
        _mm512_storeu_ps(to + at,
                         _mm512_mul_ps(_mm512_loadu_ps(state.values.data() + at), inverse));
    }
  }

 private:
  // Of `head` of the task's query number `query`, in arrays [tokens, heads, head_dim].
  size_t head_offset(const Task& task, int query, int head) const {
    const int token = batch_.query_starts[task.row] + task.first_query + query;
    return (static_cast<size_t>(token) * static_cast<size_t>(shape_.heads) +
            static_cast<size_t>(head)) *
           static_cast<size_t>(shape_.head_dim);
  }

  // Positions before the row's first new token.
  int past(int row) const {
    return batch_.context_lengths[row] - (batch_.query_starts[row + 1] - batch_.query_starts[row]);
  }

  // Finds the chunk's tokens that some query of the task sees, and fetches them ahead. Places of
  // the last tile without a token get the first token's address: they are read and masked.
  Sight locate(const Task& task, int chunk, Workspace<T>& work) const {
    const int base = chunk * CHUNK;
    const int oldest = past(task.row) + task.first_query - base;
    const int last = std::min(CHUNK, oldest + task.queries);
    const int first = shape_.window ? std::clamp(oldest - shape_.window + 1, 0, last) : 0;
    const int32_t* table = batch_.block_tables +
                           static_cast<size_t>(task.row) * static_cast<size_t>(batch_.table_width);
    const int width = shape_.kv_heads * shape_.head_dim;
    for (int t = first / LANES * LANES; t < (last + LANES - 1) / LANES * LANES; ++t) {
      const int token = base + (t < last ? t : first);
      const size_t slot = static_cast<size_t>(table[token / batch_.block_size]) *
                              static_cast<size_t>(batch_.block_size) +
                          static_cast<size_t>(token % batch_.block_size);
      work.keys[t] = cache_.keys + slot * static_cast<size_t>(width);
      work.values[t] = cache_.values + slot * static_cast<size_t>(width);
      for (int d = 0; d < width; d += CACHE_LINE / static_cast<int>(sizeof(T))) {
        _mm_prefetch(work.keys[t] + d, _MM_HINT_T1);
        _mm_prefetch(work.values[t] + d, _MM_HINT_T1);
      }
    }
    return {first, last};
  }

  // `member` counts the query heads of one KV head over all queries of the task.
  template <int HEADS>
  void pass(const Task& task, int kv_head, int chunk, int member, Workspace<T>& work) const {
    const T* queries[HEADS];
    Sight sights[HEADS];
    int heads[HEADS];  // in the task's state
    float largest[HEADS], total[HEADS];
    for (int h = 0; h < HEADS; ++h) {
      const int query = (member + h) / shape_.group();
      const int head = kv_head * shape_.group() + (member + h) % shape_.group();
      queries[h] = queries_ + head_offset(task, query, head);
      heads[h] = query * shape_.heads + head;
      const int position = past(task.row) + task.first_query + query - chunk * CHUNK;
      sights[h].last = std::clamp(position + 1, 0, CHUNK);
      sights[h].first =
          shape_.window ? std::clamp(position - shape_.window + 1, 0, sights[h].last) : 0;
    }
    attend_chunk<T, HEADS>(work, shape_, kv_head * shape_.head_dim, queries, sights, largest,
                           total);
    for (int h = 0; h < HEADS; ++h)
      work.state.join(heads[h], largest[h], total[h], work.sums[h], shape_.head_dim);
  }

  AttentionShape shape_;
  Batch batch_;
  Cache<T> cache_;
  const T* queries_;
  float* out_;
};

// Rows of one query and a long context are split into their chunks.
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
