// SPDX-License-Identifier: Apache-2.0
// A training that goes on after the death of its trainer or of its server: both write down where they stand
// after every so many steps, and go back there together.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_PERSISTENCE_H_
#define LOSSD_EXAMPLES_NGRAM_LM_PERSISTENCE_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "examples/ngram_lm/remote_head.h"
#include "examples/ngram_lm/trainer.h"
#include "examples/ngram_lm/training_run.h"

namespace lossd::ngram_lm {

struct PersistenceOptions {
  std::string state_file;                             // the trainer's state, see trainer.h
  int64_t save_every = 50;                            // steps; the last one is always saved
  absl::Duration server_patience = absl::Minutes(1);  // how long to wait for a server that is gone
};

// As RunTraining, with RunOptions::steps given: saves both sides on the way, the start included, and goes on
// from the last save when the server is lost.
absl::StatusOr<RunResult> RunPersistently(const PersistenceOptions& persistence, const RunOptions& options,
                                          absl::Span<const int32_t> held_out, Trainer* trainer,
                                          RemoteHead* head, FILE* out, const StepObserver& on_step);

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_PERSISTENCE_H_
