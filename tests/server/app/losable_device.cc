// SPDX-License-Identifier: Apache-2.0
// A GPU backend for a lossd program of the tests: it computes on the CPU, until the file that
// LOSSD_LOSE_DEVICE names exists. From then on the device is lost, and every operation fails as one on a lost
// GPU does.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/create_backend.h"
#include "tests/server/app/forwarding_backend.h"

namespace lossd::kernels {
namespace {

absl::Status Check() {
  static std::atomic<bool> lost{false};
  const char* const path = std::getenv("LOSSD_LOSE_DEVICE");
  if (path != nullptr && access(path, F_OK) == 0) lost = true;
  return lost ? absl::UnavailableError("cudaEventSynchronize failed: the device fell off the bus")
              : absl::OkStatus();
}

class LosableHead final : public ForwardingHead {
 public:
  using ForwardingHead::ForwardingHead;
  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override {
    if (absl::Status status = Check(); !status.ok()) {
      callbacks.on_results(status);
      callbacks.on_done(status);
      return;
    }
    ForwardingHead::Submit(chunk, std::move(callbacks));
  }
  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                          absl::Span<uint8_t> out) override {
    absl::Status status = Check();
    return status.ok() ? ForwardingHead::ReadTensor(id, row_begin, rows, dtype, out) : status;
  }
  absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                           absl::Span<const uint8_t> in) override {
    absl::Status status = Check();
    return status.ok() ? ForwardingHead::WriteTensor(id, row_begin, rows, dtype, in) : status;
  }
  absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                           absl::Span<const uint8_t> in) override {
    absl::Status status = Check();
    return status.ok() ? ForwardingHead::AddGradient(param, row_begin, rows, dtype, scale, in) : status;
  }
  absl::StatusOr<double> GradNorm() override {
    if (absl::Status status = Check(); !status.ok()) return status;
    return ForwardingHead::GradNorm();
  }
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update) override {
    absl::Status status = Check();
    return status.ok() ? ForwardingHead::ApplyStep(options, update) : status;
  }
  absl::Status ZeroGradients() override {
    absl::Status status = Check();
    return status.ok() ? ForwardingHead::ZeroGradients() : status;
  }
  absl::Status ZeroMoments() override {
    absl::Status status = Check();
    return status.ok() ? ForwardingHead::ZeroMoments() : status;
  }
};

class LosableBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  // A driver may hang when memory on a lost device is given back.
  ~LosableBackend() override {
    while (!Check().ok()) absl::SleepFor(absl::Seconds(1));
  }
  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    if (absl::Status status = Check(); !status.ok()) return status;
    auto head = ForwardingBackend::CreateHead(config);
    if (!head.ok()) return head.status();
    return std::make_unique<LosableHead>(*std::move(head));
  }
};

}  // namespace

// In place of that of the build.
absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice& choice) {
  CpuBackendOptions options;
  options.threads = 1;
  options.workspace_bytes = choice.workspace_bytes;
  auto backend = CreateCpuBackend(options);
  if (!backend.ok()) return backend.status();
  return std::make_unique<LosableBackend>(*std::move(backend));
}

absl::StatusOr<std::vector<std::string>> GpuUuidsOf(const std::string&) {
  return absl::UnavailableError("this device is not one of several ranks");
}

absl::StatusOr<std::unique_ptr<RankLink>> CreateGpuLink(const BackendChoice&, Backend*) {
  return absl::UnavailableError("this device has no link");
}

}  // namespace lossd::kernels
