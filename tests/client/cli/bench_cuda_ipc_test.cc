// SPDX-License-Identifier: Apache-2.0
// lossctl bench with its rows on a GPU that is played (fake_cuda.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/client/cpp/cuda_ipc_fixture.h"
#include "tests/support/temp_folder.h"

namespace lossd::client::testing::bench_cuda_ipc_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class BenchCudaIpcTest : public CudaIpcTest {
 protected:
  // What `lossctl ARGUMENTS` prints on both streams, which finds the driver in `driver`.
  std::string Run(const std::string& driver, const std::string& arguments, int exit_code) {
    const std::string out = folder_.File("out");
    const std::string command =
        absl::StrCat("LD_LIBRARY_PATH=", driver, ":$LD_LIBRARY_PATH LOSSD_SERVER=", server_->target(),
                     " " LOSSCTL_PATH " ", arguments, " >", out, " 2>&1");
    const int status = std::system(command.c_str());
    const std::string text = test::ReadWholeFile(out);
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, exit_code) << arguments << ": " << text;
    return text;
  }

  test::TempFolder folder_;
};

TEST_F(BenchCudaIpcTest, RowsAreOnTheServersGpu) {
  for (const std::string what : {"all", "dx", "loss"}) {
    const std::string text = Run(
        FAKE_CUDA_FOLDER,
        absl::StrCat("--json bench lm --transport cuda_ipc --rows 50 --microbatches 6 --in-flight 3 --what ",
                     what),
        0);
    const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object()) << text;
    EXPECT_EQ(json["transport"], "cuda_ipc");
    EXPECT_EQ(json["transport_reason"], absl::StrCat("the server's GPU is of this host; 4 MiB of ", kUuid));
    EXPECT_EQ(json["rows"], 300);
    EXPECT_GT(json["sent_bytes_per_second"], 0);
    EXPECT_EQ(json["received_bytes_per_second"] > 0, what != "loss");
  }
  EXPECT_THAT(Run(FAKE_CUDA_FOLDER,
                  "bench lm --transport cuda_ipc --rows 5 --microbatches 1 --shared-memory-bytes 1MiB", 0),
              HasSubstr(absl::StrCat("cuda_ipc (the server's GPU is of this host; 1 MiB of ", kUuid, ")")));
}

TEST_F(BenchCudaIpcTest, RowsAreOnAnotherGpu) {
  for (const int gpu : {0, 1}) {
    const auto json = nlohmann::json::parse(
        Run(FAKE_CUDA_FOLDER,
            absl::StrCat("--json bench lm --transport cuda_ipc --rows 50 --microbatches 3 --gpu ", gpu), 0),
        nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object());
    EXPECT_EQ(json["transport"], "cuda_ipc");
    EXPECT_EQ(json["gpu"], gpu);
    EXPECT_EQ(json["rows"], 150);
    EXPECT_GT(json["received_bytes_per_second"], 0);
  }
}

// With every transport: what it makes of rows that are on that GPU.
TEST_F(BenchCudaIpcTest, RowsAreOnAGpuWithOtherTransports) {
  const auto bench = [&](const std::string& arguments) {
    const auto json = nlohmann::json::parse(
        Run(FAKE_CUDA_FOLDER, absl::StrCat("--json bench lm --rows 50 --microbatches 3 ", arguments), 0), nullptr,
        /*allow_exceptions=*/false);
    EXPECT_TRUE(json.is_object());
    EXPECT_EQ(json["rows"], 150);
    return json;
  };
  const auto same = bench("--gpu 0");
  EXPECT_EQ(same["transport"], "cuda_ipc") << same;
  EXPECT_EQ(same["gpu"], 0);
  const auto another = bench("--gpu 1 --transport auto");
  EXPECT_EQ(another["transport"], "grpc") << another;
  EXPECT_EQ(another["gpu"], 1);
  EXPECT_THAT(another["transport_reason"].get<std::string>(), HasSubstr("and the server's GPU is "));
  const auto messages = bench("--gpu 0 --transport grpc");
  EXPECT_EQ(messages["transport"], "grpc");
  EXPECT_EQ(messages["transport_reason"], "the transport is grpc");
  EXPECT_TRUE(bench("")["gpu"].is_null());
}

TEST_F(BenchCudaIpcTest, RefusesGpusThatAreNotThere) {
  EXPECT_THAT(Run(FAKE_CUDA_FOLDER, "bench lm --transport cuda_ipc --microbatches 1 --gpu 2", 4),
              HasSubstr("--gpu must be below the number of GPUs that are visible, 2, got 2"));
  EXPECT_THAT(Run(FAKE_CUDA_FOLDER, "bench lm --transport grpc --microbatches 1 --gpu 2", 4),
              HasSubstr("--gpu must be below the number of GPUs that are visible, 2, got 2"));
  Run(FAKE_CUDA_FOLDER, "bench lm --transport cuda_ipc --microbatches 1 --gpu -1", 2);
}

TEST_F(BenchCudaIpcTest, SaysWhyThereIsNoDriver) {
  std::ofstream(folder_.File("libcuda.so.1"));  // empty
  EXPECT_THAT(
      Run(folder_.path(), "bench lm --transport cuda_ipc --microbatches 1", 3),
      AllOf(HasSubstr("no shared memory: no CUDA driver: "), HasSubstr("libcuda.so.1: file too short")));
}

}  // namespace
}  // namespace lossd::client::testing::bench_cuda_ipc_test
