// SPDX-License-Identifier: Apache-2.0
#include "server/app/process.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <string>

namespace lossd::app::process_test {
namespace {

std::string Multicast() {
  const char* const value = std::getenv("NCCL_NVLS_ENABLE");
  return value == nullptr ? "unset" : value;
}

TEST(ProcessTest, NvlinkMulticastIsOffUnlessTheEnvironmentSaysOtherwise) {
  unsetenv("NCCL_NVLS_ENABLE");
  PrepareProcess();
  EXPECT_EQ(Multicast(), "0");
  for (const char* const said : {"1", "2", ""}) {
    setenv("NCCL_NVLS_ENABLE", said, 1);
    PrepareProcess();
    EXPECT_EQ(Multicast(), said);
  }
}

TEST(ProcessTest, AWriteThatFailsDoesNotEndTheProcess) {
  signal(SIGPIPE, SIG_DFL);
  signal(SIGXFSZ, SIG_DFL);
  PrepareProcess();
  EXPECT_EQ(signal(SIGPIPE, SIG_DFL), SIG_IGN);
  EXPECT_EQ(signal(SIGXFSZ, SIG_DFL), SIG_IGN);
}

}  // namespace
}  // namespace lossd::app::process_test
