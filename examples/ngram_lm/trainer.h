// SPDX-License-Identifier: Apache-2.0
// Trainer trains a language model in two stages: stage one (model.h) runs in this process, and its
// classifier, the loss head, on a lossd server. trainer.cc shows every call to the server that training
// needs: create the head, send hidden states and receive their gradients, apply a step, save the head, and
// load it again.
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
  // The safetensors file into which Save writes the trainer's state. Empty: the training cannot be resumed.
  std::string state_file;
  StageOneShape shape;
  int64_t microbatches = 4;       // the microbatches of a step
  int64_t microbatch_rows = 256;  // tokens of a microbatch
  float learning_rate = 4e-3f;    // the largest learning rate of stage one
  double head_learning_rate = 8e-3;
};

// The factor of the learning rates when the fraction `done` in [0, 1] of the training is over: a short linear
// warm-up, then half a cosine down to 0.05.
double RateMultiplier(double done);

// Whether an error means that the server cannot be reached, or that it was restarted and has neither the head
// nor the gradients of the open step. Then the caller should call Trainer::GoBack.
bool ServerWasLost(const absl::Status& status);

// A training run of both stages. Not thread-safe.
class Trainer {
 public:
  // Connects to the server. If the state file exists, both stages continue from it (GoBack). Otherwise Open
  // creates the head with random weights; ALREADY_EXISTS if the server has a head of this name. `text` must
  // outlive the trainer. Both parts of the text must be longer than the context.
  static absl::StatusOr<std::unique_ptr<Trainer>> Open(const TrainerOptions& options, const Text* text);

  // One step of both stages: computes all microbatches, then updates the parameters. Returns the mean loss
  // (nats a token) before the update. After an error the caller must call GoBack or end the training.
  absl::StatusOr<double> Step(double rate_multiplier);
  // The mean loss over at most `rows` tokens of the held-out text, evenly spaced.
  absl::StatusOr<double> Evaluate(int64_t rows);

  // Saves the state of both stages between two steps.
  absl::Status Save();
  // Returns both stages to the last Save. The server may have been restarted meanwhile; GoBack waits for it
  // up to `patience`. INVALID_ARGUMENT if the state file belongs to other data or another model.
  absl::Status GoBack(absl::Duration patience = absl::Minutes(1));

  absl::Status DeleteHead() { return client_->DeleteHead(options_.head); }

  int64_t steps() const { return adam_.steps; }
  int64_t tokens_per_step() const { return options_.microbatches * options_.microbatch_rows; }
  StageOne& stage_one() { return stage_one_; }

 private:
  // A microbatch in flight. Members are destroyed in reverse order, so the call ends before its buffers are
  // freed.
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

  // A text that names everything that must be the same when a training is resumed.
  std::string Identity() const;
  absl::Status WriteState(const std::string& checkpoint);
  // Reads the state into this trainer. Returns the name of the head's checkpoint that belongs to it.
  absl::StatusOr<std::string> ReadState();

  const TrainerOptions options_;
  const Text* const text_;
  const std::unique_ptr<client::Client> client_;
  StageOne stage_one_;
  Adam adam_;  // adam_.steps counts the steps of the training
};

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_TRAINER_H_
