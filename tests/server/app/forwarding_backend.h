// SPDX-License-Identifier: Apache-2.0
// ForwardingBackend and ForwardingHead: a backend and its heads that pass every call on to another backend. A
// test overrides what it changes.
//
// As thread-safe as the other backend.
#ifndef LOSSD_TESTS_SERVER_APP_FORWARDING_BACKEND_H_
#define LOSSD_TESTS_SERVER_APP_FORWARDING_BACKEND_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::kernels {

class ForwardingHead : public HeadKernels {
 public:
  explicit ForwardingHead(std::unique_ptr<HeadKernels> head) : head_(std::move(head)) {}

  const HeadConfig& config() const override { return head_->config(); }
  DType compute_dtype() const override { return head_->compute_dtype(); }
  int64_t chunk_rows() const override { return head_->chunk_rows(); }
  MemoryBytes memory() const override { return head_->memory(); }
  std::vector<Choice> Describe() const override { return head_->Describe(); }
  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override { head_->Submit(chunk, std::move(callbacks)); }
  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                          absl::Span<uint8_t> out) override {
    return head_->ReadTensor(id, row_begin, rows, dtype, out);
  }
  absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                           absl::Span<const uint8_t> in) override {
    return head_->WriteTensor(id, row_begin, rows, dtype, in);
  }
  absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                           absl::Span<const uint8_t> in) override {
    return head_->AddGradient(param, row_begin, rows, dtype, scale, in);
  }
  absl::StatusOr<double> GradNorm() override { return head_->GradNorm(); }
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update) override {
    return head_->ApplyStep(options, update);
  }
  absl::Status ZeroGradients() override { return head_->ZeroGradients(); }
  absl::Status ZeroMoments() override { return head_->ZeroMoments(); }

  HeadKernels& inner() const { return *head_; }

 private:
  const std::unique_ptr<HeadKernels> head_;
};

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}

  BackendInfo info() const override { return backend_->info(); }
  MemoryStats memory() const override { return backend_->memory(); }
  int max_chunks_in_flight() const override { return backend_->max_chunks_in_flight(); }
  absl::StatusOr<MemoryBytes> PlanHead(const HeadConfig& config) const override {
    return backend_->PlanHead(config);
  }
  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    return backend_->CreateHead(config);
  }
  absl::StatusOr<std::unique_ptr<StagingMemory>> AllocateStaging(int64_t bytes) override {
    return backend_->AllocateStaging(bytes);
  }
  absl::StatusOr<std::unique_ptr<RetainedMemory>> AllocateRetained(int64_t bytes) override {
    return backend_->AllocateRetained(bytes);
  }
  absl::Status PlanHostMemory(MemoryKind kind, int64_t bytes) override {
    return backend_->PlanHostMemory(kind, bytes);
  }

 protected:
  Backend* backend() const { return backend_.get(); }

 private:
  const std::unique_ptr<Backend> backend_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_TESTS_SERVER_APP_FORWARDING_BACKEND_H_
