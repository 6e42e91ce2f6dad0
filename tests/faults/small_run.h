// SPDX-License-Identifier: Apache-2.0
// A training run that is small enough to be repeated a thousand times and hangs on every bit the server
// answers: its hidden states are the trainer's parameters and move against dL/dx, so an error of one bit
// stays for good. All of it follows from a seed, so two runs can be compared after any step.
//
// All classes here are thread-compatible.
#ifndef LOSSD_TESTS_FAULTS_SMALL_RUN_H_
#define LOSSD_TESTS_FAULTS_SMALL_RUN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "tests/faults/gpu_rows.h"
#include "tests/support/server_process.h"

namespace lossd::test {

struct RunShape {
  std::string head = "head";
  uint64_t hidden_size = 32;       // D
  uint64_t vocab_size = 257;       // V
  uint64_t microbatches = 3;       // a step
  uint64_t microbatch_rows = 160;  // N
  uint64_t seed = 0;
};

// The head of such a run: bias, RMSNorm and Adam state, with weights of the run's seed.
v1::CreateHeadRequest HeadOf(const RunShape& shape);

// How a microbatch travels, which makes no difference to what comes of it.
struct Travel {
  int streams = 2;
  uint64_t slice_bytes = 32 * 32 * sizeof(float);  // 32 rows
};

// A microbatch under way and its results.
struct SentMicrobatch {
  std::vector<float> row_loss;                              // [N]
  std::vector<float> grad_hidden;                           // [N, D]
  std::unique_ptr<GpuRows> hidden_on_gpu, gradient_on_gpu;  // null: rows are on the host
  client::PendingLoss pending;                              // ends before the memory does
};

class SmallTrainer {
 public:
  explicit SmallTrainer(const RunShape& shape);

  uint64_t step() const { return step_; }  // the one to be trained next
  const RunShape& shape() const { return shape_; }

  // Starts microbatch `id` of the step. The trainer must not change before it is done.
  std::unique_ptr<SentMicrobatch> Send(client::Client& client, uint64_t id, const Travel& travel) const;
  // Waits for a microbatch and keeps its results; INTERNAL if they differ in a bit from earlier ones of the
  // step.
  absl::Status Receive(uint64_t id, SentMicrobatch& sent);
  // Whether the microbatch is done as far as the trainer knows.
  bool received(uint64_t id) const { return received_[id]; }
  // The server has lost the step: all its microbatches are to be sent again.
  void Repeat();

  // Of the step under way, or of an earlier one.
  v1::ApplyStepRequest StepRequest(uint64_t step) const;
  v1::ApplyStepRequest StepRequest() const { return StepRequest(step_); }
  // Moves the hidden states. To be called when all microbatches were received; then the step is the next one.
  void Advance();

  // The trainer's checkpoint.
  std::string Encode() const;
  void Decode(absl::string_view state);

  // [N, D] each; and the losses of the last step, [N] each.
  const std::vector<std::vector<float>>& hidden() const { return hidden_; }
  const std::vector<std::vector<float>>& last_losses() const { return last_losses_; }

 private:
  std::vector<int32_t> Targets(uint64_t id) const;

  RunShape shape_;
  uint64_t step_ = 0;
  std::vector<std::vector<float>> hidden_;
  std::vector<std::vector<float>> last_losses_;
  // The step under way, by microbatch. Results stay for comparison when they are to be received again.
  std::vector<bool> received_;
  std::vector<std::vector<float>> losses_;
  std::vector<std::vector<float>> gradients_;
};

// Sends all microbatches not received yet at once, receives them, applies the step and advances. After an
// error nothing is under way, and calling it again goes on.
absl::Status TrainStep(SmallTrainer& trainer, client::Client& client, const Travel& travel = {});

// Everything that training has brought about.
struct RunImage {
  uint64_t step = 0;  // the head's open step
  std::map<std::string, std::vector<float>>
      tensors;  // the head's values and moments; the trainer's parameters
};
absl::StatusOr<RunImage> TakeImage(const SmallTrainer& trainer, client::Client& client,
                                   const RunShape& shape);
// Empty if both are the same, bit for bit; else says where they differ first.
std::string Difference(const RunImage& got, const RunImage& want);

// The run as it should be, on a server of its own without disturbances.
class UndisturbedRun {
 public:
  UndisturbedRun(const RunShape& shape, const std::string& lossd, const std::vector<std::string>& flags);
  // The image after so many steps. Those of the last steps asked for are kept.
  const RunImage& After(uint64_t steps);

 private:
  const RunShape shape_;
  ServerProcess server_;
  std::unique_ptr<client::Client> client_;
  SmallTrainer trainer_;
  std::map<uint64_t, RunImage> images_;  // by steps
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_FAULTS_SMALL_RUN_H_
