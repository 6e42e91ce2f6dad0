// SPDX-License-Identifier: Apache-2.0
#include "client/cli/http_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lossd::cli::http_address_test {
namespace {

std::string Address(const std::string& http, const std::string& target) {
  v1::ServerDescription server;
  server.set_http(http);
  const auto address = HttpAddressOf(server, target);
  return address.ok() ? *address : std::string(address.status().message());
}

TEST(HttpAddressTest, TheServerSaysWhereItListens) {
  EXPECT_EQ(Address("http://127.0.0.1:7071", "127.0.0.1:7070"), "http://127.0.0.1:7071");
  EXPECT_EQ(Address("http://127.0.0.1:7071", "localhost:7070"), "http://127.0.0.1:7071");
  EXPECT_EQ(Address("http://10.0.0.5:80", "gpu-7:7070"), "http://10.0.0.5:80");
  EXPECT_EQ(Address("http://[::1]:80", "unix:/run/lossd"), "http://[::1]:80");
}

TEST(HttpAddressTest, EveryAddressIsTheOneThatGrpcHas) {
  EXPECT_EQ(Address("http://0.0.0.0:7071", "gpu-7:7070"), "http://gpu-7:7071");
  EXPECT_EQ(Address("http://[::]:7071", "[fd00::7]:7070"), "http://[fd00::7]:7071");
  EXPECT_EQ(Address("http://0.0.0.0:7071", "unix:/run/lossd"), "http://127.0.0.1:7071");
  EXPECT_EQ(Address("http://[::]:7071", "unix:/run/lossd"), "http://[::1]:7071");
}

TEST(HttpAddressTest, WithTlsTheHostIsTheOneOfTheCertificate) {
  EXPECT_EQ(Address("https://10.0.0.5:7071", "gpu-7:7070"), "https://gpu-7:7071");
  EXPECT_EQ(Address("https://127.0.0.1:7071", "localhost:7070"), "https://localhost:7071");
  EXPECT_EQ(Address("https://127.0.0.1:7071", "unix:/run/lossd"), "https://127.0.0.1:7071");
}

TEST(HttpAddressTest, WhatCannotBeReachedIsSaid) {
  EXPECT_THAT(Address("", "gpu-7:7070"), ::testing::HasSubstr("the server at gpu-7:7070 has no HTTP side"));
  EXPECT_THAT(Address("http://127.0.0.1:7071", "gpu-7:7070"),
              ::testing::HasSubstr(
                  "answers HTTP only on its own machine, at http://127.0.0.1:7071; name an address"));
  EXPECT_THAT(Address("nonsense", "gpu-7:7070"), ::testing::HasSubstr("which is no URL"));
}

TEST(HttpAddressTest, AnOldServerHasTheUsualPort) {
  EXPECT_EQ(*HttpAddressOf(v1::ServerDescription(), "gpu-7:9000"), "http://gpu-7:7071");
  EXPECT_EQ(*HttpAddressOf(v1::ServerDescription(), "[::1]:9000"), "http://[::1]:7071");
}

}  // namespace
}  // namespace lossd::cli::http_address_test
