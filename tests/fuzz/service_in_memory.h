// SPDX-License-Identifier: Apache-2.0
// The server without its transport: calls go through the service's own conversion and checks into an engine
// with the CPU backend and little memory. After each call the books must agree with its answer; a refused
// call has changed and booked nothing.
#ifndef LOSSD_TESTS_FUZZ_SERVICE_IN_MEMORY_H_
#define LOSSD_TESTS_FUZZ_SERVICE_IN_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "server/admin/head_operations.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "tests/fuzz/session.pb.h"

namespace lossd::fuzz {

// Thread-compatible.
class ServiceInMemory {
 public:
  // `folder`: of checkpoints and tensor files.
  explicit ServiceInMemory(const std::string& folder);

  // Makes the call and checks what can be known of its effect.
  void Run(const Call& call);
  admin::HeadOperations& operations() { return *operations_; }

 private:
  absl::Status RunUnary(const Call& call);
  absl::Status WriteTensor(const fuzz::WriteTensor& write);
  absl::Status ReadTensor(const v1::ReadTensorRequest& request);
  absl::Status AddGradient(const fuzz::AddGradient& add);
  // These two end with the status of the stream; `opened` says whether the call was refused before it.
  absl::Status ComputeLoss(const fuzz::ComputeLoss& call, bool* opened);
  absl::Status Backward(const v1::OpenBackward& open, bool* opened);

  absl::Status CheckIncarnation(bool has, absl::string_view field, uint64_t meant) const;
  // Everything that a refused call must leave alone, as text: heads, steps, ledgers, memory, tensors.
  std::string Books();
  std::string Tensors(const std::string& name, const kernels::HeadConfig& config);
  int64_t StepRows(const std::string& head);
  // The hidden size of the teacher that a call names; 0 without one.
  int64_t TeacherWidth(const v1::OpenMicrobatch& open);
  void CheckRefusal(const absl::Status& status) const;
  void CheckSummary(const engine::StreamSummary& summary, const std::string& head, int64_t rows_before,
                    bool accumulates);
  void CheckIdle() const;

  std::unique_ptr<kernels::Backend> backend_;
  metrics::Metrics metrics_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<admin::HeadOperations> operations_;
  std::string books_;  // after the last call
};

}  // namespace lossd::fuzz

#endif  // LOSSD_TESTS_FUZZ_SERVICE_IN_MEMORY_H_
