// SPDX-License-Identifier: Apache-2.0
#include "server/app/stop_events.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "absl/synchronization/notification.h"

namespace lossd::app::stop_events_test {
namespace {

constexpr absl::Duration kLimit = absl::Minutes(2);  // for what a slow machine does

TEST(StopEventsTest, EachEventOnce) {
  StopEvents events;
  std::thread([&] { events.NotifyDeviceLost(); }).join();
  EXPECT_EQ(events.Wait().signal, 0) << "what comes before the waiting is not lost";
  std::thread later([&] { events.NotifyDeviceLost(); });
  EXPECT_EQ(events.Wait().signal, 0);
  later.join();
  events.NotifyStop();
  EXPECT_EQ(events.Pending(), 0) << "no signal";
  EXPECT_TRUE(events.Wait().of_rank);
  kill(getpid(), SIGTERM);
  EXPECT_EQ(events.AwaitPending(kLimit), SIGTERM);
  EXPECT_EQ(events.Pending(), SIGTERM);
  const StopEvents::Event event = events.Wait();
  EXPECT_EQ(event.signal, SIGTERM);
  EXPECT_FALSE(event.of_rank);
  EXPECT_EQ(events.AwaitPending(absl::ZeroDuration()), 0);
  events.NotifyStop();
  kill(getpid(), SIGINT);
  EXPECT_EQ(events.WaitForSignal(), SIGINT);
}

// A thread that a library has made does not block signals, and the system may give them to it.
TEST(StopEventsTest, ASignalThatComesToAThreadOfALibrary) {
  absl::Notification made, end;
  std::thread library([&] {
    sigset_t none;
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, nullptr);
    made.Notify();
    end.WaitForNotification();
  });
  made.WaitForNotification();
  {
    StopEvents events;
    pthread_kill(library.native_handle(), SIGTERM);
    EXPECT_EQ(events.AwaitPending(kLimit), SIGTERM);
    pthread_kill(library.native_handle(), SIGINT);
    EXPECT_EQ(events.Wait().signal, SIGTERM);
    EXPECT_EQ(events.Wait().signal, SIGINT);
  }
  pthread_kill(library.native_handle(), SIGTERM);  // afterwards: nothing
  end.Notify();
  library.join();
}

}  // namespace
}  // namespace lossd::app::stop_events_test
