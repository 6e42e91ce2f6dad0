// SPDX-License-Identifier: Apache-2.0
// The linked lossd program, with a device that can be lost: what calls hear, what the metrics and probes say,
// and how the process ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "tests/support/fake_service_manager.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace lossd::device_loss_test {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Minutes(2);  // for what a slow machine does
constexpr uint64_t kHidden = 8;

class DeviceLossTest : public ::testing::Test {
 protected:
  DeviceLossTest() { setenv("LOSSD_LOSE_DEVICE", lost_.c_str(), 1); }
  ~DeviceLossTest() override { unsetenv("LOSSD_LOSE_DEVICE"); }

  void Start(std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--backend=cuda", "--http=127.0.0.1:0", "--drain_timeout=60s"});
    server_ = std::make_unique<test::ServerProcess>(LOSSD_WITH_LOSABLE_DEVICE, flags);
    client_ = client::Client::Connect({.target = server_->target(), .retry = {.max_attempts = 1}}).value();
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("head");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(100);
    ASSERT_TRUE(client_->CreateHead(request).ok());
    ASSERT_TRUE(client_->GradNorm("head").ok());
    EXPECT_EQ(test::HttpStatus(test::HttpGet(server_->http(), "/livez")), 200);
    EXPECT_THAT(test::HttpGet(server_->http(), "/metrics"), HasSubstr("\nlossd_device_lost 0\n"));
  }
  void LoseDevice() { test::WriteWholeFile(lost_, ""); }

  test::TempFolder folder_;
  const std::string lost_ = folder_.File("lost");
  std::unique_ptr<test::ServerProcess> server_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(DeviceLossTest, EndsTheProcessWithAStatusOfItsOwn) {
  Start({});
  LoseDevice();
  const absl::Status status = client_->GradNorm("head").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("fell off the bus")) << "the call is answered";
  EXPECT_EQ(server_->WaitFor(kLimit), 3);
}

TEST_F(DeviceLossTest, EveryKindOfCallNoticesIt) {
  const std::vector<float> hidden(kHidden);
  std::vector<int32_t> targets = {1};
  const std::vector<std::function<absl::Status()>> calls = {
      [&] {
        return client_
            ->ComputeLoss({.head = "head",
                           .step = 0,
                           .id = 0,
                           .hidden_size = kHidden,
                           .hidden_dtype = v1::DTYPE_FP32,
                           .hidden = hidden.data(),
                           .targets = targets},
                          {}, {})
            .status();
      },
      [&] { return client_->ZeroGradients("head", 0).status(); },
      [&] {
        v1::CreateHeadRequest request;
        request.mutable_spec()->set_name("other");
        request.mutable_spec()->set_hidden_size(kHidden);
        request.mutable_spec()->set_vocab_size(10);
        return client_->CreateHead(request).status();
      },
      [&] { return client_->SaveCheckpoint("head", "x").status(); },
      [&] { return client_->ReadTensor("head", v1::PARAM_WEIGHT).status(); },
      [&] {
        const std::vector<float> weight(100 * kHidden);
        return client_->WriteTensor("head", v1::PARAM_WEIGHT, weight).status();
      },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    std::filesystem::remove(lost_);
    Start({});
    LoseDevice();
    EXPECT_FALSE(calls[i]().ok());
    EXPECT_EQ(server_->WaitFor(kLimit), 3);
  }
}

TEST_F(DeviceLossTest, TheFlagKeepsItRunning) {
  Start({"--exit_on_device_loss=false"});
  LoseDevice();
  EXPECT_FALSE(client_->GradNorm("head").ok());
  EXPECT_EQ(test::HttpStatus(test::HttpGet(server_->http(), "/livez")), 503);
  EXPECT_EQ(test::HttpStatus(test::HttpGet(server_->http(), "/readyz")), 503);
  EXPECT_THAT(test::HttpGet(server_->http(), "/livez"), HasSubstr("device lost"));
  EXPECT_THAT(test::HttpGet(server_->http(), "/metrics"), HasSubstr("\nlossd_device_lost 1\n"));
  EXPECT_THAT(test::HttpGet(server_->http(), "/"),
              HasSubstr("<span class=\"state error\">device lost</span>"));
  EXPECT_TRUE(client_->DescribeHead("head").ok()) << "what needs no device works";
  EXPECT_TRUE(server_->Running());
}

TEST_F(DeviceLossTest, TheServiceManagerHearsThatTheServerIsNotAlive) {
  const test::FakeServiceManager manager(test::FakeServiceManager::Kind::kPath, absl::Milliseconds(200));
  Start({"--exit_on_device_loss=false"});
  manager.NextWith("WATCHDOG=1\n");
  LoseDevice();
  EXPECT_FALSE(client_->GradNorm("head").ok());
  EXPECT_EQ(manager.NextWith("not alive"), "STATUS=not alive: device lost\n");
  for (int i = 0; i < 5; ++i) EXPECT_EQ(manager.NextWith("="), "STATUS=not alive: device lost\n");
}

TEST_F(DeviceLossTest, TheServiceManagerHearsWhyTheServerEnds) {
  const test::FakeServiceManager manager;
  Start({});
  LoseDevice();
  EXPECT_FALSE(client_->GradNorm("head").ok());
  EXPECT_THAT(manager.NextWith("STOPPING=1\n"), HasSubstr("STATUS=draining: the device is lost\n"));
  EXPECT_EQ(server_->WaitFor(kLimit), 3);
}

}  // namespace
}  // namespace lossd::device_loss_test
