// SPDX-License-Identifier: Apache-2.0
// Exchanges that are timed on a stream. The events of CUDA are played by functions here, which the linker
// gives to the code: each takes a place in the order of the stream, and has happened when the test says so.
#include <cuda_runtime_api.h>

#include <map>
#include <string>

#include "gtest/gtest.h"
#include "kernels/cuda/device/event_waiter.h"

namespace {

// What is played. Of one thread.
struct Play {
  int created = 0, alive = 0, recorded = 0;
  int happened = 0;  // so many records of the stream
  int most = 1000;   // that can be created
  cudaError_t last_error = cudaSuccess;
  std::map<cudaEvent_t, int> place;  // of the last record
};
Play* play = nullptr;

cudaError_t Said(cudaError_t error) {
  if (error != cudaSuccess) play->last_error = error;
  return error;
}

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): the linker makes these names.
extern "C" {
// The runtime's own function, for the other tests of this program.
#define LOSSD_PLAYED(name, parameters, arguments)        \
  cudaError_t __real_##name parameters;                  \
  static cudaError_t Played_##name parameters;           \
  cudaError_t __wrap_##name parameters {                 \
    if (play == nullptr) return __real_##name arguments; \
    return Played_##name arguments;                      \
  }                                                      \
  static cudaError_t Played_##name parameters

LOSSD_PLAYED(cudaEventCreate, (cudaEvent_t * event), (event)) {
  if (play->created == play->most) return Said(cudaErrorMemoryAllocation);
  ++play->alive;
  *event = reinterpret_cast<cudaEvent_t>(static_cast<intptr_t>(++play->created));
  return cudaSuccess;
}
LOSSD_PLAYED(cudaEventDestroy, (cudaEvent_t event), (event)) {
  --play->alive;
  return cudaSuccess;
}
LOSSD_PLAYED(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream)) {
  play->place[event] = ++play->recorded;
  return cudaSuccess;
}
LOSSD_PLAYED(cudaEventQuery, (cudaEvent_t event), (event)) {
  return Said(play->place[event] <= play->happened ? cudaSuccess : cudaErrorNotReady);
}
// A millisecond between two records.
LOSSD_PLAYED(cudaEventElapsedTime, (float* milliseconds, cudaEvent_t begin, cudaEvent_t end),
             (milliseconds, begin, end)) {
  *milliseconds = static_cast<float>(play->place[end] - play->place[begin]);
  return cudaSuccess;
}
LOSSD_PLAYED(cudaGetLastError, (), ()) {
  const cudaError_t error = play->last_error;
  play->last_error = cudaSuccess;
  return error;
}
#undef LOSSD_PLAYED
}
// NOLINTEND(bugprone-reserved-identifier)

namespace lossd::kernels::cuda::stream_timer_test {
namespace {

class StreamTimerTest : public ::testing::Test {
 protected:
  StreamTimerTest() { play = &play_; }
  ~StreamTimerTest() override { play = nullptr; }

  void Exchange(StreamTimer& timer, ExchangeKind kind) {
    EXPECT_TRUE(timer
                    .Time(kind, nullptr,
                          [this] {
                            ++enqueued_;
                            return absl::OkStatus();
                          })
                    .ok());
  }
  absl::Duration Total(ExchangeKind kind) { return clocks_.of(kind).Total(); }

  Play play_;
  ExchangeClocks clocks_;
  int enqueued_ = 0;
};

constexpr ExchangeKind kRows = ExchangeKind::kRowStatistics;
constexpr ExchangeKind kHidden = ExchangeKind::kHiddenGradients;

TEST_F(StreamTimerTest, WhatHasEndedCountsByKindAndEventsAreUsedAgain) {
  StreamTimer timer(&clocks_);
  Exchange(timer, kRows);
  Exchange(timer, kHidden);
  timer.Collect();
  EXPECT_EQ(Total(kRows), absl::ZeroDuration());
  play_.happened = 3;  // the second has begun
  timer.Collect();
  EXPECT_EQ(Total(kRows), absl::Milliseconds(1));
  EXPECT_EQ(Total(kHidden), absl::ZeroDuration());
  play_.happened = 4;
  Exchange(timer, kRows);
  EXPECT_EQ(Total(kHidden), absl::Milliseconds(1));
  EXPECT_EQ(play_.created, 4);
  EXPECT_EQ(enqueued_, 3);
}

// The launch of a kernel that follows asks for the last error.
TEST_F(StreamTimerTest, AnEventThatIsStillToComeIsNoErrorOfTheThread) {
  StreamTimer timer(&clocks_);
  Exchange(timer, kRows);
  Exchange(timer, kRows);
  EXPECT_EQ(play_.last_error, cudaSuccess);
}

TEST_F(StreamTimerTest, ThereAreOnlySoManyEvents) {
  {
    StreamTimer timer(&clocks_);
    const int most = static_cast<int>(StreamTimer::kMostUnderWay);
    for (int i = 0; i < most + 5; ++i) Exchange(timer, kRows);
    EXPECT_EQ(enqueued_, most + 5);
    EXPECT_EQ(play_.created, 2 * most);
    play_.happened = play_.recorded;
    timer.Collect();
    EXPECT_EQ(Total(kRows), most * absl::Milliseconds(1));
  }
  EXPECT_EQ(play_.alive, 0);
}

TEST_F(StreamTimerTest, WhatCannotBeTimedIsEnqueuedAllTheSame) {
  StreamTimer timer(&clocks_);
  play_.most = 1;  // the second of a pair is missing
  Exchange(timer, kRows);
  EXPECT_EQ(enqueued_, 1);
  EXPECT_EQ(play_.last_error, cudaSuccess);
  EXPECT_EQ(timer.Time(kRows, nullptr, [] { return absl::UnavailableError("lost"); }),
            absl::UnavailableError("lost"));
  timer.Collect();
  EXPECT_EQ(Total(kRows), absl::ZeroDuration());
  EXPECT_EQ(play_.recorded, 0);
  EXPECT_EQ(play_.alive, 0);
  play_.most = 1000;  // later there are
  Exchange(timer, kRows);
  EXPECT_EQ(play_.created, 3);
}

}  // namespace
}  // namespace lossd::kernels::cuda::stream_timer_test
