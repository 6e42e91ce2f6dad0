// The parameters of a head on the CPU, with their gradients and moments: reads, writes, sums and the step of
// the optimizer. Tensors and dimensions as in kernels/head_config.h.
#ifndef LOSSD_KERNELS_CPU_CPU_PARAMS_H_
#define LOSSD_KERNELS_CPU_CPU_PARAMS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cpu/head_buffers.h"
#include "kernels/cpu/parallel_for.h"

namespace lossd::kernels {

// The members have the contracts that HeadKernels states for them, thread-safety included. Borrows the pool
// and the arenas that the buffers point into.
class CpuParams {
 public:
  CpuParams(const HeadConfig& config, ThreadPool* pool, const HeadBuffers& buffers)
      : config_(config), pool_(pool), buffers_(buffers) {}

  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype, absl::Span<uint8_t> out);
  absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                           absl::Span<const uint8_t> in);
  absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                           absl::Span<const uint8_t> in);
  absl::StatusOr<double> GradNorm();
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update);
  absl::Status ZeroGradients();

 private:
  float* gradient(Param param) const { return buffers_.tensor({param, Role::kGradient}); }

  const HeadConfig config_;
  ThreadPool* const pool_;
  const HeadBuffers buffers_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_PARAMS_H_
