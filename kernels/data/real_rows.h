// SPDX-License-Identifier: Apache-2.0
// Artificial rows that have a softmax like that of a trained language model, for any number of rows,
// dimensions and classes. RealRows chooses the logits of each row. FillWeight, FillHidden and MakeRealData
// make hidden states and weights with these logits in host memory, for tests, small benchmarks and demos.
// ToArrays gives the data from which a GPU or a program in another language can make them.
//
// How hidden states x [N, D] and weights W [V, D] are made:
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

// The rows, each as a list of candidate classes with their wanted logits. Immutable after construction, so
// thread-safe. The same seed gives the same rows.
class RealRows {
 public:
  // The value of element 0, which all hidden states share.
  static constexpr double kShared = 8.0;

  // INVALID_ARGUMENT unless rows >= 0, hidden_size >= 64 and vocab_size >= 1024. Smaller sizes have no room
  // for such a softmax.
  static absl::StatusOr<RealRows> Create(int64_t rows, int64_t hidden_size, int64_t vocab_size,
                                         uint64_t seed);

  struct Row {
    std::vector<int32_t> classes;  // distinct candidates
    std::vector<float> logits;     // their wanted logits
    float noise = 0.0f;            // length of the noise, beside the part for the candidates
    int32_t target = 0;
  };
  Row row(int64_t index) const;

  int64_t rows() const { return static_cast<int64_t>(quantiles_.size()); }
  int64_t hidden_size() const { return hidden_size_; }
  int64_t vocab_size() const { return static_cast<int64_t>(class_logits_.size()); }
  uint64_t seed() const { return seed_; }
  // [V]: the part of a class's logit that is common to all rows. It is large for popular classes.
  const std::vector<float>& class_logits() const { return class_logits_; }
  // The most candidates that a row can have, including its target.
  int64_t most_candidates() const;

 private:
  RealRows(int64_t rows, int64_t hidden_size, int64_t vocab_size, uint64_t seed);
  const LogitModel& ModelOf(int64_t row) const;
  int32_t DrawClass(const std::vector<double>& cumulative, double uniform) const;
  // Draws a target among the classes that are not candidates, and makes it a candidate.
  int32_t AddTargetOfTail(const LogitModel& model, const std::unordered_set<int32_t>& candidates,
                          std::mt19937_64& random, Row& row) const;

  int64_t hidden_size_;
  uint64_t seed_;
  std::vector<double> quantiles_;       // [N], the quantile of each row's entropy
  std::vector<float> class_logits_;     // [V]
  std::vector<double> cumulative_;      // [V], cumulative popularity, by popularity rank
  std::vector<double> cumulative_own_;  // [V], cumulative exp(class logit), by popularity rank
  std::vector<int32_t> class_of_;       // [V], the class of each popularity rank
  std::vector<LogitModel> models_;      // for kModels quantiles, evenly spaced from 0 to 1
};

// Fills rows [begin, end) of W [V, D] into `out` [end - begin, D]. Thread-safe.
void FillWeight(const RealRows& rows, int64_t begin, int64_t end, float* out);

// Fills rows [begin, end) of the hidden states [N, D] into `out`, and their targets. Thread-safe.
void FillHidden(const RealRows& rows, int64_t begin, int64_t end, float* out, int32_t* targets);

// All hidden states, weights and targets. MakeRealData makes them with as many threads as the host has
// processors.
struct RealData {
  std::vector<float> hidden;     // [N, D]
  std::vector<float> weight;     // [V, D]
  std::vector<int32_t> targets;  // [N]
};
RealData MakeRealData(const RealRows& rows);

// All rows of RealRows as arrays. From them a GPU or a program in another language makes the data, as
// described at the beginning of this file. N = rows, V = classes, K = most candidates of a row.
struct RealArrays {
  int64_t most = 0;              // K
  std::vector<int32_t> classes;  // [N, K], the first counts[i] of row i are used; then 0
  std::vector<float> logits;     // [N, K], the wanted logits of `classes`; then 0
  std::vector<int32_t> counts;   // [N]
  std::vector<float> noise;      // [N], the length of the noise
  std::vector<int32_t> targets;  // [N]
  // [V], element 0 of each weight row. Element 0 of all hidden states is RealRows::kShared.
  std::vector<float> first_elements;
};

RealArrays ToArrays(const RealRows& rows);

// How a hidden state is moved until it has the wanted logits, on the CPU and on a GPU: in kMoves steps, each
// of which corrects the part kMovePart of the remaining error. The candidates' weight rows are nearly
// orthogonal, so each step reduces the error by half or more.
inline constexpr int kMoves = 16;
inline constexpr float kMovePart = 0.9f;

// Divides [begin, end) into parts and calls work(from, to) for each, on as many threads as the host has
// processors. Returns when all calls have returned.
void InParallel(int64_t begin, int64_t end, absl::FunctionRef<void(int64_t from, int64_t to)> work);

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_REAL_ROWS_H_
