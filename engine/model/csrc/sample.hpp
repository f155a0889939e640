// Draws, logprobs and entropies of rows of logits.
//
// Path: native_ops.py -> api.cpp -> here. The definitions are those of engine/model/sampler.py,
// steps 3 to 5; a row is one task and its sums run in the order of the token ids, so a row does not
// depend on its batch.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.hpp"
#include "simd.hpp"

namespace qd {

// What one row asks for. temperature 0: the best token. forced >= 0: that token is described.
struct DrawRequest {
  float temperature;
  float top_p;
  float min_p;
  int32_t top_k;
  int32_t forced;
  int32_t describe;  // logprob and entropy are wanted
  double point;      // in [0, 1)
};

struct DrawResult {
  int32_t token_id;
  float logprob;
  float entropy;    // nats
  float logsumexp;  // of logits / temperature
};

constexpr int BLOCK = 1024;  // tokens whose weights are summed in fp32 before they join a double

class RowSampler {
 public:
  RowSampler(const float* logits, int vocabulary, const DrawRequest& request)
      : logits_(logits), vocabulary_(vocabulary), request_(request) {
    inverse_ = request.temperature > 0.0f ? 1.0f / request.temperature : 1.0f;
  }

  DrawResult run() {
    DrawResult result{find_best(), 0.0f, 0.0f, 0.0f};
    const bool greedy = request_.temperature == 0.0f;
    if (request_.forced >= 0) result.token_id = request_.forced;
    const bool draws = !greedy && request_.forced < 0;
    if (!draws && !request_.describe) return result;
    weigh();
    if (draws) result.token_id = filtered() ? draw_filtered() : draw_any();
    result.logsumexp = best_ * inverse_ + static_cast<float>(std::log(total_));
    result.logprob = logits_[result.token_id] * inverse_ - result.logsumexp;
    result.entropy = static_cast<float>(std::log(total_) - weighted_ / total_);
    return result;
  }

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };

  bool filtered() const {
    return request_.top_k > 0 || request_.top_p < 1.0f || request_.min_p > 0.0f;
  }

  // exp((logit - best) / temperature)
  __m512 exponent(int at, __mmask16 live) const {
    const __m512 logit = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), live, logits_ + at);
    return _mm512_mul_ps(_mm512_sub_ps(logit, _mm512_set1_ps(best_)), _mm512_set1_ps(inverse_));
  }

  float weight(int id) const { return std::exp((logits_[id] - best_) * inverse_); }

  // The largest logit and its lowest id.
  int find_best() {
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int at = 0; at < vocabulary_; at += LANES)
      top = _mm512_mask_max_ps(top, first_lanes(vocabulary_ - at), top, load(at));
    best_ = _mm512_reduce_max_ps(top);
    for (int at = 0; at < vocabulary_; at += LANES) {
      const __mmask16 live = first_lanes(vocabulary_ - at);
      const __mmask16 equal =
          _mm512_mask_cmp_ps_mask(live, load(at), _mm512_set1_ps(best_), _CMP_EQ_OQ);
      if (equal) return at + __builtin_ctz(equal);
    }
    return 0;  // every logit is NaN
  }

  __m512 load(int at) const {
    return _mm512_maskz_loadu_ps(first_lanes(vocabulary_ - at), logits_ + at);
  }

  // Sums of weights and of weight * exponent, per block and in all.
  void weigh() {
    blocks_.clear();
    total_ = weighted_ = 0;
    for (int first = 0; first < vocabulary_; first += BLOCK) {
      __m512 sum = _mm512_setzero_ps(), product = _mm512_setzero_ps();
      for (int at = first; at < std::min(first + BLOCK, vocabulary_); at += LANES) {
        const __m512 power = exponent(at, first_lanes(vocabulary_ - at));
        const __mmask16 counts = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-100.0f), _CMP_GT_OQ);
        const __m512 weight = _mm512_maskz_mov_ps(counts, exponential(power));
        sum = _mm512_add_ps(sum, weight);
        product = _mm512_mask3_fmadd_ps(weight, power, product, counts);
      }
      blocks_.push_back(_mm512_reduce_add_ps(sum));
      total_ += blocks_.back();
      weighted_ += _mm512_reduce_add_ps(product);
    }
  }

  // Inverse distribution function in the order of the ids.
  int draw_any() const {
    double left = request_.point * total_;
    size_t block = 0;
    while (block + 1 < blocks_.size() && left >= blocks_[block]) left -= blocks_[block++];
    const int first = static_cast<int>(block) * BLOCK;
    int last_seen = first;
    for (int id = first; id < std::min(first + BLOCK, vocabulary_); ++id) {
      const double own = weight(id);
      if (own == 0.0) continue;
      last_seen = id;
      if (left < own) return id;
      left -= own;
    }
    return last_seen;
  }

  int draw_filtered() {
    keep_likely();
    const bool cut = request_.top_k > 0 && static_cast<size_t>(request_.top_k) < kept_.size();
    const auto before = [](const Candidate& a, const Candidate& b) {
      return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    };
    if (cut) {
      std::nth_element(kept_.begin(), kept_.begin() + request_.top_k, kept_.end(), before);
      kept_.resize(static_cast<size_t>(request_.top_k));
    }
    std::sort(kept_.begin(), kept_.end(), before);
    double whole = total_;
    if (request_.top_k > 0) {
      whole = 0;
      for (const Candidate& candidate : kept_) whole += weight(candidate.id);
    }
    double mass = 0;
    size_t count = 0;
    for (; count < kept_.size(); ++count) {
      const float own = weight(kept_[count].id);
      const bool beyond = request_.top_p < 1.0f && mass >= request_.top_p * whole;
      if (count > 0 && (beyond || own < request_.min_p)) break;
      mass += own;
    }
    double left = request_.point * mass;
    size_t drawn = 0;
    while (drawn + 1 < count && left >= weight(kept_[drawn].id)) left -= weight(kept_[drawn++].id);
    return kept_[drawn].id;
  }

  // Candidates enough for the filters: all tokens above a threshold that is lowered until the
  // filters cut above it.
  void keep_likely() {
    for (const float depth : {6.0f, 12.0f, 25.0f, INFINITY}) {
      kept_.clear();
      double mass = 0;
      for (int at = 0; at < vocabulary_; at += LANES) {
        const __mmask16 live = first_lanes(vocabulary_ - at);
        unsigned above =
            _mm512_mask_cmp_ps_mask(live, exponent(at, live), _mm512_set1_ps(-depth), _CMP_GE_OQ);
        for (; above; above &= above - 1) {
          const int id = at + __builtin_ctz(above);
          kept_.push_back({logits_[id], id});
          if (request_.top_p < 1.0f) mass += weight(id);
        }
      }
      if (request_.top_k > 0 && kept_.size() >= static_cast<size_t>(request_.top_k)) return;
      // with top-k the mass that top-p cuts is that of the k tokens, so only they are enough
      if (request_.top_k > 0 && request_.top_p < 1.0f) continue;
      if (request_.min_p > 0.0f && std::exp(-depth) < request_.min_p) return;
      if (request_.top_p < 1.0f && mass >= request_.top_p * total_) return;
    }
  }

  const float* logits_;
  int vocabulary_;
  DrawRequest request_;
  float inverse_ = 1.0f;
  float best_ = 0.0f;
  double total_ = 0;     // sum of weights
  double weighted_ = 0;  // sum of weight * exponent
  std::vector<float> blocks_;
  std::vector<Candidate> kept_;
};

inline void sample(Pool& pool, const float* logits, int rows, int vocabulary,
                   const DrawRequest* requests, DrawResult* results) {
  pool.run(rows, [&](int row) {
    results[row] = RowSampler(logits + static_cast<size_t>(row) * static_cast<size_t>(vocabulary),
                              vocabulary, requests[row])
                       .run();
  });
}

}  // namespace qd
