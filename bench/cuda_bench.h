// SPDX-License-Identifier: Apache-2.0
// The commands of the program cuda_bench (see Command::run in command.h). The source file of each command
// says what it measures.
#ifndef LOSSD_BENCH_CUDA_BENCH_H_
#define LOSSD_BENCH_CUDA_BENCH_H_

namespace lossd::bench {

int RunCudaLossBench(int argc, char** argv);
int RunCudaOptimizerBench(int argc, char** argv);
int RunCudaEmbeddingBench(int argc, char** argv);
int RunHopperBench(int argc, char** argv);
int RunCudaLossProbe(int argc, char** argv);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_CUDA_BENCH_H_
