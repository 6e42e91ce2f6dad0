// SPDX-License-Identifier: Apache-2.0
// Data and references for the GPU benchmarks, made on the GPU.
//
// Real data has the softmax measured of a trained model (kernels/data/real_rows.h). Peaked data has that of a
// model on easy text, as far as one power law goes: for each row, k candidates whose popularity ranks are
// spread logarithmically over the vocabulary get the logits z1 - s ln i (i = 1 ... k, in random order), the
// hidden state is the sum of z_i times the candidates' unit-length weight rows, and the target is the i-th
// candidate with probability proportional to i^-s. Flat data is normal noise, loss near ln V.
// All pointers are device memory unless said otherwise; functions synchronise. Not thread-safe.
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

// The shapes that results are given for.
struct NamedShape {
  std::string name;
  DataShape shape;
};
inline const NamedShape kShapes[] = {{"gemma2-2b", {8192, 2304, 256000}},
                                     {"llama3-8b", {8192, 4096, 128256}},
                                     {"phi3.5-mini", {8192, 3072, 32064}},
                                     {"mistral-nemo", {8192, 5120, 131072}},
                                     {"n4096", {4096, 4096, 128256}}};

// Hidden states [rows, hidden] and weight [vocab, hidden] in bf16 on the device, targets on the host.
struct LossData {
  void* hidden = nullptr;
  void* weight = nullptr;
  std::vector<int32_t> targets;
};

enum class DataKind { kReal, kPeaked, kFlat };

// Of "real", "peaked" or "flat"; ends the program with status 2 on another name.
DataKind ParseDataKind(const std::string& name);

// Allocates and fills; Free() releases. Aborts on a CUDA error.
LossData MakeData(DataKind kind, const DataShape& shape, uint64_t seed);
void Free(LossData& data);

// How the first 256 rows compare with the measured profile, in double precision from the 16-bit values.
data::ProfileCheck CheckProfile(const DataShape& shape, const LossData& data);

// Logits [rows, vocab] of some rows, in double, on the host.
std::vector<double> ComputeLogits(const DataShape& shape, const LossData& data,
                                  const std::vector<int32_t>& rows);

// Upstream gradients of a deferred backward, [rows] each, on the host: of the row's loss, over the scale that
// all rows share, of its log-sum-exp and of its entropy.
struct RowGradients {
  std::vector<float> loss, lse, entropy;
};
// Uniform in [-1, 1], and those of log-sum-exps and entropies over the number of rows.
RowGradients MakeRowGradients(const DataShape& shape, uint64_t seed);

// What loss, hidden and weight gradients of a mean loss (scale per row) have to be, in double, for some rows
// and classes.
struct ReferenceQuery {
  std::vector<int32_t> rows;
  std::vector<int32_t> classes;
  double scale = 1.0;
  const RowGradients* gradients = nullptr;  // null: 1 of the loss, 0 of the others
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
