// SPDX-License-Identifier: Apache-2.0
// Collects what a stream reports, row by row.
#ifndef LOSSD_TESTS_SERVER_ENGINE_ROW_COLLECTOR_H_
#define LOSSD_TESTS_SERVER_ENGINE_ROW_COLLECTOR_H_

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// Thread-safe. Hidden states are fp32.
class RowCollector : public StreamObserver {
 public:
  void OnMemory(absl::AnyInvocable<void()> receive) override { receive(); }
  void OnSlice(SliceOutput output) override {
    absl::MutexLock lock(&mutex_);
    EXPECT_FALSE(finished_.HasBeenNotified()) << "a slice after the end";
    slices_.push_back(output.rows);
    const auto row_floats =
        static_cast<size_t>(output.grad_bytes / output.rows.size()) / sizeof(float);  // 0: no gradients
    for (int64_t i = 0; i < output.rows.size(); ++i) {
      const int64_t row = output.rows.begin + i;
      EXPECT_FALSE(losses_.contains(row)) << "row " << row << " twice";
      losses_[row] = output.loss.empty() ? 0.0f : output.loss[static_cast<size_t>(i)];
      if (!output.grad_hidden) continue;
      const auto* grad =
          reinterpret_cast<const float*>(output.grad_hidden.data()) + static_cast<size_t>(i) * row_floats;
      grads_[row].assign(grad, grad + row_floats);
    }
  }
  void OnFinished(absl::Status status, const StreamSummary& summary) override {
    status_ = std::move(status);
    summary_ = summary;
    finished_.Notify();  // aborts if called twice
  }
  const absl::Status& Wait() {
    finished_.WaitForNotification();
    return status_;
  }
  bool finished() const { return finished_.HasBeenNotified(); }
  const StreamSummary& summary() const { return summary_; }
  // In order of completion.
  std::vector<RowRange> slices() {
    absl::MutexLock lock(&mutex_);
    return slices_;
  }
  std::map<int64_t, float> losses() {
    absl::MutexLock lock(&mutex_);
    return losses_;
  }
  std::map<int64_t, std::vector<float>> grads() {
    absl::MutexLock lock(&mutex_);
    return grads_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<RowRange> slices_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, float> losses_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, std::vector<float>> grads_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_;
  StreamSummary summary_;
  absl::Notification finished_;
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_ROW_COLLECTOR_H_
