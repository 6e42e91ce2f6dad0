// SPDX-License-Identifier: Apache-2.0
// Engine::DeviceSilence: an idle engine beats, and one whose device thread or device hangs falls silent until
// it goes on.
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "tests/server/engine/engine_fixture.h"

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
