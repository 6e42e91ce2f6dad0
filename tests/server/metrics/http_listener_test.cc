// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/metrics/http_server.h"

namespace lossd::metrics::http_listener_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(HttpListenerTest, AFreePort) {
  const auto listener = ListenForHttp("127.0.0.1:0");
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_THAT(listener->address, StartsWith("127.0.0.1:"));
  EXPECT_NE(listener->address, "127.0.0.1:0");
  EXPECT_TRUE(listener->loopback);
  const auto second = ListenForHttp(listener->address);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), HasSubstr(listener->address));
}

TEST(HttpListenerTest, TheLoopbackAndBeyond) {
  for (const auto& [address, loopback] : {std::pair("127.3.2.1:0", true), std::pair("0.0.0.0:0", false)}) {
    const auto listener = ListenForHttp(address);
    ASSERT_TRUE(listener.ok()) << listener.status();
    EXPECT_EQ(listener->loopback, loopback) << address;
  }
}

TEST(HttpListenerTest, Ipv6) {
  const auto listener = ListenForHttp("[::1]:0");
  if (absl::IsUnavailable(listener.status())) GTEST_SKIP() << listener.status();  // a machine without IPv6
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_THAT(listener->address, StartsWith("[::1]:"));
  EXPECT_TRUE(listener->loopback);
}

TEST(HttpListenerTest, AddressesItCannotUse) {
  for (const char* address :
       {"", ":", ":80", "nowhere", "localhost:80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000",
        "127.0.0.1:-1", "127.0.0.1:+80", "127.0.0.1:80s", "127.0.0.1:80,8080", "127.1:80", "::1:80",
        "[::1]80", "[::1:80", "[127.0.0.1]:80"}) {
    const auto listener = ListenForHttp(address);
    EXPECT_EQ(listener.status().code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(listener.status().message(), HasSubstr(address));
  }
}

}  // namespace
}  // namespace lossd::metrics::http_listener_test
