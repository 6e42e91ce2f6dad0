// SPDX-License-Identifier: Apache-2.0
// Options that are out of range, and what follows from them.
#include "server/app/check_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace lossd::app::check_options_test {
namespace {

using ::testing::HasSubstr;

void ExpectRefused(const ServerOptions& options, const std::string& message) {
  const absl::Status status = CheckOptions(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

TEST(CheckOptionsTest, Checkpoints) {
  ServerOptions options;
  EXPECT_TRUE(CheckOptions(options).ok());
  options.checkpoint_threads = 64;
  options.checkpoint_shard_bytes = 1;
  EXPECT_TRUE(CheckOptions(options).ok());
  options.checkpoint_threads = 65;
  ExpectRefused(options, "checkpoint_threads must be at most 64, got 65");
  options.checkpoint_threads = -1;
  ExpectRefused(options, "checkpoint_threads must be at least 0, got -1");
  options = {};
  options.checkpoint_shard_bytes = 0;
  ExpectRefused(options, "checkpoint_shard_bytes must be at least 1, got 0");
}

TEST(CheckOptionsTest, AThreadForEachDevice) {
  ServerOptions options;
  kernels::BackendInfo backend;
  EXPECT_EQ(CheckpointThreads(options, backend), 4);
  backend.uuids.resize(8);
  EXPECT_EQ(CheckpointThreads(options, backend), 8);
  options.cpu_devices = 12;
  EXPECT_EQ(CheckpointThreads(options, backend), 12);
  options.cpu_devices = 1000;
  EXPECT_EQ(CheckpointThreads(options, backend), 64);
  options.checkpoint_threads = 2;
  EXPECT_EQ(CheckpointThreads(options, backend), 2);
}

TEST(CheckOptionsTest, StreamPriority) {
  ServerOptions options;
  EXPECT_EQ(BackendOf(options).stream_priority, "dx");
  for (const char* known : {"dx", "all", "none"}) {
    options.stream_priority = known;
    EXPECT_TRUE(CheckOptions(options).ok()) << known;
    EXPECT_EQ(BackendOf(options).stream_priority, known);
  }
  for (const char* unknown : {"", "DX", "high"}) {
    options.stream_priority = unknown;
    ExpectRefused(options, absl::StrCat("stream_priority must be dx, all or none, got ", unknown));
  }
}

}  // namespace
}  // namespace lossd::app::check_options_test
