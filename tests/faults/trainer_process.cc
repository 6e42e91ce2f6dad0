// SPDX-License-Identifier: Apache-2.0
// `fault_process trainer`: a trainer that may be killed at any time and started again. Before it applies a
// step, it writes down that it is about to, with all it needs to go on from there; the server applies a step
// once, however often it is told to. So it never has to go back to a checkpoint because of its own death.
//
// Exit status: 0 after `steps` steps, 1 after an error.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/flags/flag.h"
#include "client/cpp/client.h"
#include "tests/faults/fault_process.h"
#include "tests/faults/small_run.h"

ABSL_FLAG(uint64_t, seed, 0, "of the run");
ABSL_FLAG(std::string, state, "", "file with the trainer's state");
ABSL_FLAG(uint64_t, steps, 1, "train until so many steps are done");

namespace lossd::test {
namespace {

// What the file holds: the state after a step, which is (still) to be applied or has been.
struct Note {
  bool apply = false;  // the step before this state is to be applied
  std::string state;
};

void Write(const Note& note) {
  const std::string path = absl::GetFlag(FLAGS_state), temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << note.state << (note.apply ? '1' : '0');
  file.close();
  std::filesystem::rename(temporary, path);
}

Note Read() {
  std::ifstream file(absl::GetFlag(FLAGS_state), std::ios::binary);
  Note note{.state = std::string(std::istreambuf_iterator<char>(file), {})};
  if (note.state.empty()) return note;
  note.apply = note.state.back() == '1';
  note.state.pop_back();
  return note;
}

absl::Status ComputeStep(SmallTrainer& trainer, client::Client& client) {
  std::vector<std::unique_ptr<SentMicrobatch>> sent;
  for (uint64_t id = 0; id < trainer.shape().microbatches; ++id) sent.push_back(trainer.Send(client, id, {}));
  for (uint64_t id = 0; id < trainer.shape().microbatches; ++id) {
    if (absl::Status status = trainer.Receive(id, *sent[id]); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunTrainer() {
  auto client = client::Client::Connect({.target = absl::GetFlag(FLAGS_server), .wait_for_server = true});
  if (!client.ok()) return client.status();
  SmallTrainer trainer(RunShape{.seed = absl::GetFlag(FLAGS_seed)});
  Note note = Read();
  if (!note.state.empty()) trainer.Decode(note.state);
  while (note.apply || trainer.step() < absl::GetFlag(FLAGS_steps)) {
    if (!note.apply) {
      if (absl::Status status = ComputeStep(trainer, **client); !status.ok()) return status;
      trainer.Advance();
      note = {.apply = true, .state = trainer.Encode()};
      Write(note);
    }
    const auto applied = (*client)->ApplyStep(trainer.StepRequest(trainer.step() - 1));
    if (!applied.ok()) return applied.status();
    note.apply = false;
    Write(note);
  }
  return absl::OkStatus();
}

}  // namespace lossd::test
