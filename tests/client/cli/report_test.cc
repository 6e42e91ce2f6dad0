// SPDX-License-Identifier: Apache-2.0
// What lossctl prints: descriptions, benchmark reports, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "client/cli/context.h"
#include "client/cli/describe.h"
#include "client/cli/http.h"
#include "client/cli/loss_commands.h"
#include "client/cli/options.h"
#include "client/cpp/client.h"
#include "kernels/errors/field_error.h"
#include "proto/wire/status_details.h"

namespace lossd::cli::report_test {
namespace {

using ::testing::HasSubstr;

v1::HeadDescription Head() {
  v1::HeadDescription head;
  head.mutable_spec()->set_name("lm");
  head.mutable_spec()->set_hidden_size(4096);
  head.mutable_spec()->set_vocab_size(128256);
  head.mutable_spec()->set_norm(v1::NORM_RMSNORM);
  head.mutable_spec()->set_norm_epsilon(1e-6f);
  head.set_compute_dtype(v1::DTYPE_BF16);
  head.mutable_state()->set_incarnation(0xfedcba9876543210);
  head.mutable_state()->set_step(1234);
  head.mutable_state()->set_generation(17);
  head.mutable_state()->set_weights_version(18);
  head.set_step_rows(65536);
  head.set_step_microbatches(8);
  head.set_total_rows(123456789012);
  head.set_open_streams(2);
  head.mutable_memory()->set_weights(uint64_t{4096} * 128256 * 4);
  return head;
}

TEST(ReportTest, AServerOfSeveralDevicesSaysWhatCarriesTheirSums) {
  v1::ServerDescription server;
  EXPECT_FALSE(nlohmann::ordered_json::parse(ToJson(server).dump()).contains("collectives"));
  EXPECT_THAT(ServerText(server, "here:1", {}), ::testing::Not(HasSubstr("collectives")));
  server.set_collectives("gloo");
  EXPECT_EQ(nlohmann::ordered_json::parse(ToJson(server).dump())["collectives"], "gloo");
  EXPECT_THAT(ServerText(server, "here:1", {}), ::testing::ContainsRegex("collectives +gloo\n"));
}

TEST(ReportTest, AServerSaysHowItsGpusAreShared) {
  v1::ServerDescription server;
  EXPECT_FALSE(nlohmann::ordered_json::parse(ToJson(server).dump()).contains("gpu_sharing"));
  EXPECT_THAT(ServerText(server, "here:1", {}), ::testing::Not(HasSubstr("GPU sharing")));
  server.set_gpu_sharing("MPS, client priority 0 (normal)");
  EXPECT_EQ(nlohmann::ordered_json::parse(ToJson(server).dump())["gpu_sharing"],
            "MPS, client priority 0 (normal)");
  EXPECT_THAT(ServerText(server, "here:1", {}),
              ::testing::ContainsRegex("GPU sharing +MPS, client priority 0 \\(normal\\)\n"));
}

TEST(ReportTest, HeadsTable) {
  v1::HeadDescription small;
  small.mutable_spec()->set_name("a");
  small.mutable_spec()->set_hidden_size(8);
  small.mutable_spec()->set_vocab_size(10);
  small.mutable_spec()->set_bias(true);
  small.mutable_spec()->set_frozen(true);
  small.set_compute_dtype(v1::DTYPE_FP32);
  EXPECT_EQ(
      HeadsTable({small, Head()}),
      "NAME  HIDDEN x VOCAB            COMPUTE   STEP  STEP ROWS       TOTAL ROWS  STREAMS  QUEUE    MEMORY\n"
      "a     8 x 10 + bias, frozen     fp32         0          0                0        0      0       0 B\n"
      "lm    4,096 x 128,256, rmsnorm  bf16     1,234     65,536  123,456,789,012        2      0  1.96 "
      "GiB\n");
  EXPECT_THAT(HeadsTable({}), HasSubstr("lossctl create"));
}

TEST(ReportTest, HeadJsonKeepsEveryDigit) {
  const nlohmann::ordered_json json = nlohmann::ordered_json::parse(ToJson(Head()).dump());
  EXPECT_EQ(json["name"], "lm");
  EXPECT_EQ(json["incarnation"], "fedcba9876543210");
  EXPECT_EQ(json["generation"], 17);
  EXPECT_EQ(json["weights_version"], 18);
  EXPECT_EQ(json["total_rows"].get<uint64_t>(), 123456789012u);
  EXPECT_EQ(json["norm"], "rmsnorm");
  EXPECT_EQ(json["norm_epsilon"].dump(), "1e-06");
  EXPECT_EQ(json["optimizer_state"], "adam") << "the protocol's default";
  EXPECT_EQ(json["memory"]["total"].get<uint64_t>(), uint64_t{4096} * 128256 * 4);
}

TEST(ReportTest, QuantilesOfSamples) {
  std::vector<double> values;
  for (int i = 1; i <= 200; ++i) values.push_back(i);
  EXPECT_EQ(SampleQuantile(values, 0), 1);
  EXPECT_EQ(SampleQuantile(values, 0.5), 100);
  EXPECT_EQ(SampleQuantile(values, 0.99), 198);
  EXPECT_EQ(SampleQuantile(values, 1), 200);
  EXPECT_EQ(SampleQuantile({7}, 0.5), 7);
}

TEST(ReportTest, Bench) {
  const BenchSetup setup{
      "lm", "real", "all", "bf16", 4096, 2048, 4, 2, 1 << 20, "shared_memory", "the server is on this host"};
  BenchTotals totals;
  totals.seconds = 2;
  totals.rows = 8192;
  totals.streams = 3;
  totals.sent_bytes = 4000000000;
  totals.received_bytes = 2000000000;
  totals.queue_seconds = 0.4;
  totals.compute_seconds = 0.8;
  totals.latencies = {0.4, 0.1, 0.3, 0.2};
  EXPECT_EQ(BenchText(setup, totals),
            "head        lm, D = 4,096, bf16\n"
            "computed    loss, dL/dx and dL/dW\n"
            "load        4 x 2,048 real rows in flight, 3 streams over 2 channels, slices of 1.00 MiB\n"
            "transport   shared_memory (the server is on this host)\n"
            "ran         2.00 s, 4 microbatches\n"
            "throughput  4.10 k rows/s\n"
            "transfer    2.000 GB/s there, 1.000 GB/s back\n"
            "latency     p50 200 ms, p90 400 ms, p99 400 ms, max 400 ms\n"
            "server      per microbatch, summed over slices: queue 100 ms, device 200 ms\n");
  const auto json = BenchJson(setup, totals);
  EXPECT_EQ(json["rows_per_second"], 4096.0);
  EXPECT_EQ(json["latency_seconds"]["p50"], 0.2);
  EXPECT_EQ(json["latency_seconds"]["mean"], 0.25);
  EXPECT_EQ(json["microbatches"], 4);
  EXPECT_THAT(BenchText(setup, {}), HasSubstr("0 microbatches")) << "interrupted before the first one";
  totals.sampling_variance = 0.0002;
  totals.squared_gradient = 8;
  EXPECT_THAT(BenchText(setup, totals), HasSubstr("gradients   predicted error 0.005\n"));
  EXPECT_NEAR(static_cast<double>(BenchJson(setup, totals)["gradient_error"]), 0.005, 1e-12);
}

TEST(ReportTest, ExitCodes) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCodeOf(absl::InternalError("")), 1);
  EXPECT_EQ(ExitCodeOf(absl::AbortedError("")), 1);
  EXPECT_EQ(ExitCodeOf(absl::DeadlineExceededError("")), 1);
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("")), 3);
  EXPECT_EQ(ExitCodeOf(absl::NotFoundError("")), 4);
  EXPECT_EQ(ExitCodeOf(absl::FailedPreconditionError("")), 4);
  EXPECT_EQ(ExitCodeOf(absl::ResourceExhaustedError("")), 4);
}

TEST(ReportTest, ErrorsHaveUnits) {
  EXPECT_EQ(WithUnits("needs 1610612736 bytes; 5 of 8589934592 bytes are in use"),
            "needs 1610612736 bytes (1.50 GiB); 5 of 8589934592 bytes (8.00 GiB) are in use");
  EXPECT_EQ(WithUnits("2097152 bytes"), "2097152 bytes (2.00 MiB)");
  for (const char* as_it_is :
       {"has 4096 bytes", "no bytes", "1.5123456 bytes", "20971520 bytes (20 MiB)", ""}) {
    EXPECT_EQ(WithUnits(as_it_is), as_it_is);
  }
  EXPECT_EQ(ErrorText(absl::InternalError("took 104857600 bytes\033[2J"), false),
            "lossctl: took 104857600 bytes (100 MiB)?[2J\n");
  EXPECT_THAT(ErrorText(absl::InternalError("took 104857600 bytes"), true),
              HasSubstr("took 104857600 bytes\""));
}

TEST(ReportTest, BytesOfAFieldHaveTheirUnit) {
  EXPECT_EQ(ErrorText(errors::FieldError("spec.workspace_bytes", "be at most x", 8388608), false),
            "lossctl: spec.workspace_bytes must be at most x, got 8388608 bytes (8.00 MiB)\n");
  EXPECT_EQ(ErrorText(errors::FieldError("rows", "be at most x", 8388608), false),
            "lossctl: rows must be at most x, got 8388608\n");
}

TEST(ReportTest, ErrorsOfTheLibraryNameTheOption) {
  EXPECT_EQ(InTermsOfOptions("options.credentials.ca is \"x\", which has no certificate"),
            "--ca (LOSSD_CA) is \"x\", which has no certificate");
  EXPECT_EQ(InTermsOfOptions("options.target is 'x'; it has no port"),
            "the server's address is 'x'; it has no port");
  EXPECT_EQ(InTermsOfOptions("open.options.softcap must be x"), "open.options.softcap must be x");
}

TEST(ReportTest, NumbersOfBytesAreReadAsTheServerReadsThem) {
  EXPECT_EQ(ParseBytes("4096"), 4096u);
  EXPECT_EQ(ParseBytes("3MB"), 3'000'000u);
  EXPECT_EQ(ParseBytes("3MiB"), 3u << 20);
  EXPECT_EQ(ParseBytes("3m"), 3u << 20);
  EXPECT_EQ(ParseBytes("1.5 GiB"), uint64_t{3} << 29);
  EXPECT_EQ(ParseBytes("0"), 0u);
  for (const char* text : {"", "lots", "-1", "1e3", "0x10", "5PiB", "1 2", "GiB", "99999999TiB", "nan", "inf",
                           "1..2", "1iB", "+5"}) {
    EXPECT_EQ(ParseBytes(text), std::nullopt) << text;
  }
}

TEST(ReportTest, ErrorsSayWhatToDo) {
  const auto of_field = [](absl::string_view field, absl::string_view message) {
    return errors::WithViolation(absl::UnavailableError(message), {std::string(field), "must be x", "y"});
  };
  EXPECT_EQ(ErrorText(of_field(client::kTargetField, "no server at 127.0.0.1:7070"), false),
            "lossctl: no server at 127.0.0.1:7070; start one with `lossd`, or name another with --server "
            "HOST:PORT or "
            "LOSSD_SERVER\n");
  EXPECT_EQ(ErrorText(of_field(kHttpField, "nothing answers"), false), "lossctl: nothing answers\n");
  EXPECT_THAT(ErrorText(absl::UnavailableError("no server at x"), false), HasSubstr("lossctl health"))
      << "the message is for people only";
  const auto refused = nlohmann::json::parse(ErrorText(errors::FieldError("--rows", "be x", 5), true));
  EXPECT_EQ(refused["error"]["field"], "--rows");
  EXPECT_EQ(refused["error"]["value"], "5");
  EXPECT_FALSE(refused["error"].contains("incarnation")) << "no server said it";
  absl::Status status = absl::FailedPreconditionError("rows are missing");
  v1::ErrorDetail detail;
  detail.set_field("expected_microbatches[1]");
  detail.set_current_step(9);
  detail.add_missing("microbatch 7: rows [128, 256)");
  wire::SetErrorDetail(detail, &status);
  EXPECT_EQ(ErrorText(status, false),
            "lossctl: rows are missing\n  open step: 9\n  missing: microbatch 7: rows [128, 256)\n");
  const auto json = nlohmann::json::parse(ErrorText(status, true));
  EXPECT_EQ(json["error"]["code"], "FAILED_PRECONDITION");
  EXPECT_EQ(json["error"]["exit_code"], 4);
  EXPECT_EQ(json["error"]["field"], "expected_microbatches[1]");
  EXPECT_EQ(json["error"]["missing"][0], "microbatch 7: rows [128, 256)");
}

}  // namespace
}  // namespace lossd::cli::report_test
