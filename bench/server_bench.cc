// SPDX-License-Identifier: Apache-2.0
// The main program of the benchmarks of a server and of its parts, such as `server_bench service
// --rows=1024`.
#include "bench/server_bench.h"

#include "bench/command.h"

int main(int argc, char** argv) {
  static constexpr lossd::bench::Command kCommands[] = {
      {"service", "rows per second of the kernels, the engine and the whole service",
       lossd::bench::RunServiceBench},
      {"checkpoint", "how fast a head is saved and loaded", lossd::bench::RunCheckpointBench},
      {"parts", "parts of a server on the CPU: a chunk, and the ledger", lossd::bench::RunPartsBench},
  };
  return lossd::bench::RunCommand(argc, argv, kCommands);
}
