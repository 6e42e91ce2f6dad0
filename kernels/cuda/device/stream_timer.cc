// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/stream_timer.h"

#include <chrono>

namespace lossd::kernels::cuda {
namespace {

BusyClock::Clock::duration FromMilliseconds(float milliseconds) {
  return std::chrono::duration_cast<BusyClock::Clock::duration>(
      std::chrono::duration<float, std::milli>(milliseconds));
}

// What does not succeed is nobody's error here, and must not stay the last one of this thread, which launches
// of kernels ask for.
bool Succeeds(cudaError_t result) {
  if (result != cudaSuccess) cudaGetLastError();
  return result == cudaSuccess;
}

}  // namespace

StreamTimer::~StreamTimer() {
  for (const UnderWay& one : under_way_) free_.push_back(one.events);
  for (const Pair& pair : free_) {
    cudaEventDestroy(pair.begin);
    cudaEventDestroy(pair.end);
  }
}

bool StreamTimer::Create(Pair* pair) {
  if (!Succeeds(cudaEventCreate(&pair->begin))) return false;
  if (Succeeds(cudaEventCreate(&pair->end))) return true;
  cudaEventDestroy(pair->begin);
  *pair = Pair();
  return false;
}

bool StreamTimer::Take(Pair* pair) {
  CollectEnded();
  if (!free_.empty()) {
    *pair = free_.back();
    free_.pop_back();
    return true;
  }
  return under_way_.size() < kMostUnderWay && Create(pair);
}

absl::Status StreamTimer::Time(ExchangeKind kind, cudaStream_t stream,
                               absl::FunctionRef<absl::Status()> enqueue) {
  Pair events;
  bool timed = false;
  {
    absl::MutexLock lock(&mutex_);
    timed = Take(&events);
  }
  if (timed) timed = Succeeds(cudaEventRecord(events.begin, stream));
  absl::Status status = enqueue();
  if (timed) timed = Succeeds(cudaEventRecord(events.end, stream));
  absl::MutexLock lock(&mutex_);
  if (timed) {
    under_way_.push_back({kind, events});
  } else if (events.begin != nullptr) {
    free_.push_back(events);
  }
  return status;
}

void StreamTimer::Collect() {
  absl::MutexLock lock(&mutex_);
  CollectEnded();
}

void StreamTimer::CollectEnded() {
  while (!under_way_.empty() && Succeeds(cudaEventQuery(under_way_.front().events.end))) {
    const UnderWay& first = under_way_.front();
    float milliseconds = 0.0f;
    if (Succeeds(cudaEventElapsedTime(&milliseconds, first.events.begin, first.events.end))) {
      clocks_->of(first.kind).Add(FromMilliseconds(milliseconds));
    }
    free_.push_back(first.events);
    under_way_.pop_front();
  }
}

}  // namespace lossd::kernels::cuda
