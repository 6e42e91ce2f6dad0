// SPDX-License-Identifier: Apache-2.0
// Heads in memory with random tensors, and a folder for their checkpoints, for tests of checkpoints and of
// other code that moves tensors.
#ifndef LOSSD_TESTS_SERVER_HEAD_CHECKPOINT_FIXTURE_H_
#define LOSSD_TESTS_SERVER_HEAD_CHECKPOINT_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "server/head/checkpoint.h"
#include "server/head/head.h"
#include "tests/support/temp_folder.h"

namespace lossd::head {

// A head whose tensors are vectors in memory. It computes nothing.
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

  // Only for fp32.
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

namespace fs = std::filesystem;

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest() { RecordProperty("seed", static_cast<int>(seed_)); }

  uint64_t Below(uint64_t limit) { return random_() % limit; }

  CheckpointSubject SomeSubject() {
    const kernels::HeadConfig config{.hidden_size = 5,
                                     .vocab_size = 7,
                                     .has_bias = true,
                                     .has_class_weights = true,
                                     .norm = kernels::Norm::kLayerNorm,
                                     .norm_epsilon = 1e-6f};
    return {
        .head = "lm", .config = config, .step = random_() % (uint64_t{1} << 53), .incarnation = random_()};
  }

  // A head whose tensors all have random bits.
  Head RandomHead(const CheckpointSubject& subject) {
    auto kernels = std::make_unique<MemoryKernels>(subject.config);
    for (const auto& [id, values] : kernels->tensors()) {
      for (float& value : kernels->tensor({id.first, id.second})) {
        value = std::bit_cast<float>(static_cast<uint32_t>(random_()));
      }
    }
    return Head(subject.head, std::move(kernels));
  }

  absl::StatusOr<SavedCheckpoint> Save(const CheckpointSubject& subject, Head& head, absl::string_view name,
                                       const SaveOptions& options = {}) {
    const auto source = [&](kernels::TensorId id, int64_t row, int64_t rows, absl::Span<uint8_t> out) {
      EXPECT_TRUE(static_cast<int64_t>(out.size()) <= options.slice_bytes || rows == 1);
      return head.ReadRows(id, row, rows, kernels::DType::kFloat32, out);
    };
    return SaveCheckpoint(root_, name, subject, source, options);
  }

  // Loads the checkpoint into `head`, and counts the calls of the sink in `calls`.
  absl::Status Load(absl::string_view checkpoint, Head& head, int* calls, const LoadOptions& options = {}) {
    auto reader = CheckpointReader::Open(root_, checkpoint);
    if (!reader.ok()) return reader.status();
    const auto sink = [&](kernels::TensorId id, int64_t row, int64_t rows, absl::Span<const uint8_t> in) {
      ++*calls;
      EXPECT_TRUE(static_cast<int64_t>(in.size()) <= options.slice_bytes || rows == 1);
      return head.WriteRows(id, row, rows, kernels::DType::kFloat32, in);
    };
    return (*reader)->Load(sink, options);
  }

  // Options for a head of SomeSubject that write several files, at the same time.
  static SaveOptions Sharded() { return {.slice_bytes = 60, .shards = {.most_bytes = 250, .threads = 2}}; }

  std::vector<std::string> FilesIn(const std::string& path) {
    return fs::exists(path) ? test::NamesInHeadFolder(path) : std::vector<std::string>();
  }

  test::TempFolder folder_;
  const std::string root_ = folder_.path();
  const uint32_t seed_ = std::random_device{}();
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  std::mt19937_64 random_{seed_};
};

// The bits of the values, to compare random floats, some of which are NaN.
inline std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

inline void ExpectSameButGradients(Head& actual, Head& expected) {
  auto& actual_kernels = static_cast<MemoryKernels&>(actual.kernels());
  for (const auto& [id, values] : static_cast<MemoryKernels&>(expected.kernels()).tensors()) {
    const kernels::TensorId tensor{id.first, id.second};
    std::vector<uint32_t> wanted = Bits(values);
    if (tensor.role == kernels::Role::kGradient) wanted.assign(wanted.size(), 0);
    EXPECT_EQ(Bits(actual_kernels.tensor(tensor)), wanted) << TensorName(tensor);
  }
}

}  // namespace lossd::head

#endif  // LOSSD_TESTS_SERVER_HEAD_CHECKPOINT_FIXTURE_H_
