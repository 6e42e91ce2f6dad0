// SPDX-License-Identifier: Apache-2.0
// Makes input data for the GPU benchmarks, and computes reference results in double precision. Both are done
// on the GPU.
//
// There are three kinds of data:
// - Real data have the softmax that was measured for a trained model (kernels/data/real_rows.h).
// - Peaked data have a softmax like that of a model on easy text, described by one power law. Each row has k
//   candidate classes, whose popularity ranks are spread logarithmically over the vocabulary. The i-th
//   candidate (i = 1 ... k, in random order) gets the logit z_i = z1 - s ln i. The hidden state is the sum of
//   z_i times the candidates' weight rows, which have unit length. The i-th candidate is the target with a
//   probability proportional to i^-s.
// - Flat data are normal noise, with a loss near ln V.
//
// All pointers point to device memory unless said otherwise. The functions synchronize with the device. Not
// thread-safe.
#ifndef LOSSD_BENCH_GPU_DATA_H_
#define LOSSD_BENCH_GPU_DATA_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/data/softmax_profile.h"

namespace lossd::bench {

struct DataShape {
  int64_t rows = 0;
  int64_t hidden = 0;
  int64_t vocab = 0;
};

// The shapes for which results are published.
struct NamedShape {
  std::string name;
  DataShape shape;
};
inline const NamedShape kShapes[] = {{"gemma2-2b", {8192, 2304, 256000}},
                                     {"llama3-8b", {8192, 4096, 128256}},
                                     {"phi3.5-mini", {8192, 3072, 32064}},
                                     {"mistral-nemo", {8192, 5120, 131072}},
                                     {"n4096", {4096, 4096, 128256}}};

// The inputs of a loss: hidden states [rows, hidden] and weight [vocab, hidden] in bf16 on the device;
// targets on the host.
struct LossData {
  void* hidden = nullptr;
  void* weight = nullptr;
  std::vector<int32_t> targets;
};

enum class DataKind { kReal, kPeaked, kFlat };

// Parses "real", "peaked" or "flat". Ends the program with status 2 on another name.
DataKind ParseDataKind(const std::string& name);

// Allocates and fills the data; the caller calls Free(). Aborts on a CUDA error.
LossData MakeData(DataKind kind, const DataShape& shape, uint64_t seed);
void Free(LossData& data);

// Computes the logits of the first 256 rows in double precision, from the 16-bit hidden states and weight,
// and says how well these rows match the measured softmax.
data::ProfileCheck CheckProfile(const DataShape& shape, const LossData& data);

// The logits [rows, vocab] of some rows, in double precision, on the host.
std::vector<double> ComputeLogits(const DataShape& shape, const LossData& data,
                                  const std::vector<int32_t>& rows);

// The upstream gradients of a deferred backward, on the host, [rows] each: with respect to the row's loss,
// its log-sum-exp and its entropy. The gradient of the loss is `loss` times ReferenceQuery::scale, which all
// rows share; the other two have no such factor.
struct RowGradients {
  std::vector<float> loss, lse, entropy;
};
// Uniform random values in [-1, 1]. The gradients of log-sum-exp and entropy are divided by the number of
// rows.
RowGradients MakeRowGradients(const DataShape& shape, uint64_t seed);

// A query for the exact loss, hidden gradient and weight gradient of a mean loss, in double precision, for
// some rows and classes. `scale` is the factor of each row's loss.
struct ReferenceQuery {
  std::vector<int32_t> rows;
  std::vector<int32_t> classes;
  double scale = 1.0;
  const RowGradients* gradients = nullptr;  // null: 1 for the loss, 0 for log-sum-exp and entropy
};
struct ReferenceAnswer {
  std::vector<double> lse;              // [query.rows]
  std::vector<double> loss;             // [query.rows]
  std::vector<double> hidden_gradient;  // [query.rows, hidden]
  std::vector<double> weight_gradient;  // [query.classes, hidden]
};
ReferenceAnswer ComputeReference(const DataShape& shape, const LossData& data, const ReferenceQuery& query);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_GPU_DATA_H_
