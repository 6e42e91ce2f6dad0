// SPDX-License-Identifier: Apache-2.0
// A rank in a process of its own, for tests: rank_worker_process RANK RANKS LEADER WORKSPACE_BYTES WAY
//
// Exit status: 0 when the leader has ended it, 3 when the leader is lost, 1 otherwise.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "server/ranks/worker.h"
#include "tests/server/ranks/rank_backend.h"

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const int rank = std::atoi(argv[1]);
  auto backend = lossd::ranks::testing::MakeRankBackend(
      {.rank = rank, .ranks = std::atoi(argv[2]), .workspace_bytes = std::atoll(argv[4]), .way = argv[5]});
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    return 1;
  }
  const auto worker = lossd::ranks::Worker::Create({.rank = rank,
                                                    .leader = argv[3],
                                                    .credentials = grpc::InsecureChannelCredentials(),
                                                    .limits = {.slice_bytes = 64 << 20}},
                                                   *std::move(backend));
  const absl::Status status = worker->Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  _exit(worker->joined() ? 3 : 1);
}
