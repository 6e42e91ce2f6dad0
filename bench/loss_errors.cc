#include "bench/loss_errors.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace lossd::bench {
namespace {

using kernels::DType;

constexpr int kSampledRows = 32;
constexpr int kSampledClasses = 1024;

struct ErrorNorm {
  double difference = 0.0, reference = 0.0;
  void Add(double got, double want) {
    difference += (got - want) * (got - want);
    reference += want * want;
  }
  double Relative() const { return std::sqrt(difference / reference); }
};

float FromBFloat16(const uint8_t* from) {
  const uint32_t bits = (static_cast<uint32_t>(from[0]) << 16) | (static_cast<uint32_t>(from[1]) << 24);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace

nlohmann::json ErrorsOf(kernels::HeadKernels& head, const Microbatch& batch, const DataShape& shape,
                        const LossData& data) {
  std::mt19937_64 rng(std::random_device{}());
  ReferenceQuery query;
  query.scale = 1.0 / static_cast<double>(shape.rows);
  std::uniform_int_distribution<int32_t> any_row(0, static_cast<int32_t>(shape.rows - 1));
  std::uniform_int_distribution<int32_t> any_class(0, static_cast<int32_t>(shape.vocab - 1));
  for (int i = 0; i < kSampledRows; ++i) query.rows.push_back(any_row(rng));
  for (int i = 0; i < kSampledClasses; ++i) {
    query.classes.push_back(i % 2 == 0 ? data.targets[static_cast<size_t>(any_row(rng))] : any_class(rng));
  }
  const ReferenceAnswer want = ComputeReference(shape, data, query);
  ErrorNorm lse, loss, dx, dw;
  for (size_t i = 0; i < query.rows.size(); ++i) {
    const auto row = static_cast<size_t>(query.rows[i]);
    lse.Add(static_cast<double>(batch.lse()[row]), want.lse[i]);
    loss.Add(static_cast<double>(batch.loss()[row]), want.loss[i]);
    for (int64_t c = 0; c < shape.hidden; ++c) {
      const size_t at = row * static_cast<size_t>(shape.hidden) + static_cast<size_t>(c);
      dx.Add(static_cast<double>(FromBFloat16(batch.gradient() + 2 * at)),
             want.hidden_gradient[i * static_cast<size_t>(shape.hidden) + static_cast<size_t>(c)]);
    }
  }
  std::vector<float> row(static_cast<size_t>(shape.hidden));
  for (size_t j = 0; j < query.classes.size(); ++j) {
    Check(head.ReadTensor({kernels::Param::kWeight, kernels::Role::kGradient}, query.classes[j], 1,
                          DType::kFloat32, {reinterpret_cast<uint8_t*>(row.data()), row.size() * 4}),
          "ReadTensor");
    for (size_t c = 0; c < row.size(); ++c) {
      dw.Add(static_cast<double>(row[c]), want.weight_gradient[j * row.size() + c]);
    }
  }
  double mean_loss = 0.0;
  for (double l : want.loss) mean_loss += l / static_cast<double>(want.loss.size());
  return {{"lse", lse.Relative()},
          {"loss", loss.Relative()},
          {"hidden_gradient", dx.Relative()},
          {"weight_gradient", dw.Relative()},
          {"mean_loss", mean_loss}};
}

}  // namespace lossd::bench
