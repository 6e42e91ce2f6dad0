// SPDX-License-Identifier: Apache-2.0
// What the parts of a head that is split by vocabulary exchange while a chunk is computed, each on a device
// of its own. Every part calls the same functions with the same sizes in the same order, from the thread that
// drives its device, and each call enqueues on the device's compute stream; Wait is for the completion
// thread, and Abort for any.
//
// Errors: UNAVAILABLE. After an error of one part none of them can go on: it has to Abort, so that the others
// do not wait for it.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_CLASS_EXCHANGE_H_
#define LOSSD_KERNELS_CUDA_DEVICE_CLASS_EXCHANGE_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/cuda/device/device.h"
#include "kernels/exchange_times.h"

namespace lossd::kernels::cuda {

// Rows [begin, end).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

class ClassExchange {
 public:
  virtual ~ClassExchange() = default;

  // data [n] becomes the sum over all parts. `kind`: what its time counts as.
  virtual absl::Status Sum(ExchangeKind kind, float* data, int64_t n) = 0;
  // all [parts, bytes]: `own` of each part.
  virtual absl::Status Gather(const void* own, void* all, int64_t bytes) = 0;
  // Of so many rows, those whose sums SumRows leaves with this part. Every row has one part.
  virtual RowRange RowsHere(int64_t rows) const = 0;
  // data [rows, cols], with room for as many rows as the parts divide evenly: RowsHere become the sums over
  // all parts. The others are unspecified.
  virtual absl::Status SumRows(float* data, int64_t rows, int64_t cols) = 0;

  // Calls `enqueue`, which enqueues a chunk, and sees to it that it comes back when another part stays away.
  virtual absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) = 0;
  // Waits until the event has happened, or until it cannot any more.
  virtual absl::Status Wait(const Event& event) = 0;
  // No exchange of any part happens from now on.
  virtual void Abort(const absl::Status& reason) = 0;
};

// For a head that has all classes: there is nothing to exchange.
class SoleExchange final : public ClassExchange {
 public:
  absl::Status Sum(ExchangeKind, float*, int64_t) override { return absl::OkStatus(); }
  absl::Status Gather(const void*, void*, int64_t) override { return absl::OkStatus(); }
  RowRange RowsHere(int64_t rows) const override { return {0, rows}; }
  absl::Status SumRows(float*, int64_t, int64_t) override { return absl::OkStatus(); }
  absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) override { return enqueue(); }
  absl::Status Wait(const Event& event) override {
    return ToStatus(cudaEventSynchronize(event.get()), "cudaEventSynchronize");
  }
  void Abort(const absl::Status&) override {}
};

// The exchange of a head, which is connected after the head has been made.
struct ClassLink {
  std::unique_ptr<ClassExchange> exchange = std::make_unique<SoleExchange>();
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_CLASS_EXCHANGE_H_
