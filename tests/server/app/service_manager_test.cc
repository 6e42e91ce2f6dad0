// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>

#include "kernels/errors/field_error.h"
#include "server/app/process.h"
#include "tests/support/fake_service_manager.h"

namespace lossd::app::service_manager_test {
namespace {

using test::FakeServiceManager;
using ::testing::HasSubstr;

TEST(ServiceManagerTest, SaysWhatHappensToPathsAndAbstractNames) {
  for (const auto kind : {FakeServiceManager::Kind::kPath, FakeServiceManager::Kind::kAbstract}) {
    const FakeServiceManager fake(kind);
    const auto manager = ServiceManager::FromEnvironment();
    ASSERT_TRUE(manager.ok()) << manager.status();
    (*manager)->Ready("serving on 127.0.0.1:7070");
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "READY=1\nSTATUS=serving on 127.0.0.1:7070\n");
    (*manager)->Alive();
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "WATCHDOG=1\nSTATUS=serving on 127.0.0.1:7070\n");
    (*manager)->NotAlive("device\nlost");
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "STATUS=not alive: device lost\n");
    (*manager)->Stopping("draining", absl::Seconds(40));
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=40000000\n");
    (*manager)->Alive();
    EXPECT_EQ(fake.Next(absl::Minutes(1)), "WATCHDOG=1\nSTATUS=draining\n");
  }
}

TEST(ServiceManagerTest, WithoutASocketNothingIsSaid) {
  unsetenv("NOTIFY_SOCKET");
  setenv("WATCHDOG_USEC", "10", 1);
  const auto manager = ServiceManager::FromEnvironment();
  unsetenv("WATCHDOG_USEC");
  ASSERT_TRUE(manager.ok()) << manager.status();
  EXPECT_EQ((*manager)->watchdog(), absl::InfiniteDuration());
  (*manager)->Ready("serving");
}

TEST(ServiceManagerTest, AManagerThatHasGoneIsNoHindrance) {
  std::unique_ptr<ServiceManager> manager;
  {
    const FakeServiceManager fake;
    manager = ServiceManager::FromEnvironment().value();
  }
  manager->Ready("serving");
  manager->Stopping("draining", absl::ZeroDuration());
}

TEST(ServiceManagerTest, TheWatchdogIsThatOfThisProcess) {
  const FakeServiceManager fake(FakeServiceManager::Kind::kPath, absl::Seconds(30));
  EXPECT_EQ((*ServiceManager::FromEnvironment())->watchdog(), absl::Seconds(30));
  setenv("WATCHDOG_PID", absl::StrCat(getpid()).c_str(), 1);
  EXPECT_EQ((*ServiceManager::FromEnvironment())->watchdog(), absl::Seconds(30));
  setenv("WATCHDOG_PID", absl::StrCat(getppid()).c_str(), 1);
  EXPECT_EQ((*ServiceManager::FromEnvironment())->watchdog(), absl::InfiniteDuration());
}

TEST(ServiceManagerTest, RefusesWhatItDoesNotUnderstand) {
  const struct {
    const char* name;
    std::string value;
  } cases[] = {{"NOTIFY_SOCKET", "vsock:2:1234"},
               {"NOTIFY_SOCKET", "relative"},
               {"NOTIFY_SOCKET", "@"},
               {"NOTIFY_SOCKET", "/" + std::string(107, 'x')},
               {"WATCHDOG_USEC", "0"},
               {"WATCHDOG_USEC", "-1"},
               {"WATCHDOG_USEC", "3s"},
               {"WATCHDOG_USEC", "99999999999999999999"},
               {"WATCHDOG_PID", "me"}};
  for (const auto& [name, value] : cases) {
    const FakeServiceManager fake(FakeServiceManager::Kind::kPath, absl::Seconds(30));
    setenv(name, value.c_str(), 1);
    const absl::Status status = ServiceManager::FromEnvironment().status();
    ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name << "=" << value;
    EXPECT_EQ(errors::GetFieldViolation(status)->field, name);
    EXPECT_EQ(errors::GetFieldViolation(status)->value, value);
  }
}

TEST(KeepAliveTest, SaysThatTheProcessIsAliveOnlyWhileItIs) {
  const FakeServiceManager fake(FakeServiceManager::Kind::kAbstract, absl::Milliseconds(40));
  const auto manager = ServiceManager::FromEnvironment();
  ASSERT_TRUE(manager.ok()) << manager.status();
  std::atomic<bool> live{true};
  const KeepAlive keep_alive(
      manager->get(), [&live] { return live ? absl::OkStatus() : absl::UnavailableError("no progress"); });
  for (int i = 0; i < 3; ++i)
    EXPECT_THAT(fake.Next(absl::Minutes(1)).value_or(""), HasSubstr("WATCHDOG=1\n"));
  live = false;
  fake.NextWith("not alive");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(fake.Next(absl::Minutes(1)), "STATUS=not alive: no progress\n");
  live = true;
  fake.NextWith("WATCHDOG=1\n");
}

}  // namespace
}  // namespace lossd::app::service_manager_test
