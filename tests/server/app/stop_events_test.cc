#include "server/app/stop_events.h"

#include <gtest/gtest.h>

#include <thread>

namespace lossd::app {
namespace {

TEST(StopEventsTest, EachEventOnce) {
  StopEvents events;
  std::thread([&] { events.NotifyDeviceLost(); }).join();
  EXPECT_EQ(events.Wait().signal, 0) << "what comes before the waiting is not lost";
  std::thread later([&] { events.NotifyDeviceLost(); });
  EXPECT_EQ(events.Wait().signal, 0);
  later.join();
  pthread_kill(pthread_self(), SIGRTMIN);  // by somebody else: no event
  pthread_kill(pthread_self(), SIGTERM);
  EXPECT_EQ(events.Wait().signal, SIGTERM);
  pthread_kill(pthread_self(), SIGINT);
  EXPECT_EQ(events.WaitForSignal(), SIGINT);
}

}  // namespace
}  // namespace lossd::app
