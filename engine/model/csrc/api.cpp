// The C functions that native_ops.py calls through ctypes; pointers are into torch tensors.
//
// Path: native_ops.py -> here. An exception never leaves this file: it becomes code 1, and
// qd_last_error says what it was.
#include <exception>
#include <string>

#include "layer.hpp"
#include "sample.hpp"

namespace {

thread_local std::string last_error;

template <class Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {

const char* qd_last_error() { return last_error.c_str(); }

// fixed_sums: no unit is used whose sums depend on the number of rows.
int qd_create(const qd::Model* model, int threads, int fixed_sums, qd::Decoder** made) {
  return guarded([&] { *made = new qd::Decoder(*model, threads, fixed_sums != 0); });
}

int qd_destroy(qd::Decoder* decoder) {
  delete decoder;
  return 0;
}

int64_t qd_panel_bytes(int kind, int columns) {
  return static_cast<int64_t>(qd::panel_bytes(static_cast<qd::Kind>(kind), columns));
}

int qd_pack(int kind, const float* from, int rows, int columns, char* to) {
  return guarded([&] { qd::pack(static_cast<qd::Kind>(kind), from, rows, columns, to); });
}

int qd_unpack(int kind, const char* from, int rows, int columns, float* to) {
  return guarded([&] {
    const qd::Matrix matrix{from, nullptr, kind, rows, columns, 0};
    for (int row = 0; row < rows; ++row)
      qd::unpack_row(matrix, row, 1.0f,
                     to + static_cast<size_t>(row) * static_cast<size_t>(columns));
  });
}

int qd_embed(qd::Decoder* decoder, const qd::Batch* batch, float* x) {
  return guarded([&] { decoder->embed(*batch, x); });
}

int qd_attention(qd::Decoder* decoder, const qd::Batch* batch, int layer, float* x, float* delta) {
  return guarded([&] { decoder->attention(*batch, layer, x, delta); });
}

int qd_mlp(qd::Decoder* decoder, int tokens, int layer, float* x, float* delta) {
  return guarded([&] { decoder->mlp(tokens, layer, x, delta); });
}

int qd_join(qd::Decoder* decoder, int tokens, int layer, int after_mlp, float* x,
            const float* delta) {
  return guarded([&] { decoder->join(tokens, layer, after_mlp != 0, x, delta); });
}

int qd_forward(qd::Decoder* decoder, const qd::Batch* batch, float* x) {
  return guarded([&] { decoder->forward(*batch, x); });
}

int qd_logits(qd::Decoder* decoder, const float* x, int count, float* out) {
  return guarded([&] { decoder->logits(x, count, out); });
}

int qd_final_norm(qd::Decoder* decoder, const float* x, int tokens, float* out) {
  return guarded([&] { decoder->final_norm(x, tokens, out); });
}

int qd_sample(qd::Decoder* decoder, const float* logits, int rows, int vocabulary,
              const qd::DrawRequest* requests, qd::DrawResult* results) {
  return guarded([&] { qd::sample(decoder->pool(), logits, rows, vocabulary, requests, results); });
}

}  // extern "C"
