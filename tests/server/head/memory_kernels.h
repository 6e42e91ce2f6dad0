// SPDX-License-Identifier: Apache-2.0
// A head whose tensors are vectors in memory and that computes nothing, for tests of what moves tensors.
#ifndef LOSSD_TESTS_SERVER_HEAD_MEMORY_KERNELS_H_
#define LOSSD_TESTS_SERVER_HEAD_MEMORY_KERNELS_H_

#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"

namespace lossd::head {

class MemoryKernels final : public kernels::HeadKernels {
 public:
  explicit MemoryKernels(kernels::HeadConfig config) : config_(config) {
    for (const kernels::Param param : kernels::kAllParams) {
      for (const auto role : {kernels::Role::kValue, kernels::Role::kGradient, kernels::Role::kMoment1,
                              kernels::Role::kMoment2}) {
        if (!kernels::HasTensor(config, {param, role})) continue;
        tensors_[{param, role}].resize(static_cast<size_t>(kernels::ShapeOf(config, param).elements()));
      }
    }
  }

  std::vector<float>& tensor(kernels::TensorId id) { return tensors_.at({id.param, id.role}); }
  const std::map<std::pair<kernels::Param, kernels::Role>, std::vector<float>>& tensors() const {
    return tensors_;
  }

  const kernels::HeadConfig& config() const override { return config_; }
  kernels::DType compute_dtype() const override { return kernels::DType::kFloat32; }
  int64_t chunk_rows() const override { return 1; }
  kernels::MemoryBytes memory() const override { return {}; }
  std::vector<kernels::Choice> Describe() const override { return {}; }
  void Submit(kernels::Chunk*, kernels::ChunkCallbacks callbacks) override {
    callbacks.on_results(absl::UnimplementedError("computes nothing"));
    callbacks.on_done(absl::OkStatus());
  }

  // fp32 only.
  absl::Status ReadTensor(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                          absl::Span<uint8_t> out) override {
    if (dtype != kernels::DType::kFloat32) return absl::UnimplementedError("fp32 only");
    std::memcpy(out.data(), At(id, row_begin), out.size());
    return absl::OkStatus();
  }
  absl::Status WriteTensor(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                           absl::Span<const uint8_t> in) override {
    if (dtype != kernels::DType::kFloat32) return absl::UnimplementedError("fp32 only");
    std::memcpy(At(id, row_begin), in.data(), in.size());
    return absl::OkStatus();
  }

  absl::Status AddGradient(kernels::Param, int64_t, int64_t, kernels::DType, float,
                           absl::Span<const uint8_t>) override {
    return absl::UnimplementedError("computes nothing");
  }
  absl::StatusOr<double> GradNorm() override { return absl::UnimplementedError("computes nothing"); }
  absl::Status ApplyStep(const kernels::OptimizerOptions&, int64_t) override {
    return absl::UnimplementedError("computes nothing");
  }
  absl::Status ZeroGradients() override { return absl::UnimplementedError("computes nothing"); }
  absl::Status ZeroMoments() override { return absl::UnimplementedError("computes nothing"); }

 private:
  float* At(kernels::TensorId id, int64_t row) {
    return tensor(id).data() + row * kernels::ShapeOf(config_, id.param).cols;
  }

  const kernels::HeadConfig config_;
  std::map<std::pair<kernels::Param, kernels::Role>, std::vector<float>> tensors_;
};

}  // namespace lossd::head

#endif  // LOSSD_TESTS_SERVER_HEAD_MEMORY_KERNELS_H_
