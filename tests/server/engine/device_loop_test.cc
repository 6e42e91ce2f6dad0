#include "server/engine/device_loop.h"

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::engine {
namespace {

using ::testing::ElementsAre;

class DeviceLoopTest : public ::testing::Test {
 protected:
  // Offers what a test has put there.
  struct Queue final : DeviceLoop::Source {
    DeviceLoop::Work TakeWork(const DeviceLoad& load) override {
      ++asked;
      last_load = load;
      if (work.empty() || (needs_chunk && !load.accepts_chunk())) return nullptr;
      DeviceLoop::Work next = std::move(work.front());
      work.pop_front();
      return next;
    }
    std::deque<DeviceLoop::Work> work;
    bool needs_chunk = false;
    DeviceLoad last_load;
    int asked = 0;
  };

  ~DeviceLoopTest() override {
    if (started_) Stop();
  }
  void Start() {
    loop_.Start();
    started_ = true;
  }
  void Stop(DeviceLoop::Work last = [] {}) {
    {
      absl::MutexLock lock(&mutex_);
      loop_.Stop(std::move(last));
    }
    loop_.Join();
    started_ = false;
  }
  std::shared_ptr<Queue> AddQueue(const std::string& name) {
    auto queue = std::make_shared<Queue>();
    absl::MutexLock lock(&mutex_);
    loop_.Add(name, queue);
    return queue;
  }
  // A piece of work that notes its name, and finds the lock free.
  DeviceLoop::Work Note(const std::string& name) {
    return [this, name] {
      absl::MutexLock lock(&mutex_);
      done_.push_back(name);
    };
  }
  // Waits until the loop has asked the source, after all that has happened so far.
  void AwaitAsked(const Queue& source) {
    absl::MutexLock lock(&mutex_);
    const int before = source.asked;
    loop_.Wake();
    const auto asked_again = [&] { return source.asked > before; };
    mutex_.Await(absl::Condition(&asked_again));
  }
  void AwaitDone(size_t pieces) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&] { return done_.size() >= pieces; };
    mutex_.Await(absl::Condition(&enough));
  }

  absl::Mutex mutex_;
  DeviceLoop loop_{&mutex_, /*max_chunks=*/2};
  bool started_ = false;
  std::vector<std::string> done_;
};

TEST_F(DeviceLoopTest, SourcesTakeTurns) {
  const auto a = AddQueue("a"), b = AddQueue("b"), c = AddQueue("c");
  for (int i = 0; i < 3; ++i) a->work.push_back(Note("a"));
  c->work.push_back(Note("c"));
  for (int i = 0; i < 2; ++i) b->work.push_back(Note("b"));
  Start();
  Stop();
  EXPECT_THAT(done_, ElementsAre("a", "b", "c", "a", "b", "a"));
}

TEST_F(DeviceLoopTest, TasksComeFirstAndBlockTheirCaller) {
  const auto source = AddQueue("a");
  absl::Notification entered, leave;
  source->work.push_back([&] {
    entered.Notify();
    leave.WaitForNotification();
  });
  source->work.push_back(Note("work"));
  Start();
  entered.WaitForNotification();
  std::thread caller([&] {
    EXPECT_TRUE(loop_.Run([&] { Note("task")(); }).ok());
    Note("caller")();
  });
  absl::SleepFor(absl::Milliseconds(10));
  leave.Notify();
  caller.join();
  Stop();
  EXPECT_EQ(done_.front(), "task");
  EXPECT_EQ(done_.size(), 3u);
}

TEST_F(DeviceLoopTest, AWakenedLoopAsksAgain) {
  const auto source = AddQueue("a");
  Start();
  AwaitAsked(*source);
  absl::Notification ran;
  {
    absl::MutexLock lock(&mutex_);
    source->work.push_back([&] { ran.Notify(); });
    loop_.Wake();
  }
  ran.WaitForNotification();
}

TEST_F(DeviceLoopTest, CountsWhatIsOnTheDevice) {
  const auto source = AddQueue("a");
  source->needs_chunk = true;
  Start();
  {
    absl::MutexLock lock(&mutex_);
    loop_.OnLaunched(/*accumulates=*/true);
    loop_.OnLaunched(/*accumulates=*/false);
    source->work.push_back(Note("chunk"));
  }
  AwaitAsked(*source);
  {
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(done_.empty()) << "the device takes two chunks";
    EXPECT_EQ(source->last_load.chunks, 2);
    EXPECT_EQ(source->last_load.without_results, 1);
    loop_.OnResults(/*accumulates=*/true);
    loop_.OnLeft();
  }
  AwaitDone(1);
  {
    absl::MutexLock lock(&mutex_);
    EXPECT_EQ(source->last_load.without_results, 0);
    loop_.OnLeft();
  }
}

TEST_F(DeviceLoopTest, EndsWhenNothingIsLeft) {
  const auto source = AddQueue("a");
  Start();
  {
    absl::MutexLock lock(&mutex_);
    loop_.OnLaunched(true);
    source->work.push_back(Note("work"));
    loop_.Stop(Note("last"));
    EXPECT_TRUE(loop_.stopping());
  }
  EXPECT_EQ(loop_.Run([] { FAIL() << "was stopped"; }).code(), absl::StatusCode::kUnavailable);
  absl::SleepFor(absl::Milliseconds(10));
  {
    absl::MutexLock lock(&mutex_);
    EXPECT_THAT(done_, ElementsAre("work")) << "a chunk is on the device";
    loop_.OnResults(true);
    loop_.OnLeft();
  }
  loop_.Join();
  started_ = false;
  EXPECT_THAT(done_, ElementsAre("work", "last"));
  EXPECT_EQ(source.use_count(), 1);
}

TEST_F(DeviceLoopTest, BeatsWhenAChunkLeaves) {
  Start();
  {
    absl::MutexLock lock(&mutex_);
    loop_.OnLaunched(/*accumulates=*/false);
  }
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_GE(loop_.Silence(), absl::Milliseconds(10));
  {
    absl::MutexLock lock(&mutex_);
    loop_.OnLeft();
  }
  EXPECT_LT(loop_.Silence(), absl::Seconds(1));
}

TEST_F(DeviceLoopTest, ARemovedSourceIsAskedNoMore) {
  const auto source = AddQueue("a");
  Start();
  AwaitAsked(*source);
  {
    absl::MutexLock lock(&mutex_);
    loop_.Remove("a");
    loop_.Remove("b");  // harmless
    source->work.push_back(Note("late"));
    loop_.Wake();
  }
  Stop();
  EXPECT_TRUE(done_.empty());
}

}  // namespace
}  // namespace lossd::engine
