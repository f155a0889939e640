// The decoder on one rank: embedding, layers, final norm and output layer.
//
// Path: native_ops.py -> api.cpp -> here. The residual stream x is fp32 [tokens, hidden]. With tp >
// 1 attention() and mlp() leave this rank's part of a sum, which Python reduces before join().
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "attention.hpp"
#include "pack.hpp"

namespace qd {

// Pointers are null where a model has no such weight. Norm weights include their offset.
struct Layer {
  Matrix qkv;  // rows: query heads, key heads, value heads
  Matrix output;
  Matrix gate_up;  // panels alternate
  Matrix down;
  const float* input_norm;
  const float* mlp_norm;
  const float* after_attention_norm;
  const float* after_mlp_norm;
  const float* query_norm;
  const float* key_norm;
  const float* cos_sin;  // [positions, head_dim]
  void* keys;
  void* values;
  int32_t window;
  int32_t padding;
};

struct Model {
  const Layer* layers;
  Matrix head;
  const void* embedding;  // [vocabulary, hidden] of embedding_kind; null: rows of `head`
  const float* final_norm;
  int32_t layer_count;
  int32_t hidden;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t intermediate;
  int32_t gelu;
  int32_t cache_kind;
  int32_t embedding_kind;
  float epsilon;
  float attention_scale;
  float attention_cap;
  float logit_cap;
  float embedding_scale;
};

// Grows and never shrinks; contents are lost when it grows.
class Buffer {
 public:
  template <class T>
  T* of(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > bytes_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(64, bytes)));
      if (!memory_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t bytes_ = 0;
};

class Decoder {
 public:
  Decoder(const Model& model, int threads, bool fixed_sums)
      : model_(model), layers_(model.layers, model.layers + model.layer_count), pool_(threads) {
    model_.layers = layers_.data();
    if (!fixed_sums) amx::enable();
  }

  void embed(const Batch& batch, float* x) {
    for_rows(batch.tokens, [&](int t) {
      float* to = x + offset(t, model_.hidden);
      const int64_t id = batch.token_ids[t];
      if (!model_.embedding) {
        unpack_row(model_.head, static_cast<int>(id), model_.embedding_scale, to);
        return;
      }
      const size_t at = static_cast<size_t>(id) * static_cast<size_t>(model_.hidden);
      for (int k = 0; k < model_.hidden; ++k)
        to[k] = model_.embedding_scale *
                (model_.embedding_kind == FLOAT32
                     ? static_cast<const float*>(model_.embedding)[at + static_cast<size_t>(k)]
                     : widen_one(static_cast<const bf16*>(
                           model_.embedding)[at + static_cast<size_t>(k)]));
    });
  }

  // delta = attention(norm(x)), or x += it where delta is null.
  void attention(const Batch& batch, int index, float* x, float* delta) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const Activations normed = prepare(x, batch.tokens, model_.hidden, layer.input_norm, layer.qkv);
    float* qkv = qkv_.of<float>(offset(batch.tokens, layer.qkv.rows));
    multiply(pool_, normed, layer.qkv, {qkv, layer.qkv.rows, STORE, 0.0f});
    float* out = attended_.of<float>(offset(batch.tokens, model_.heads * model_.head_dim));
    if (model_.cache_kind == FLOAT32) {
      attend<float>(batch, layer, qkv, out);
    } else {
      attend<bf16>(batch, layer, qkv, out);
    }
    const Activations attended =
        prepare(out, batch.tokens, model_.heads * model_.head_dim, nullptr, layer.output);
    project(attended, layer.output, layer.after_attention_norm, x, delta);
  }

  // delta = mlp(norm(x)), or x += it where delta is null.
  void mlp(int tokens, int index, float* x, float* delta) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const Activations normed = prepare(x, tokens, model_.hidden, layer.mlp_norm, layer.gate_up);
    float* gated = gated_.of<float>(offset(tokens, model_.intermediate));
    multiply(pool_, normed, layer.gate_up,
             {gated, model_.intermediate, model_.gelu ? GATE_GELU : GATE_SILU, 0.0f});
    const Activations active = prepare(gated, tokens, model_.intermediate, nullptr, layer.down);
    project(active, layer.down, layer.after_mlp_norm, x, delta);
  }

  // x += delta, which is normed first where the layer has a norm after attention or MLP.
  void join(int tokens, int index, bool after_mlp, float* x, const float* delta) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    join(tokens, after_mlp ? layer.after_mlp_norm : layer.after_attention_norm, x, delta);
  }

  void forward(const Batch& batch, float* x) {
    embed(batch, x);
    for (int index = 0; index < model_.layer_count; ++index) {
      attention(batch, index, x, nullptr);
      mlp(batch.tokens, index, x, nullptr);
    }
  }

  // out [count, head.rows]: the logits of residuals x [count, hidden].
  void logits(const float* x, int count, float* out) {
    const Activations normed = prepare(x, count, model_.hidden, model_.final_norm, model_.head);
    multiply(pool_, normed, model_.head, {out, model_.head.rows, STORE, model_.logit_cap});
  }

  // out [tokens, hidden] = final norm of x.
  void final_norm(const float* x, int tokens, float* out) {
    for_rows(tokens, [&](int t) {
      const float* from = x + offset(t, model_.hidden);
      const Activations rows{FLOAT32, tokens, model_.hidden, out, nullptr, nullptr};
      prepare_row(from, model_.final_norm, norm_scale(from, model_.hidden, model_.epsilon),
                  model_.hidden, rows, t);
    });
  }

  Pool& pool() { return pool_; }

 private:
  static size_t offset(int row, int width) {
    return static_cast<size_t>(row) * static_cast<size_t>(width);
  }

  // Rows are cheap: a few of them are not worth waking the other threads for.
  template <class Body>
  void for_rows(int rows, const Body& body) {
    constexpr int BLOCK = 4;
    const int blocks = (rows + BLOCK - 1) / BLOCK;
    pool_.run(blocks, [&](int block) {
      for (int row = block * BLOCK; row < std::min(rows, (block + 1) * BLOCK); ++row) body(row);
    });
  }

  Activations activations(const Matrix& matrix, int rows) {
    const int columns = padded_columns(matrix.form(), matrix.columns);
    const size_t groups = offset(rows, columns / GROUP + 1);
    const bool scaled = quantised(matrix.form());
    return {matrix.form(),
            rows,
            columns,
            prepared_.of<char>(offset(rows, columns) * 4),
            scaled ? scales_.of<float>(groups) : nullptr,
            scaled ? sums_.of<float>(groups) : nullptr};
  }

  Activations prepare(const float* x, int rows, int columns, const float* norm,
                      const Matrix& matrix) {
    const Activations out = activations(matrix, rows);
    for_rows(rows, [&](int row) {
      const float* from = x + offset(row, columns);
      prepare_row(from, norm, norm ? norm_scale(from, columns, model_.epsilon) : 1.0f, columns, out,
                  row);
    });
    return out;
  }

  void project(const Activations& in, const Matrix& matrix, const float* norm, float* x,
               float* delta) {
    if (delta) {
      multiply(pool_, in, matrix, {delta, model_.hidden, STORE, 0.0f});
    } else if (!norm) {
      multiply(pool_, in, matrix, {x, model_.hidden, ADD, 0.0f});
    } else {
      float* own = delta_.of<float>(offset(in.rows, model_.hidden));
      multiply(pool_, in, matrix, {own, model_.hidden, STORE, 0.0f});
      join(in.rows, norm, x, own);
    }
  }

  void join(int tokens, const float* norm, float* x, const float* delta) {
    for_rows(tokens, [&](int t) {
      float* to = x + offset(t, model_.hidden);
      const float* from = delta + offset(t, model_.hidden);
      const float scale = norm ? norm_scale(from, model_.hidden, model_.epsilon) : 1.0f;
      for (int k = 0; k < model_.hidden; ++k) to[k] += norm ? from[k] * scale * norm[k] : from[k];
    });
  }

  template <class T>
  void attend(const Batch& batch, const Layer& layer, const float* qkv, float* out) {
    T* queries = queries_.of<T>(offset(batch.tokens, model_.heads * model_.head_dim));
    const Cache<T> cache{static_cast<T*>(layer.keys), static_cast<T*>(layer.values)};
    for_rows(batch.tokens, [&](int t) { arrange(batch, layer, qkv, t, queries, cache); });
    const AttentionShape shape{model_.heads, model_.kv_heads,        model_.head_dim,
                               layer.window, model_.attention_scale, model_.attention_cap};
    const Attention<T> attention(shape, batch, cache, queries, out);
    int partials = 0;
    plan_tasks(batch, layer.window, tasks_, partials);
    states_.resize(static_cast<size_t>(partials));
    pool_.run(static_cast<int>(tasks_.size()), [&](int index) {
      static thread_local Workspace<T> work;
      const Task& task = tasks_[static_cast<size_t>(index)];
      attention.run(task, work);
      if (task.partial < 0) {
        attention.finish(task, work.state);
      } else {
        states_[static_cast<size_t>(task.partial)] = work.state;
      }
    });
    if (partials > 0) join_partials(attention);
  }

  // Tasks of one row are neighbours; their chunks are joined in order, as an unsplit task does.
  template <class T>
  void join_partials(const Attention<T>& attention) {
    State joined;
    for (size_t first = 0; first < tasks_.size();) {
      size_t next = first + 1;
      if (tasks_[first].partial >= 0) {
        joined.reset(model_.heads, model_.head_dim);
        for (next = first; next < tasks_.size() && tasks_[next].row == tasks_[first].row; ++next) {
          const State& state = states_[static_cast<size_t>(tasks_[next].partial)];
          for (int h = 0; h < model_.heads; ++h)
            joined.join(h, state.largest[static_cast<size_t>(h)],
                        state.total[static_cast<size_t>(h)],
                        state.values.data() + offset(h, model_.head_dim), model_.head_dim);
        }
        attention.finish(tasks_[first], joined);
      }
      first = next;
    }
  }

  // Query, key and value of one token: turned, and the latter two put into the cache.
  template <class T>
  void arrange(const Batch& batch, const Layer& layer, const float* qkv, int token, T* queries,
               const Cache<T>& cache) {
    const int dim = model_.head_dim;
    const float* from = qkv + offset(token, layer.qkv.rows);
    const float* cos_sin =
        layer.cos_sin + static_cast<size_t>(batch.positions[token]) * static_cast<size_t>(dim);
    for (int h = 0; h < model_.heads; ++h, from += dim)
      turn_head(from, layer.query_norm, model_.epsilon, cos_sin, dim,
                queries + offset(token * model_.heads + h, dim));
    const size_t slot =
        static_cast<size_t>(batch.kv_slots[token]) * static_cast<size_t>(model_.kv_heads * dim);
    for (int h = 0; h < model_.kv_heads; ++h, from += dim)
      turn_head(from, layer.key_norm, model_.epsilon, cos_sin, dim,
                cache.keys + slot + offset(h, dim));
    for (int at = 0; at < model_.kv_heads * dim; at += LANES)
      store_values(cache.values + slot + at, _mm512_loadu_ps(from + at),
                   first_lanes(model_.kv_heads * dim - at));
  }

  Model model_;
  std::vector<Layer> layers_;
  Pool pool_;
  Buffer prepared_, scales_, sums_, qkv_, attended_, queries_, gated_, delta_;
  std::vector<Task> tasks_;
  std::vector<State> states_;
};

}  // namespace qd
