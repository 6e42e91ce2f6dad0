// SPDX-License-Identifier: Apache-2.0
#include "bench/loss_errors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <unordered_set>
#include <vector>

#include "bench/gpu_results.h"
#include "bench/gpu_timer.h"

namespace lossd::bench {
namespace {

constexpr int kSampledRows = 32;
constexpr int kSampledClasses = 1024;

struct ErrorNorm {
  double difference = 0.0, reference = 0.0, product = 0.0;
  void Add(double got, double want) {
    difference += (got - want) * (got - want);
    reference += want * want;
    product += got * want;
  }
  double Relative() const { return std::sqrt(difference / reference); }
  double Projection() const { return product / reference; }
};

float FromBFloat16(const uint8_t* from) {
  const uint32_t bits = (static_cast<uint32_t>(from[0]) << 16) | (static_cast<uint32_t>(from[1]) << 24);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

ReferenceQuery MakeQuery(const DataShape& shape, const LossData& data) {
  std::mt19937_64 rng(std::random_device{}());
  ReferenceQuery query;
  query.scale = 1.0 / static_cast<double>(shape.rows);
  std::uniform_int_distribution<int32_t> any_row(0, static_cast<int32_t>(shape.rows - 1));
  std::uniform_int_distribution<int32_t> any_class(0, static_cast<int32_t>(shape.vocab - 1));
  for (int i = 0; i < kSampledRows; ++i) query.rows.push_back(any_row(rng));
  for (int i = 0; i < kSampledClasses; ++i) {
    query.classes.push_back(i % 2 == 0 ? data.targets[static_cast<size_t>(any_row(rng))] : any_class(rng));
  }
  return query;
}

// Gradients of the rows and classes of a query.
struct Gradients {
  std::vector<double> hidden;  // [rows, hidden]
  std::vector<double> weight;  // [classes, hidden]

  void Add(kernels::HeadKernels& head, const Microbatch& batch, const DataShape& shape,
           const ReferenceQuery& query) {
    const auto columns = static_cast<size_t>(shape.hidden);
    hidden.resize(query.rows.size() * columns);
    weight.resize(query.classes.size() * columns);
    for (size_t i = 0; i < query.rows.size(); ++i) {
      const uint8_t* from = batch.gradient() + 2 * static_cast<size_t>(query.rows[i]) * columns;
      for (size_t c = 0; c < columns; ++c) {
        hidden[i * columns + c] += static_cast<double>(FromBFloat16(from + 2 * c));
      }
    }
    std::vector<float> row(columns);
    for (size_t j = 0; j < query.classes.size(); ++j) {
      Check(
          head.ReadTensor({kernels::Param::kWeight, kernels::Role::kGradient}, query.classes[j], 1,
                          kernels::DType::kFloat32, {reinterpret_cast<uint8_t*>(row.data()), row.size() * 4}),
          "ReadTensor");
      for (size_t c = 0; c < columns; ++c) weight[j * columns + c] += static_cast<double>(row[c]);
    }
  }
};

// Of the mean of `count` gradients.
Json GradientErrors(const Gradients& sums, int count, const DataShape& shape, const LossData& data,
                    const ReferenceQuery& query, const ReferenceAnswer& want) {
  const std::unordered_set<int32_t> targets(data.targets.begin(), data.targets.end());
  const auto columns = static_cast<size_t>(shape.hidden);
  ErrorNorm dx, dw, never;
  for (size_t i = 0; i < sums.hidden.size(); ++i) dx.Add(sums.hidden[i] / count, want.hidden_gradient[i]);
  for (size_t i = 0; i < sums.weight.size(); ++i) {
    const double got = sums.weight[i] / count;
    dw.Add(got, want.weight_gradient[i]);
    if (targets.count(query.classes[i / columns]) == 0) never.Add(got, want.weight_gradient[i]);
  }
  return {{"hidden_gradient", dx.Relative()},
          {"weight_gradient", dw.Relative()},
          {"never_target_weight_gradient", never.Relative()},
          {"never_target_projection", never.Projection()}};
}

// The mean over seeds 1, 2, ...
Json MeanErrors(kernels::HeadKernels& head, Microbatch& batch, const DataShape& shape, const LossData& data,
                const ReferenceQuery& query, const ReferenceAnswer& want, int seeds) {
  Gradients sums;
  for (int seed = 1; seed <= seeds; ++seed) {
    Check(head.ZeroGradients(), "ZeroGradients");
    batch.set_sample_seed(static_cast<uint64_t>(seed));
    batch.Run(1, 1);
    sums.Add(head, batch, shape, query);
  }
  Json mean = GradientErrors(sums, seeds, shape, data, query, want);
  mean["seeds"] = seeds;
  return mean;
}

}  // namespace

Json MeasureErrors(kernels::HeadKernels& head, Microbatch& batch, const DataShape& shape,
                   const LossData& data, const RowGradients* row_gradients, int seeds) {
  ReferenceQuery query = MakeQuery(shape, data);
  query.gradients = row_gradients;
  const ReferenceAnswer want = ComputeReference(shape, data, query);
  Gradients gradients;
  gradients.Add(head, batch, shape, query);
  Json errors = GradientErrors(gradients, 1, shape, data, query, want);
  ErrorNorm lse, loss;
  double mean_loss = 0.0, largest = 0.0;
  for (size_t i = 0; i < query.rows.size(); ++i) {
    const auto row = static_cast<size_t>(query.rows[i]);
    const auto got_lse = static_cast<double>(batch.lse()[row]);
    lse.Add(got_lse, want.lse[i]);
    largest = std::max(largest, std::fabs(got_lse - want.lse[i]));
    loss.Add(static_cast<double>(batch.loss()[row]), want.loss[i]);
    mean_loss += want.loss[i] / static_cast<double>(want.loss.size());
  }
  errors["lse"] = lse.Relative();
  errors["largest_lse_difference"] = largest;
  errors["loss"] = loss.Relative();
  errors["mean_loss"] = mean_loss;
  if (seeds > 0) errors["mean_over_seeds"] = MeanErrors(head, batch, shape, data, query, want, seeds);
  return errors;
}

}  // namespace lossd::bench
