// SPDX-License-Identifier: Apache-2.0
// The trainer's checkpoint: what stage one needs to go on after a step, and which checkpoint of the server
// goes with it. A safetensors file.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_TRAINER_STATE_H_
#define LOSSD_EXAMPLES_NGRAM_LM_TRAINER_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/ngram_lm/adam.h"

namespace lossd::ngram_lm {

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

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_TRAINER_STATE_H_
