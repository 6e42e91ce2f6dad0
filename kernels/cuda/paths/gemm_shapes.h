// SPDX-License-Identifier: Apache-2.0
// The shapes of a head's GEMMs over `rows` padded rows and `classes` padded classes. Pure functions.
#ifndef LOSSD_KERNELS_CUDA_PATHS_GEMM_SHAPES_H_
#define LOSSD_KERNELS_CUDA_PATHS_GEMM_SHAPES_H_

#include <cstdint>

#include "kernels/cuda/device/gemm.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

struct GemmShapes {
  int64_t padded_hidden = 0;
  DType compute = DType::kBFloat16;
  bool scratch = true;  // whether the GEMMs may use scratch memory

  // Z = X W^T in fp32.
  GemmShape Logits(int64_t rows, int64_t classes) const {
    return {.transpose_a = true,
            .m = classes,
            .n = rows,
            .k = padded_hidden,
            .lda = padded_hidden,
            .ldb = padded_hidden,
            .ldc = classes,
            .input = compute,
            .output = DType::kFloat32,
            .scratch = scratch};
  }
  // dX = dZ W in `output`; rows of dZ are `ld` elements apart.
  GemmShape HiddenGradient(int64_t rows, int64_t classes, int64_t ld, DType output) const {
    return {.m = padded_hidden,
            .n = rows,
            .k = classes,
            .lda = padded_hidden,
            .ldb = ld,
            .ldc = padded_hidden,
            .input = compute,
            .output = output,
            .scratch = scratch};
  }
  GemmShape HiddenGradient(int64_t rows, int64_t classes, DType output) const {
    return HiddenGradient(rows, classes, classes, output);
  }
  // dW = dZ^T X in fp32; likewise.
  GemmShape WeightGradient(int64_t rows, int64_t classes, int64_t ld) const {
    return {.transpose_b = true,
            .m = padded_hidden,
            .n = classes,
            .k = rows,
            .lda = padded_hidden,
            .ldb = ld,
            .ldc = padded_hidden,
            .input = compute,
            .output = DType::kFloat32,
            .scratch = scratch};
  }
  GemmShape WeightGradient(int64_t rows, int64_t classes) const {
    return WeightGradient(rows, classes, classes);
  }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_GEMM_SHAPES_H_
