// SPDX-License-Identifier: Apache-2.0
// Clients and trainers that are killed:
//   fault_process client|trainer [FLAG...]
//
// Exit status: 0 when it has done what its flags say, 1 after an error.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "client/cpp/client.h"
#include "tests/faults/small_run.h"

ABSL_FLAG(std::string, server, "", "host:port");

// Of clients.
ABSL_FLAG(int, clients, 1, "how many there are, each with memory of its own");
ABSL_FLAG(int, calls, 0, "how often each computes; 0: until it is killed");
ABSL_FLAG(std::vector<std::string>, rows, {"512"}, "microbatches of a computation, by their rows");
ABSL_FLAG(int64_t, region_bytes, 0, "of shared memory; 0: the client's choice");
ABSL_FLAG(std::string, ready, "",
          "file that is written when each client has computed once: what --forks says, or 0");
ABSL_FLAG(bool, forks, false,
          "forks while the second computation is under way; the child, whose number is written to "
          "--ready, stays and does nothing");
ABSL_FLAG(bool, dies, false, "at its end it is killed, without a word to the server");

// Of trainers.
ABSL_FLAG(uint64_t, seed, 0, "of the run");
ABSL_FLAG(std::string, state, "", "file with the trainer's state");
ABSL_FLAG(uint64_t, steps, 1, "train until so many steps are done");

namespace lossd::test {
namespace {

// `fault_process client`: clients that compute until they are killed, which may be at any moment.
//
// Exit status: 0 after `calls` computations of each client, 1 after an error or a wrong result.

void TellReady(pid_t child) {
  if (absl::GetFlag(FLAGS_ready).empty()) return;
  const std::string path = absl::GetFlag(FLAGS_ready), temporary = path + ".tmp";
  std::ofstream(temporary) << child << "\n";
  std::filesystem::rename(temporary, path);
}

pid_t Fork() {
  const pid_t child = fork();
  if (child != 0) return child;
  alarm(300);  // should nobody end it
  while (true) pause();
}

}  // namespace

absl::Status RunClients() {
  std::vector<uint64_t> rows;
  for (const std::string& count : absl::GetFlag(FLAGS_rows)) rows.push_back(std::stoull(count));
  const int64_t bytes = absl::GetFlag(FLAGS_region_bytes);
  std::vector<std::unique_ptr<SteadyClient>> clients;
  for (int i = 0; i < absl::GetFlag(FLAGS_clients); ++i) {
    auto client = SteadyClient::Connect(absl::GetFlag(FLAGS_server), rows,
                                        bytes == 0 ? std::nullopt : std::optional<int64_t>(bytes));
    if (!client.ok()) return client.status();
    if (absl::Status status = (*client)->Compute(); !status.ok()) return status;
    clients.push_back(*std::move(client));
  }
  pid_t child = 0;
  if (absl::GetFlag(FLAGS_forks)) {
    const absl::Status status = clients.front()->ComputeWhile([&child] { child = Fork(); });
    if (!status.ok()) return status;
  }
  TellReady(child);
  std::vector<absl::Status> results(clients.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < clients.size(); ++i) {
    threads.emplace_back([&, i] {
      const int calls = absl::GetFlag(FLAGS_calls);
      for (int call = 1; results[i].ok() && (calls == 0 || call < calls); ++call)
        results[i] = clients[i]->Compute();
    });
  }
  for (std::thread& thread : threads) thread.join();
  absl::Status status;
  for (const absl::Status& result : results) status.Update(result);
  if (status.ok() && absl::GetFlag(FLAGS_dies)) raise(SIGKILL);
  return status;
}

// `fault_process trainer`: a trainer that may be killed at any time and started again. Before it applies a
// step, it writes down that it is about to, with all it needs to go on from there; the server applies a step
// once, however often it is told to. So it never has to go back to a checkpoint because of its own death.
//
// Exit status: 0 after `steps` steps, 1 after an error.

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

int main(int argc, char** argv) {
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  const std::string kind = arguments.size() == 2 ? arguments[1] : "";
  if (kind != "client" && kind != "trainer") {
    std::cerr << "usage: fault_process client|trainer [FLAG...]\n";
    return 1;
  }
  const absl::Status status = kind == "client" ? lossd::test::RunClients() : lossd::test::RunTrainer();
  if (!status.ok()) std::cerr << "fault_process " << kind << ": " << status << "\n";
  return status.ok() ? 0 : 1;
}
