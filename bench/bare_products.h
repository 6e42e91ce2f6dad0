// SPDX-License-Identifier: Apache-2.0
// The three bare products of a loss with gradients, and the row loss between them, each on its own.
#ifndef LOSSD_BENCH_BARE_PRODUCTS_H_
#define LOSSD_BENCH_BARE_PRODUCTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/gpu_data.h"
#include "bench/gpu_timer.h"
#include "kernels/cuda/device/gemm.h"
#include "kernels/cuda/kernels/row_loss.h"

namespace lossd::bench {

inline kernels::cuda::GemmShape LogitsGemm(const DataShape& s, int64_t rows) {
  return {.transpose_a = true,
          .m = s.vocab,
          .n = rows,
          .k = s.hidden,
          .lda = s.hidden,
          .ldb = s.hidden,
          .ldc = s.vocab};
}
inline kernels::cuda::GemmShape HiddenGemm(const DataShape& s, int64_t rows) {
  return {.m = s.hidden, .n = rows, .k = s.vocab, .lda = s.hidden, .ldb = s.vocab, .ldc = s.hidden};
}
inline kernels::cuda::GemmShape WeightGemm(const DataShape& s, int64_t rows, kernels::DType output) {
  return {.transpose_b = true,
          .m = s.hidden,
          .n = s.vocab,
          .k = rows,
          .lda = s.hidden,
          .ldb = s.vocab,
          .ldc = s.hidden,
          .input = kernels::DType::kBFloat16,
          .output = output};
}

// Buffers for the products of `rows` rows at once, and what times them. `data` and `timer` outlive it.
class BareProducts {
 public:
  BareProducts(const DataShape& shape, const LossData& data, int64_t rows, int iterations, bool autotune,
               Timer& timer)
      : shape_(shape),
        data_(data),
        rows_(rows),
        iterations_(iterations),
        autotune_(autotune),
        timer_(timer),
        gemms_(Take(kernels::cuda::Gemms::Create(), "Gemms")) {
    scratch_ = DeviceAlloc<uint8_t>(kernels::cuda::kGemmWorkspaceBytes);
    logits_ = DeviceAlloc<float>(rows * shape.vocab);
    dx_ = DeviceAlloc<uint16_t>(rows * shape.hidden);
    dw_ = DeviceAlloc<float>(shape.vocab * shape.hidden);
    targets_ = DeviceAlloc<int32_t>(rows);
    Check(cudaMemcpy(targets_, data.targets.data(), static_cast<size_t>(rows) * 4, cudaMemcpyDefault),
          "cudaMemcpy");
    floats_ = DeviceAlloc<float>(10 * rows);
    const std::vector<float> ones(static_cast<size_t>(2 * rows), 1.0f);
    Check(cudaMemset(floats_, 0, static_cast<size_t>(40 * rows)), "cudaMemset");
    Check(cudaMemcpy(floats_, ones.data(), ones.size() * 4, cudaMemcpyDefault), "cudaMemcpy");
    int device = 0;
    cudaDeviceProp properties = {};
    Check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    limits_ = {properties.multiProcessorCount, static_cast<int>(properties.sharedMemPerBlockOptin) - 2048,
               static_cast<int>(properties.sharedMemPerMultiprocessor), properties.major >= 9};
  }
  ~BareProducts() {
    for (void* p : {static_cast<void*>(scratch_), static_cast<void*>(logits_), static_cast<void*>(dx_),
                    static_cast<void*>(dw_), static_cast<void*>(targets_), static_cast<void*>(floats_)}) {
      cudaFree(p);
    }
  }

  Times Product(const kernels::cuda::GemmShape& shape, const kernels::cuda::GemmOperands& operands) {
    if (autotune_) Check(gemms_->Tune(shape, operands, scratch_, timer_.stream()), "Tune");
    return timer_.Measure(
        iterations_, [&](int) { Check(gemms_->Run(shape, operands, scratch_, timer_.stream()), "Run"); });
  }

  Times Logits() {
    return Product(LogitsGemm(shape_, rows_), {.a = data_.weight, .b = data_.hidden, .c = logits_});
  }
  Times HiddenGradient() {
    return Product(HiddenGemm(shape_, rows_), {.a = data_.weight, .b = logits_, .c = dx_});
  }
  Times WeightGradient(kernels::DType output, float beta) {
    return Product(WeightGemm(shape_, rows_, output),
                   {.a = data_.hidden, .b = logits_, .c = dw_, .beta = beta});
  }
  // From fp32 logits. They are made anew before each run, because the kernel works in place.
  Times RowLoss(bool gradient) {
    const kernels::cuda::RowLossParams p = RowParams(gradient);
    kernels::cuda::GemmShape logits = LogitsGemm(shape_, rows_);
    logits.output = kernels::DType::kFloat32;
    std::vector<double> times;
    for (int i = 0; i < kWarmUps + iterations_; ++i) {
      Check(gemms_->Run(logits, {.a = data_.weight, .b = data_.hidden, .c = logits_}, scratch_,
                        timer_.stream()),
            "Run");
      times.push_back(timer_.MeasureOnce(
          [&] { Check(kernels::cuda::LaunchRowLoss(p, limits_, timer_.stream()), "LaunchRowLoss"); }));
    }
    return Summarise({times.begin() + kWarmUps, times.end()});
  }

 private:
  kernels::cuda::RowLossParams RowParams(bool gradient) const {
    kernels::cuda::RowLossParams p;
    p.logits = {logits_, kernels::DType::kFloat32, shape_.vocab, shape_.vocab};
    p.gradient = kernels::cuda::InPlaceOf(p.logits, kernels::DType::kBFloat16);
    if (!gradient) p.gradient.data = nullptr;
    p.terms.vocab = shape_.vocab;
    p.terms.class_weight_sum = static_cast<float>(shape_.vocab);
    p.in = {.rows = rows_,
            .padded_rows = rows_,
            .targets = targets_,
            .weights = floats_,
            .coef_loss = floats_ + rows_,
            .coef_lse = floats_ + 2 * rows_,
            .coef_entropy = floats_ + 3 * rows_};
    p.out = {floats_ + 4 * rows_, floats_ + 5 * rows_, floats_ + 6 * rows_,
             floats_ + 7 * rows_, floats_ + 8 * rows_, reinterpret_cast<int32_t*>(floats_ + 9 * rows_)};
    return p;
  }

  const DataShape shape_;
  const LossData& data_;
  const int64_t rows_;
  const int iterations_;
  const bool autotune_;
  Timer& timer_;
  std::unique_ptr<kernels::cuda::Gemms> gemms_;
  kernels::cuda::DeviceLimits limits_;
  uint8_t* scratch_ = nullptr;
  float* logits_ = nullptr;  // of which the products of 16 bits use half
  uint16_t* dx_ = nullptr;
  float* dw_ = nullptr;
  int32_t* targets_ = nullptr;
  float* floats_ = nullptr;
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_BARE_PRODUCTS_H_
