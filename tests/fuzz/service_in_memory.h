// SPDX-License-Identifier: Apache-2.0
// ServiceInMemory: the server without its transport. Calls are converted and checked by the service's own
// code, and go into an engine with the CPU backend and little memory. After each call, the state of the
// server must agree with the answer. A refused call must not have changed or reserved anything.
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
  // `folder` is for checkpoints and tensor files.
  explicit ServiceInMemory(const std::string& folder);

  // Makes the call, and checks its effects as far as they can be known.
  void Run(const Call& call);
  admin::HeadOperations& operations() { return *operations_; }

 private:
  absl::Status RunUnary(const Call& call);
  absl::Status WriteTensor(const fuzz::WriteTensor& write);
  absl::Status ReadTensor(const v1::ReadTensorRequest& request);
  absl::Status AddGradient(const fuzz::AddGradient& add);
  // ComputeLoss and Backward return the status at the end of the stream. `opened` is false if the call was
  // refused before.
  absl::Status ComputeLoss(const fuzz::ComputeLoss& call, bool* opened);
  absl::Status Backward(const v1::OpenBackward& open, bool* opened);

  absl::Status CheckIncarnation(bool has, absl::string_view field, uint64_t meant) const;
  // Everything that a refused call must not change, as text: heads, steps, ledgers, memory, tensors.
  std::string Books();
  std::string Tensors(const std::string& name, const kernels::HeadConfig& config);
  int64_t StepRows(const std::string& head);
  // The hidden size of the teacher that a call names; 0 if it names none.
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
