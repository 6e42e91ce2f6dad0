// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/persistence.h"

#include "absl/strings/str_format.h"

namespace lossd::ngram_lm {
namespace {

// The server answers no more, or it is another process that knows nothing of the step or the head.
bool ServerWasLost(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status) || absl::IsNotFound(status);
}

// The head first: once the trainer's file names a checkpoint, it is there.
absl::Status Save(const std::string& path, const Trainer& trainer, RemoteHead* head) {
  absl::StatusOr<std::string> checkpoint = head->Save();
  if (!checkpoint.ok()) return checkpoint.status();
  TrainerState state = trainer.State();
  state.checkpoint = *std::move(checkpoint);
  return SaveState(state, path);
}

absl::Status GoBack(const PersistenceOptions& persistence, Trainer* trainer, RemoteHead* head) {
  const absl::StatusOr<TrainerState> state = LoadState(persistence.state_file);
  if (!state.ok()) return state.status();
  if (absl::Status status = head->GoBack(state->checkpoint, persistence.server_patience); !status.ok())
    return status;
  return trainer->Restore(*state);
}

}  // namespace

absl::StatusOr<RunResult> RunPersistently(const PersistenceOptions& persistence, const RunOptions& options,
                                          absl::Span<const int32_t> held_out, Trainer* trainer,
                                          RemoteHead* head, FILE* out, const StepObserver& on_step) {
  const auto save_and_tell = [&](int64_t step, double loss) {
    if (on_step != nullptr) {
      if (absl::Status status = on_step(step, loss); !status.ok()) return status;
    }
    if (step % persistence.save_every != 0 && step != options.steps) return absl::OkStatus();
    return Save(persistence.state_file, *trainer, head);
  };
  if (trainer->steps() == 0) {
    if (absl::Status status = Save(persistence.state_file, *trainer, head); !status.ok()) return status;
  }
  while (true) {
    absl::StatusOr<RunResult> run = RunTraining(options, held_out, trainer, out, save_and_tell);
    if (run.ok() || !ServerWasLost(run.status())) return run;
    absl::FPrintF(out, "lost the server after step %d: %s\n", trainer->steps(), run.status().ToString());
    if (absl::Status status = GoBack(persistence, trainer, head); !status.ok()) return status;
    absl::FPrintF(out, "the server is back; both go on from step %d\n", trainer->steps());
  }
}

}  // namespace lossd::ngram_lm
