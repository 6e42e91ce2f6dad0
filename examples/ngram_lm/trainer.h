// SPDX-License-Identifier: Apache-2.0
// Trains a language model in two stages: stage one (model.h) in this process, its classifier, the loss head,
// on a lossd server. trainer.cc has every call to the server that a training needs: it creates the head,
// sends hidden states and gets their gradients, steps the head, saves it, and loads it again.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_TRAINER_H_
#define LOSSD_EXAMPLES_NGRAM_LM_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "examples/ngram_lm/model.h"

namespace lossd::ngram_lm {

struct TrainerOptions {
  std::string server = "127.0.0.1:7070";
  std::string head = "demo";
  // Where Save writes the trainer's state, a safetensors file; empty: the training cannot be resumed.
  std::string state_file;
  StageOneShape shape;
  int64_t microbatches = 4;       // a step
  int64_t microbatch_rows = 256;  // tokens
  float learning_rate = 4e-3f;    // of stage one, at the peak of the schedule
  double head_learning_rate = 8e-3;
};

// Multiplies the learning rates when the part `done` in [0, 1] of the training is over: a short linear
// warm-up, then half a cosine down to 0.05.
double RateMultiplier(double done);

// Whether an error says that the server is gone, or is another process, which has neither the head nor the
// gradients of the open step. GoBack is what helps.
bool ServerWasLost(const absl::Status& status);

// Not thread-safe.
class Trainer {
 public:
  // Connects to the server. If there is a state file, both stages go on from there (GoBack); otherwise the
  // head is created with random weights: ALREADY_EXISTS if the server has one of this name. `text` outlives
  // the trainer; both of its parts are longer than the context.
  static absl::StatusOr<std::unique_ptr<Trainer>> Open(const TrainerOptions& options, const Text* text);

  // One step of both stages: all microbatches, then the updates. Returns the mean loss (nats a token) before
  // the update. After an error the trainer has to go back, or end.
  absl::StatusOr<double> Step(double rate_multiplier);
  // The mean loss over at most `rows` tokens of the held-out text, evenly spaced.
  absl::StatusOr<double> Evaluate(int64_t rows);

  // Saves both stages as they stand between two steps.
  absl::Status Save();
  // Returns both stages to the last Save, on a server that may have been started again meanwhile: waits for
  // it up to `patience`. INVALID_ARGUMENT if the file is of a training with other data or another model.
  absl::Status GoBack(absl::Duration patience = absl::Minutes(1));

  absl::Status DeleteHead() { return client_->DeleteHead(options_.head); }

  int64_t steps() const { return adam_.steps; }
  int64_t tokens_per_step() const { return options_.microbatches * options_.microbatch_rows; }
  StageOne& stage_one() { return stage_one_; }

 private:
  // A microbatch under way. The members go in the reverse order: the call ends before its buffers.
  struct Slot {
    Activations activations;
    std::vector<float> grad_hidden;  // [N, D]
    client::PendingLoss loss;
  };

  Trainer(const TrainerOptions& options, const Text* text, std::unique_ptr<client::Client> client);
  absl::Status CreateHead();
  void Send(int64_t index, Slot* slot);
  absl::StatusOr<double> Receive(Slot* slot);
  absl::Status ApplyStep(double learning_rate);

  // Names what must be the same when a training is resumed.
  std::string Identity() const;
  absl::Status WriteState(const std::string& checkpoint);
  // Reads the state into this trainer, and the name of the head's checkpoint that belongs to it.
  absl::StatusOr<std::string> ReadState();

  const TrainerOptions options_;
  const Text* const text_;
  const std::unique_ptr<client::Client> client_;
  StageOne stage_one_;
  Adam adam_;  // its steps are those of the training
};

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_TRAINER_H_
