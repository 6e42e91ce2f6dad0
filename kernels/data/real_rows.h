// SPDX-License-Identifier: Apache-2.0
// Rows with the softmax of a trained language model, for any number of rows, dimensions and classes. RealRows
// says which classes get which logits. FillWeight, FillHidden and MakeRealData make hidden states and weights
// of that in the memory of the host, for tests, small benchmarks and demos; ToArrays gives what a GPU or a
// program in another language needs to make them.
//
// How to make hidden states x [N, D] and weights W [V, D] of it:
//   W[v, 0] = class_logit(v) / kShared, and the rest of row v is normal noise of length 1;
//   x[i, 0] = kShared, and the rest of row i is normal noise of length deviation(row) * sqrt(D - 1), moved
//   within the span of its candidates' weight rows until x[i] . W[c] is the logit wanted of each candidate c.
#ifndef LOSSD_KERNELS_DATA_REAL_ROWS_H_
#define LOSSD_KERNELS_DATA_REAL_ROWS_H_

#include <cstdint>
#include <random>
#include <unordered_set>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/data/softmax_profile.h"

namespace lossd::data {

// The rows, as logits that are wanted of classes. Immutable after construction, so thread-safe. The same seed
// gives the same rows.
class RealRows {
 public:
  // The element that all hidden states share.
  static constexpr double kShared = 8.0;

  // INVALID_ARGUMENT unless rows >= 0, hidden_size >= 64 and vocab_size >= 1024: smaller ones have no room
  // for such a softmax.
  static absl::StatusOr<RealRows> Create(int64_t rows, int64_t hidden_size, int64_t vocab_size,
                                         uint64_t seed);

  struct Row {
    std::vector<int32_t> classes;  // distinct candidates
    std::vector<float> logits;     // wanted of them
    float noise = 0.0f;            // length of the noise that is left beside what the candidates need
    int32_t target = 0;
  };
  Row row(int64_t index) const;

  int64_t rows() const { return static_cast<int64_t>(quantiles_.size()); }
  int64_t hidden_size() const { return hidden_size_; }
  int64_t vocab_size() const { return static_cast<int64_t>(class_logits_.size()); }
  uint64_t seed() const { return seed_; }
  // What every row's logit of a class has in common: popular classes have large ones. [V]
  const std::vector<float>& class_logits() const { return class_logits_; }
  // The most candidates that a row can have, its target among them.
  int64_t most_candidates() const;

 private:
  RealRows(int64_t rows, int64_t hidden_size, int64_t vocab_size, uint64_t seed);
  const LogitModel& ModelOf(int64_t row) const;
  int32_t DrawClass(const std::vector<double>& cumulative, double uniform) const;
  // Draws a target among the classes that are no candidates, and makes it one.
  int32_t AddTargetOfTail(const LogitModel& model, const std::unordered_set<int32_t>& candidates,
                          std::mt19937_64& random, Row& row) const;

  int64_t hidden_size_;
  uint64_t seed_;
  std::vector<double> quantiles_;       // [N], of the rows' entropies
  std::vector<float> class_logits_;     // [V]
  std::vector<double> cumulative_;      // [V], of the popularity by popularity rank
  std::vector<double> cumulative_own_;  // [V], of exp(class logit) by popularity rank
  std::vector<int32_t> class_of_;       // [V], the class that has a popularity rank
  std::vector<LogitModel> models_;      // of kModels quantiles, evenly spaced from 0 to 1
};

// Fills rows [begin, end) of W [V, D] into `out` [end - begin, D]. Thread-safe.
void FillWeight(const RealRows& rows, int64_t begin, int64_t end, float* out);

// Fills rows [begin, end) of the hidden states [N, D] into `out`, and their targets. Thread-safe.
void FillHidden(const RealRows& rows, int64_t begin, int64_t end, float* out, int32_t* targets);

// Hidden states, weights and targets as a whole, made with as many threads as the host has processors.
struct RealData {
  std::vector<float> hidden;     // [N, D]
  std::vector<float> weight;     // [V, D]
  std::vector<int32_t> targets;  // [N]
};
RealData MakeRealData(const RealRows& rows);

// All rows of RealRows as arrays, of which a GPU or a program in another language makes the data as the head
// of this file says. N rows, V classes, K = the most candidates of a row.
struct RealArrays {
  int64_t most = 0;              // K
  std::vector<int32_t> classes;  // [N, K], the first counts[i] of row i; 0 behind them
  std::vector<float> logits;     // [N, K], wanted of them; 0 behind them
  std::vector<int32_t> counts;   // [N]
  std::vector<float> noise;      // [N], the length of the noise
  std::vector<int32_t> targets;  // [N]
  std::vector<float>
      first_elements;  // [V], of the weight's rows; that of all hidden states is RealRows::kShared
};

RealArrays ToArrays(const RealRows& rows);

// How a hidden state is moved until it has the logits wanted, the same on the CPU and on a GPU: steps by
// which a hidden state is moved towards the wanted logits, and the part of the error that each takes back.
// The candidates' weight rows are nearly orthogonal, so the error shrinks by half or more each time.
inline constexpr int kMoves = 16;
inline constexpr float kMovePart = 0.9f;

// Calls work(from, to) for parts of [begin, end) that cover it, on as many threads as the host has
// processors, and returns when all are done.
void InParallel(int64_t begin, int64_t end, absl::FunctionRef<void(int64_t from, int64_t to)> work);

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_REAL_ROWS_H_
