// SPDX-License-Identifier: Apache-2.0
// Rows on a GPU of the machine, which is played (tests/client/cpp/fake_cuda.h): where the trainers of these
// tests have them with LOSSD_TRANSPORT=cuda_ipc. It is the first one, or that of LOSSD_TEST_GPU.
//
// Thread-compatible.
#ifndef LOSSD_TESTS_FAULTS_GPU_ROWS_H_
#define LOSSD_TESTS_FAULTS_GPU_ROWS_H_

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/cpp/cuda_driver.h"

namespace lossd::test {

inline bool RowsAreOnGpu() {
  const char* const transport = std::getenv("LOSSD_TRANSPORT");
  return transport != nullptr && absl::string_view(transport) == "cuda_ipc";
}

inline int GpuOfRows() {
  const char* const gpu = std::getenv("LOSSD_TEST_GPU");
  return gpu == nullptr ? 0 : std::atoi(gpu);
}

// A copy of numbers.
class GpuRows {
 public:
  explicit GpuRows(const std::vector<float>& values)
      : driver_(client::internal::CudaDriver::Get().value()),
        bytes_(values.size() * sizeof(float)),
        data_(driver_->Allocate(bytes_, gpu_).value()) {
    Write(values).IgnoreError();  // a copy that fails is seen by its results
  }
  ~GpuRows() { driver_->Free(data_, gpu_); }
  GpuRows(const GpuRows&) = delete;
  GpuRows& operator=(const GpuRows&) = delete;

  void* data() const { return data_; }
  // `values`: as many as there are.
  absl::Status Write(const std::vector<float>& values) const {
    return driver_->Copy(data_, values.data(), bytes_, gpu_);
  }
  absl::Status Read(std::vector<float>* values) const {
    return driver_->Copy(values->data(), data_, bytes_, gpu_);
  }

 private:
  client::internal::CudaDriver* const driver_;
  const int gpu_ = GpuOfRows();
  const uint64_t bytes_;
  uint8_t* const data_;
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_FAULTS_GPU_ROWS_H_
