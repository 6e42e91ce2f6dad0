// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_data.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "absl/types/span.h"
#include "bench/gpu_data_kinds.h"
#include "kernels/data/real_rows.h"

namespace lossd::bench {
namespace {

constexpr int64_t kProfileRows = 256;

data::RealArrays DrawReal(const DataShape& shape, uint64_t seed) {
  const auto rows = data::RealRows::Create(shape.rows, shape.hidden, shape.vocab, seed);
  if (!rows.ok()) {
    std::fprintf(stderr, "%s\n", rows.status().ToString().c_str());
    std::exit(2);
  }
  return data::ToArrays(*rows);
}

}  // namespace

DataKind ParseDataKind(const std::string& name) {
  if (name == "real") return DataKind::kReal;
  if (name == "peaked") return DataKind::kPeaked;
  if (name == "flat") return DataKind::kFlat;
  std::fprintf(stderr, "--data: must be real, peaked or flat, got %s\n", name.c_str());
  std::exit(2);
}

LossData MakeData(DataKind kind, const DataShape& shape, uint64_t seed) {
  switch (kind) {
    case DataKind::kReal:
      return MakeReal(shape, DrawReal(shape, seed), seed);
    case DataKind::kPeaked:
      return MakePeaked(shape, seed);
    case DataKind::kFlat:
      break;
  }
  return MakeFlat(shape, seed);
}

RowGradients MakeRowGradients(const DataShape& shape, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const float share = 1.0f / static_cast<float>(shape.rows);
  RowGradients gradients;
  for (int64_t r = 0; r < shape.rows; ++r) {
    gradients.loss.push_back(uniform(rng));
    gradients.lse.push_back(uniform(rng) * share);
    gradients.entropy.push_back(uniform(rng) * share);
  }
  return gradients;
}

data::ProfileCheck CheckProfile(const DataShape& shape, const LossData& data) {
  data::ProfileCheck check(data::RealProfile());
  std::vector<int32_t> rows(static_cast<size_t>(std::min(kProfileRows, shape.rows)));
  std::iota(rows.begin(), rows.end(), 0);
  const std::vector<double> logits = ComputeLogits(shape, data, rows);
  const std::vector<float> narrow(logits.begin(), logits.end());
  const size_t vocab = static_cast<size_t>(shape.vocab);
  for (size_t i = 0; i < rows.size(); ++i) {
    check.Add(absl::MakeSpan(narrow).subspan(i * vocab, vocab), data.targets[i]);
  }
  return check;
}

}  // namespace lossd::bench
