// SPDX-License-Identifier: Apache-2.0
// The main program of the benchmarks of the CUDA backend, such as `cuda_bench loss --shapes=gemma2-2b`. They
// need a GPU.
#include "bench/cuda_bench.h"

#include "bench/command.h"

int main(int argc, char** argv) {
  static constexpr lossd::bench::Command kCommands[] = {
      {"loss", "the loss with gradients, beside the three bare products", lossd::bench::RunCudaLossBench},
      {"optimizer", "the optimizer's pass, the gradient norm and the addition of gradients",
       lossd::bench::RunCudaOptimizerBench},
      {"embedding", "the rows of an embedding and their gradients, beside copies",
       lossd::bench::RunCudaEmbeddingBench},
      {"hopper", "the kernels for Hopper one by one, beside the products of cuBLASLt",
       lossd::bench::RunHopperBench},
      {"probe", "computes one microbatch from files, for tests/kernels/cuda/compare_torch.py",
       lossd::bench::RunCudaLossProbe},
  };
  return lossd::bench::RunCommand(argc, argv, kCommands);
}
