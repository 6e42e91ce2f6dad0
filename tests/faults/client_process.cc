// SPDX-License-Identifier: Apache-2.0
// `fault_process client`: clients that compute until they are killed, which may be at any moment.
//
// Exit status: 0 after `calls` computations of each client, 1 after an error or a wrong result.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "tests/faults/fault_process.h"
#include "tests/faults/steady_client.h"

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

namespace lossd::test {
namespace {

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

}  // namespace lossd::test
