// SPDX-License-Identifier: Apache-2.0
// Gemms: matrix products through cuBLASLt, with fp32 accumulation. It chooses one algorithm for each shape
// and keeps it for the life of the object.
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

// C[m, n] = alpha * op(A) * op(B) + beta * C. Column-major; op(A) is [m, k], op(B) is [k, n]. A and B have
// the dtype `input`, C has the dtype `output`. fp32 inputs are multiplied as fp32 (no TF32).
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

  // The dimension that is the rows of a chunk: k if B is transposed (the product sums over the rows), else n.
  int64_t& rows() { return transpose_b ? k : n; }
  int64_t rows() const { return transpose_b ? k : n; }

  friend auto operator<=>(const GemmShape&, const GemmShape&) = default;
};

// The operands of one product: matrices on the device, and the factors alpha and beta.
struct GemmOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  float alpha = 1.0f;
  float beta = 0.0f;
};

// Computes products of any shape on one GPU, and remembers the algorithm of each shape.
class Gemms {
 public:
  // For the calling thread's current GPU. UNAVAILABLE if cuBLASLt cannot be loaded or refuses to start.
  static absl::StatusOr<std::unique_ptr<Gemms>> Create();
  ~Gemms();

  // From now on, a product over any number of rows is computed as several products, each over a power of two
  // rows. The first use of a shape may have to load code, which waits for all work on the GPU
  // (kernel_code.h). With TakeSteps there are few shapes, and all of them can be computed once in advance.
  void TakeSteps() { takes_steps_ = true; }
  // While on, Run first computes each product with other values of alpha and beta, because cuBLASLt may use
  // other code for them. C is overwritten.
  void LoadCode(bool on) { loads_code_ = on; }
  // Chooses the algorithm for `shape`, if that has not been done. INTERNAL if cuBLAS has none.
  absl::Status Prepare(const GemmShape& shape);
  // Enqueues one product. `workspace` is [kGemmWorkspaceBytes] on the device, or null without scratch.
  absl::Status Run(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                   cudaStream_t stream);
  // The algorithm chosen for `shape`, without `what`. The shape must have been prepared. If it is computed in
  // steps, the algorithm of the first step.
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
  // The first product that is computed for `shape`: its own shape, or the largest step.
  GemmShape FirstStep(GemmShape shape) const;
  absl::Status ForEachStep(GemmShape shape, absl::FunctionRef<absl::Status(const GemmShape&)> body);
  absl::Status RunStep(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                       cudaStream_t stream);
  absl::StatusOr<double> Time(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                              cudaStream_t stream);

  std::unique_ptr<Library> library_;
  cublasLtHandle_t handle_ = nullptr;
  int32_t weight_gradient_multiprocessors_ = 0;  // the most that a product takes that sums over rows
  std::map<GemmShape, std::unique_ptr<Plan>> plans_;
  bool takes_steps_ = false;
  bool loads_code_ = false;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_GEMM_H_
