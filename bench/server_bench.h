// SPDX-License-Identifier: Apache-2.0
// The commands of the program server_bench (see Command::run in command.h). The source file of each command
// says what it measures.
#ifndef LOSSD_BENCH_SERVER_BENCH_H_
#define LOSSD_BENCH_SERVER_BENCH_H_

namespace lossd::bench {

int RunServiceBench(int argc, char** argv);
int RunCheckpointBench(int argc, char** argv);
int RunPartsBench(int argc, char** argv);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_SERVER_BENCH_H_
