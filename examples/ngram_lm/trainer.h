// SPDX-License-Identifier: Apache-2.0
// Trains stage one against a head, several microbatches a step, pipelined: while the head works on one
// microbatch, stage one runs the next one forward or an earlier one backward. Also the file in which a
// trainer keeps its state (TrainerState).
#ifndef LOSSD_EXAMPLES_NGRAM_LM_TRAINER_H_
#define LOSSD_EXAMPLES_NGRAM_LM_TRAINER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/ngram_lm/loss_head.h"
#include "examples/ngram_lm/model.h"

namespace lossd::ngram_lm {

// The trainer's checkpoint: what stage one needs to go on after a step, and which checkpoint of the server
// goes with it. It is stored as a safetensors file.
struct TrainerState {
  // What must not change between the runs that a training consists of.
  uint64_t seed = 0;  // of the order of the text
  int64_t tokens_per_step = 0;
  int64_t train_tokens = 0;  // in all
  // Where it stands.
  std::vector<float> parameters;  // of stage one
  Adam::State adam;               // its steps are those of the training
  std::string checkpoint;         // of the head after the same step, as the server named it
};

// Replaces the file at once: whatever happens, it holds this state or the one before.
absl::Status SaveState(const TrainerState& state, const std::string& path);

// NOT_FOUND if there is no file, DATA_LOSS or INVALID_ARGUMENT if it is not such a state.
absl::StatusOr<TrainerState> LoadState(const std::string& path);

struct TrainerOptions {
  int64_t microbatches = 4;       // a step
  int64_t microbatch_rows = 256;  // tokens
  int64_t in_flight = 2;          // microbatches the head has at a time, at most; >= 1
  uint64_t seed = 1;              // of the order of the text
};

// Not thread-safe. `model` and `head` must outlive the trainer.
class Trainer {
 public:
  // `train` holds the tokens to learn, at least one, each in [0, padding); contexts that reach before the
  // first one hold `padding`, a token of the model that is no class of the head.
  Trainer(const TrainerOptions& options, std::vector<int32_t> train, int32_t padding, StageOne* model,
          LossHead* head);
  ~Trainer();

  // One step of both stages; the mean loss (nats a token) before the update. After an error the trainer must
  // not be used again before Restore.
  absl::StatusOr<double> Step(float learning_rate, double head_learning_rate);

  // Mean loss over at most max_tokens evenly spaced tokens of `tokens`, which must not be empty.
  absl::StatusOr<double> Evaluate(absl::Span<const int32_t> tokens, int64_t max_tokens);

  // Appends `count` tokens, each the most likely one, to every sequence.
  absl::Status Continue(int64_t count, std::vector<std::vector<int32_t>>* sequences);

  // What SaveState takes; its checkpoint is the caller's to name.
  TrainerState State() const;
  // Goes on from there. INVALID_ARGUMENT naming what differs if it is the state of another training; then
  // nothing has changed. The head has to stand at the same step.
  absl::Status Restore(const TrainerState& state);

  int64_t steps() const { return adam_.state().steps; }
  int64_t tokens_per_step() const { return options_.microbatches * options_.microbatch_rows; }
  double epochs() const { return order_.epochs(); }

 private:
  // A microbatch under way.
  struct Slot {
    Activations activations;
    std::vector<int32_t> targets;
    std::vector<float> grad_hidden;  // [N, D]
    LossHead::Ticket ticket;
  };

  void Send(int64_t index);
  // Waits for the gradient of microbatch `index` and runs stage one backward; its summed loss.
  absl::StatusOr<double> Receive(int64_t index);

  const TrainerOptions options_;
  const std::vector<int32_t> train_;
  const int32_t padding_;
  StageOne* const model_;
  LossHead* const head_;
  Adam adam_;
  Shuffler order_;
  std::vector<Slot> slots_;  // [microbatches]
};

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_TRAINER_H_
