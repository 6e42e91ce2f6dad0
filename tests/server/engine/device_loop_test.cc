// SPDX-License-Identifier: Apache-2.0
// Tests of device_loop.h: the thread that drives the device, what the engine says when the device fails, and
// how long the device has been silent.
#include "server/engine/device_loop.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/clocks/clock.h"
#include "server/engine/engine.h"
#include "server/engine/engine_options.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/fake_backend.h"

// ---- Notifier ----

namespace lossd::engine::notifier_test {
namespace {

using ::testing::ElementsAre;

// A runtime with a loop's thread that does nothing until Go.
class Sleeping final : public Runtime {
 public:
  absl::AnyInvocable<void()> Start(Loop* loop) override {
    thread_ = std::thread([this, loop] {
      go_.WaitForNotification();
      loop->Run();
    });
    return [this] { thread_.join(); };
  }
  void Wait(const absl::Notification& done) override { done.WaitForNotification(); }
  bool MayHelp() override { return may_help; }
  absl::Time Now() override { return absl::UnixEpoch(); }
  absl::Time WallNow() override { return Now(); }
  void Go() { go_.Notify(); }

  bool may_help = true;

 private:
  absl::Notification go_;
  std::thread thread_;
};

TEST(NotifierTest, RunQueuedRunsEventsInOrderAndThoseThatTheyPost) {
  Sleeping runtime;
  std::vector<int> ran;
  std::thread::id thread;
  {
    Notifier notifier(&runtime);
    notifier.Post([&] {
      ran.push_back(1);
      notifier.Post([&] { ran.push_back(3); });
      notifier.RunQueued();  // an event runs already
      thread = std::this_thread::get_id();
    });
    notifier.Post([&] { ran.push_back(2); });
    notifier.RunQueued();
    EXPECT_THAT(ran, ElementsAre(1, 2, 3));
    EXPECT_EQ(thread, std::this_thread::get_id());
    runtime.Go();
  }
}

TEST(NotifierTest, WhileAThreadRunsEventsOthersLeaveThemToIt) {
  Sleeping runtime;
  absl::Notification began, go_on;
  std::vector<int> ran;
  {
    Notifier notifier(&runtime);
    notifier.Post([&] {
      began.Notify();
      go_on.WaitForNotification();
      ran.push_back(1);
    });
    std::thread runner([&] { notifier.RunQueued(); });
    began.WaitForNotification();
    notifier.Post([&] { ran.push_back(2); });
    runtime.Go();          // the notifier's thread waits, too
    notifier.RunQueued();  // returns at once
    go_on.Notify();
    runner.join();
  }
  EXPECT_THAT(ran, ElementsAre(1, 2));
}

TEST(NotifierTest, RunQueuedDoesNothingWhereTheRuntimeLetsNobodyHelp) {
  Sleeping runtime;
  runtime.may_help = false;
  int ran = 0;
  {
    Notifier notifier(&runtime);
    notifier.Post([&] { ++ran; });
    notifier.RunQueued();
    EXPECT_EQ(ran, 0);
    runtime.Go();
  }
  EXPECT_EQ(ran, 1);
}

}  // namespace
}  // namespace lossd::engine::notifier_test

// ---- Device loop ----

namespace lossd::engine::device_loop_test {
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
    ValuesAre Values(const DeviceLoad& load) override { return work.empty() ? ValuesAre::kHome : values; }
    std::deque<DeviceLoop::Work> work;
    ValuesAre values = ValuesAre::kHome;
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

// a and c need values from host memory.
TEST_F(DeviceLoopTest, WorkWhoseValuesAreAwayWaitsForWorkWhoseValuesAreHere) {
  const auto a = AddQueue("a"), b = AddQueue("b"), c = AddQueue("c");
  a->values = ValuesAre::kAway;
  c->values = ValuesAre::kHere;
  for (int i = 0; i < 2; ++i) a->work.push_back(Note("a"));
  for (int i = 0; i < 3; ++i) b->work.push_back(Note("b"));
  for (int i = 0; i < 2; ++i) c->work.push_back(Note("c"));
  Start();
  Stop();
  EXPECT_THAT(done_, ElementsAre("b", "c", "b", "c", "a", "b", "a"));
}

TEST_F(DeviceLoopTest, WorkWhoseValuesAreAwayLosesSoManyTurns) {
  const auto a = AddQueue("a"), b = AddQueue("b");
  a->values = ValuesAre::kAway;
  b->values = ValuesAre::kHere;
  for (int i = 0; i < 2; ++i) a->work.push_back(Note("a"));
  for (int i = 0; i < 3 * kMostPassedOver; ++i) b->work.push_back(Note("b"));
  Start();
  Stop();
  std::vector<std::string> want(static_cast<size_t>(kMostPassedOver), "b");
  want.push_back("a");
  want.push_back("b");  // its own turn
  for (int i = 0; i < kMostPassedOver; ++i) want.push_back("b");
  want.push_back("a");
  want.resize(done_.size(), "b");
  EXPECT_EQ(done_, want);
}

TEST_F(DeviceLoopTest, WithoutWorkThatIsHereNobodyWaits) {
  const auto a = AddQueue("a"), b = AddQueue("b");
  a->values = ValuesAre::kAway;
  for (int i = 0; i < 2; ++i) a->work.push_back(Note("a"));
  for (int i = 0; i < 2; ++i) b->work.push_back(Note("b"));
  Start();
  Stop();
  EXPECT_THAT(done_, ElementsAre("a", "b", "a", "b"));
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

// By a clock that only the test moves.
class BusyTimeTest : public ::testing::Test {
 protected:
  struct Clock final : Runtime {
    absl::AnyInvocable<void()> Start(Loop*) override {
      return [] {};
    }
    void Wait(const absl::Notification& done) override { done.WaitForNotification(); }
    bool MayHelp() override { return false; }
    absl::Time Now() override { return now; }
    absl::Time WallNow() override { return Now(); }
    absl::Time now = absl::UnixEpoch();
  };
  struct OneWork final : DeviceLoop::Source {
    DeviceLoop::Work TakeWork(const DeviceLoad&) override { return std::exchange(work, nullptr); }
    DeviceLoop::Work work;
  };

  void Later(int seconds) { clock_.now += absl::Seconds(seconds); }
  absl::Duration BusyTime() {
    absl::MutexLock lock(&mutex_);
    return loop_.BusyTime();
  }
  void Launch() {
    absl::MutexLock lock(&mutex_);
    loop_.OnLaunched(/*accumulates=*/false);
  }
  void Leave() {
    absl::MutexLock lock(&mutex_);
    loop_.OnLeft();
  }
  // Runs the work on this thread.
  void Run(DeviceLoop::Work work) {
    source_->work = std::move(work);
    Runtime::Loop& loop = loop_;
    EXPECT_EQ(loop.RunSome(), Runtime::Loop::Progress::kWorked);
  }

  Clock clock_;
  absl::Mutex mutex_;
  DeviceLoop loop_{&mutex_, /*max_chunks=*/2, &clock_};
  const std::shared_ptr<OneWork> source_ = [this] {
    auto source = std::make_shared<OneWork>();
    absl::MutexLock lock(&mutex_);
    loop_.Add("a", source);
    return source;
  }();
};

TEST_F(BusyTimeTest, IsThatOfWorkAndChunksEachSecondOnce) {
  Later(1);
  EXPECT_EQ(BusyTime(), absl::ZeroDuration());
  Run([this] {
    Later(2);
    EXPECT_EQ(BusyTime(), absl::Seconds(2)) << "while it works";
    Launch();
    Later(4);
  });
  EXPECT_EQ(BusyTime(), absl::Seconds(6));
  Later(8);
  Launch();
  EXPECT_EQ(BusyTime(), absl::Seconds(14)) << "a chunk is on the device";
  Leave();
  Later(16);
  Leave();
  EXPECT_EQ(BusyTime(), absl::Seconds(30));
  Later(32);
  EXPECT_EQ(BusyTime(), absl::Seconds(30)) << "nothing is";
  Run([this] { Later(64); });
  EXPECT_EQ(BusyTime(), absl::Seconds(94));
}

TEST_F(BusyTimeTest, AClockThatIsSetBackTakesNothingAway) {
  Run([this] { Later(5); });
  Launch();
  Later(-100);
  EXPECT_EQ(BusyTime(), absl::Seconds(5));
  Leave();
  EXPECT_EQ(BusyTime(), absl::Seconds(5));
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
}  // namespace lossd::engine::device_loop_test

// ---- Errors of the device ----
// What the engine tells as a failure of the device: what the backend has said, and nothing that it says
// itself. The server ends when it is told UNAVAILABLE.

namespace lossd::engine::device_errors_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class DeviceErrorsTest : public EngineTest {
 protected:
  struct Errors final : SilentObserver {
    void OnDeviceError(const absl::Status& status) override { told.emplace_back(status.message()); }
    std::vector<std::string> told;
  };

  void SetUp() override { Start({}, {&errors_}); }
  absl::Status Read() {
    auto reader = engine_->OpenReader("head");
    if (!reader.ok()) return reader.status();
    std::vector<uint8_t> values(static_cast<size_t>(10 * kHidden) * 4);
    return (*reader)->Read({}, {0, 10}, kernels::DType::kFloat32, absl::MakeSpan(values)).status();
  }

  Errors errors_;
};

TEST_F(DeviceErrorsTest, AHeadThatIsBeingLoadedIsNoLossOfTheDevice) {
  ASSERT_TRUE(engine_->BeginLoad("head", {.step = 3, .updates = 3}, std::nullopt).ok());
  EXPECT_EQ(engine_->GradNorm("head", std::nullopt).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 3}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Read().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(errors_.told, IsEmpty());
}

TEST_F(DeviceErrorsTest, ATensorThatIsBeingWrittenIsNoLossOfTheDevice) {
  auto writer = engine_->OpenWriter("head");
  ASSERT_TRUE(writer.ok()) << writer.status();
  (*writer)->SetRows({}, {0, 10});
  const std::vector<uint8_t> values(static_cast<size_t>(5 * kHidden) * 4);
  ASSERT_TRUE((*writer)->Write({0, 5}, kernels::DType::kFloat32, values).ok());
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Read().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(errors_.told, IsEmpty());
}

TEST_F(DeviceErrorsTest, TheNormOfAStepNoticesALostDevice) {
  device_.fail_norm = absl::UnavailableError("fell off the bus");
  EXPECT_FALSE(engine_->GradNorm("head", std::nullopt).ok());
  EXPECT_THAT(errors_.told, ElementsAre("fell off the bus"));
  EXPECT_FALSE(engine_->ApplyStep("head", {.step = 0}).ok());
  EXPECT_THAT(errors_.told, ElementsAre("fell off the bus", "fell off the bus"));
}

}  // namespace
}  // namespace lossd::engine::device_errors_test

// ---- Silence of the device ----
// Engine::DeviceSilence: an idle engine beats, and one whose device thread or device hangs falls silent until
// it goes on.

namespace lossd::engine::device_silence_test {
namespace {

class DeviceSilenceTest : public EngineTest {
 protected:
  // Whether the silence gets so long within a minute.
  bool FallsSilent() {
    return Becomes([&] { return engine_->DeviceSilence() > 3 * kDeviceBeat; });
  }
  // Whether a beat comes within a minute.
  bool Beats() {
    absl::Duration longest = absl::ZeroDuration();
    return Becomes([&] {
      const absl::Duration silence = engine_->DeviceSilence();
      if (silence < longest) return true;
      longest = silence;
      return false;
    });
  }

 private:
  static bool Becomes(absl::FunctionRef<bool()> condition) {
    const absl::Time limit = clocks::SteadyNow() + absl::Minutes(1);
    while (!condition()) {
      if (clocks::SteadyNow() > limit) return false;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return true;
  }
};

TEST_F(DeviceSilenceTest, AnIdleEngineBeats) {
  Start();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Beats());
}

TEST_F(DeviceSilenceTest, AnOperationThatHangs) {
  Start();
  absl::Notification go_on;
  std::thread caller([&] {
    EXPECT_TRUE(engine_
                    ->OnDevice("head",
                               [&](head::Head&) {
                                 go_on.WaitForNotification();
                                 return absl::OkStatus();
                               })
                    .ok());
  });
  EXPECT_TRUE(FallsSilent());
  go_on.Notify();
  caller.join();
  EXPECT_TRUE(Beats());
}

TEST_F(DeviceSilenceTest, ADeviceThatHangs) {
  device_.asynchronous = true;  // the device thread itself is free
  Start();
  device_.Close();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 4), collector);
  Send(*stream, 1, {0, 4});
  stream->HalfClose();
  EXPECT_TRUE(FallsSilent());
  device_.Open();
  EXPECT_TRUE(collector->Wait().ok());
  EXPECT_TRUE(Beats());
}

}  // namespace
}  // namespace lossd::engine::device_silence_test
