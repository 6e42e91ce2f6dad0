// SPDX-License-Identifier: Apache-2.0
// Matrix products through cuBLASLt, fp32 accumulation, one algorithm per shape for the life of the object.
//
// cuBLASLt is loaded at run time, so that a program linked with this library starts without it.
// Not thread-safe; one Gemms per backend, used by its driving thread.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_GEMM_H_
#define LOSSD_KERNELS_CUDA_DEVICE_GEMM_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// C[m, n] = alpha * op(A) * op(B) + beta * C, column-major, op(A) [m, k], op(B) [k, n]. A and B have
// the dtype `input`, C has `output`; fp32 inputs are multiplied as fp32 (no TF32).
struct GemmShape {
  bool transpose_a = false;
  bool transpose_b = false;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t lda = 0;  // elements between columns, as stored
  int64_t ldb = 0;
  int64_t ldc = 0;
  DType input = DType::kBFloat16;
  DType output = DType::kBFloat16;
  bool scratch = true;  // whether scratch memory may be used

  // The dimension that is rows of a chunk: of a product whose B is transposed the one that it sums over.
  int64_t& rows() { return transpose_b ? k : n; }
  int64_t rows() const { return transpose_b ? k : n; }

  friend auto operator<=>(const GemmShape&, const GemmShape&) = default;
};

struct GemmOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  float alpha = 1.0f;
  float beta = 0.0f;
};

class Gemms {
 public:
  // UNAVAILABLE if cuBLASLt cannot be loaded or refuses to start.
  static absl::StatusOr<std::unique_ptr<Gemms>> Create();
  ~Gemms();

  // From now on a product over any number of rows is several over powers of two rows, one after the other. A
  // shape that has not been computed yet may have to load code, which waits for all work on the GPU
  // (kernel_code.h); so there are few of them, and all can be computed once beforehand.
  void TakeSteps() { takes_steps_ = true; }
  // While on, a product is computed with other factors first, too, whose code may be another, so that C is
  // overwritten.
  void LoadCode(bool on) { loads_code_ = on; }
  // Chooses the algorithm for `shape`, if that has not been done. INTERNAL if cuBLAS has none.
  absl::Status Prepare(const GemmShape& shape);
  // Enqueues one product. `workspace` is [kGemmWorkspaceBytes] on the device, or null without scratch.
  absl::Status Run(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                   cudaStream_t stream);
  // The algorithm chosen for `shape`, which must have been prepared (of several steps, for the first);
  // without `what`.
  Choice Describe(const GemmShape& shape) const;
  // Times the candidates for `shape`, or its first step, on these operands (C is overwritten) and keeps the
  // fastest.
  absl::Status Tune(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                    cudaStream_t stream);

 private:
  struct Library;
  struct Plan;

  Gemms();
  absl::StatusOr<Plan*> FindOrCreate(const GemmShape& shape);
  // The shapes that are computed for this one, the largest first.
  GemmShape FirstStep(GemmShape shape) const;
  absl::Status ForEachStep(GemmShape shape, absl::FunctionRef<absl::Status(const GemmShape&)> body);
  absl::Status RunStep(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                       cudaStream_t stream);
  absl::StatusOr<double> Time(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                              cudaStream_t stream);

  std::unique_ptr<Library> library_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<GemmShape, std::unique_ptr<Plan>> plans_;
  bool takes_steps_ = false;
  bool loads_code_ = false;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_GEMM_H_
