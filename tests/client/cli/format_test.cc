// SPDX-License-Identifier: Apache-2.0
// Tests of the parts of lossctl that need no server: texts and tables, events, histories, HTTP addresses,
// metrics, shares, tensors in files, descriptions, benchmark reports and errors.
#include "client/cli/format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>

#include "client/cli/context.h"
#include "client/cli/describe.h"
#include "client/cli/head_commands.h"
#include "client/cli/http.h"
#include "client/cli/loss_commands.h"
#include "client/cli/options.h"
#include "client/cli/tensors.h"
#include "client/cpp/client.h"
#include "kernels/errors/field_error.h"
#include "proto/wire/status_details.h"
#include "tests/support/temp_folder.h"

namespace lossd::cli::format_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- Format ----

TEST(FormatTest, NamesOfASeriesStayDifferent) {
  EXPECT_EQ(TruncatedName("short", 5), "short");
  EXPECT_EQ(TruncatedName("experiment-with-seed-17", 12), "experi…ed-17");
  EXPECT_EQ(TruncatedName("äöüäöüäöü", 5), "äö…öü");
  EXPECT_EQ(TruncatedName("abcdef", 2), "a…");
  EXPECT_EQ(TruncatedName("abcdef", 0), "");
}

TEST(FormatTest, Bytes) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1.00 KiB");
  EXPECT_EQ(HumanBytes(10.0 * 1024), "10.0 KiB");
  EXPECT_EQ(HumanBytes(1.5 * 1024 * 1024 * 1024), "1.50 GiB");
  EXPECT_EQ(HumanBytes(123.0 * 1024 * 1024), "123 MiB");
}

TEST(FormatTest, Counts) {
  EXPECT_EQ(HumanCount(0), "0");
  EXPECT_EQ(HumanCount(999), "999");
  EXPECT_EQ(HumanCount(1000), "1,000");
  EXPECT_EQ(HumanCount(1234567), "1,234,567");
  EXPECT_EQ(HumanCount(~uint64_t{0}), "18,446,744,073,709,551,615");
}

TEST(FormatTest, RatesAndTimes) {
  EXPECT_EQ(HumanRate(0), "0.00");
  EXPECT_EQ(HumanRate(12.34), "12.3");
  EXPECT_EQ(HumanRate(4560), "4.56 k");
  EXPECT_EQ(HumanRate(7.891e6), "7.89 M");
  EXPECT_EQ(HumanSeconds(0), "0 s");
  EXPECT_EQ(HumanSeconds(12.3e-6), "12.3 us");
  EXPECT_EQ(HumanSeconds(4.56e-3), "4.56 ms");
  EXPECT_EQ(HumanSeconds(59.94), "59.9 s");
  EXPECT_EQ(HumanSeconds(184), "3m 04s");
  EXPECT_EQ(HumanSeconds(7384), "2h 03m 04s");
  EXPECT_EQ(HumanSeconds(90061), "1d 01h 01m");
  EXPECT_EQ(HumanIncarnation(255), "00000000000000ff");
}

TEST(FormatTest, Sparklines) {
  EXPECT_EQ(Sparkline({}), "");
  EXPECT_EQ(Sparkline({0, 0}), "▁▁");
  EXPECT_EQ(Sparkline({0, 50, 100}), "▁▅█");
  EXPECT_EQ(DisplayWidth("▁▅█"), 3u);
  EXPECT_EQ(DisplayWidth("\033[1;31mred\033[0m"), 3u);
}

TEST(FormatTest, TablesAlign) {
  Table table({{"NAME"}, {"ROWS", Align::kRight}, {"NOTE"}});
  table.AddRow({"a", "1", "first"});
  table.AddRow({"longer", "1,000,000", ""});
  EXPECT_EQ(table.ToString(),
            "NAME         ROWS  NOTE\n"
            "a               1  first\n"
            "longer  1,000,000\n");
}

TEST(FormatTest, TrendlinesGoFromTheSmallestToTheLargest) {
  EXPECT_EQ(Trendline({}), "");
  EXPECT_EQ(Trendline({2.5, 2.5}), "▁▁");
  EXPECT_EQ(Trendline({2, std::nan(""), 3, 2.5}), "▁x█▅");
  EXPECT_EQ(Last({1, 2, 3}, 2).size(), 2u);
  EXPECT_EQ(Last({1, 2, 3}, 9).size(), 3u);
}

TEST(FormatTest, LinesAreCutToTheTerminal) {
  EXPECT_EQ(Truncated("short", 5), "short");
  EXPECT_EQ(Truncated("longer", 5), "long…");
  EXPECT_EQ(Truncated("▁▂▃▄", 3), "▁▂…");
  EXPECT_EQ(Truncated("\033[31mred\033[0m", 2), "\033[31mr…\033[0m");
  EXPECT_EQ(Truncated("x", 0), "");
  EXPECT_EQ(Printable("a\033[2Jb\nc\xc2\x9b"
                      "d ä"),
            "a?[2Jb?c?d ä");
  EXPECT_EQ(PrintableLines("a\nb\r"), "a\nb?");
}

TEST(FormatTest, ColumnsGoByRank) {
  Table table({{"NAME"}, {"FIRST", Align::kLeft, 2}, {"SECOND", Align::kLeft, 1}});
  table.AddRow({"a", "b", "c"});
  EXPECT_EQ(table.Width(), 19u);
  EXPECT_EQ(table.ToString({}, 19), "NAME  FIRST  SECOND\na     b      c\n");
  EXPECT_EQ(table.ToString({}, 18), "NAME  SECOND\na     c\n");
  EXPECT_EQ(table.ToString({}, 5), "NAME\na\n");
  EXPECT_EQ(table.ToString({}, 3), "NA…\na\n");
  EXPECT_EQ(table.ToString({.color = true}, 5), "\033[1mNAME\033[0m\na\n");
}

TEST(FormatTest, FieldsAlign) {
  FieldList fields;
  fields.Add("a", "1");
  fields.Add("much longer", "2");
  EXPECT_EQ(fields.ToString(),
            "a            1\n"
            "much longer  2\n");
}

// ---- Events text ----

constexpr char kAnswer[] = R"({"incarnation":"00ab","last_id":9,"missed":true,"events":[
  {"id":8,"time":"2026-01-02T03:04:05.678Z","first_time":"2026-01-02T03:00:00.000Z","count":12,"level":"warning",
   "kind":"call_failed","head":"","text":"ApplyStep ended with NOT_FOUND"},
  {"id":9,"time":"2026-01-02T03:04:06.000Z","first_time":"2026-01-02T03:04:06.000Z","count":1,"level":"info",
   "kind":"head_created","head":"lm","text":"head\u001b[2J created"}]})";

TEST(EventsTextTest, ReadsWhatTheServerAnswers) {
  const absl::StatusOr<Events> events = ParseEvents(kAnswer);
  ASSERT_TRUE(events.ok()) << events.status();
  EXPECT_EQ(events->incarnation, "00ab");
  EXPECT_EQ(events->last_id, 9);
  EXPECT_TRUE(events->missed);
  ASSERT_EQ(events->events.size(), 2);
  EXPECT_EQ(EventLine(events->events[0]),
            "2026-01-02T03:04:05.678Z warning ApplyStep ended with NOT_FOUND (12 times)");
  EXPECT_EQ(EventLine(events->events[1]), "2026-01-02T03:04:06.000Z info    lm: head?[2J created");
}

TEST(EventsTextTest, OtherAnswersAreErrors) {
  EXPECT_FALSE(ParseEvents("").ok());
  EXPECT_FALSE(ParseEvents("<html>").ok());
  EXPECT_FALSE(ParseEvents("[]").ok());
  const std::string answer = kAnswer;
  for (const char* part :
       {"incarnation", "last_id", "missed", "events", "\"id", "time", "count", "level", "kind", "text"}) {
    std::string other = answer;
    other.replace(other.find(part), 1, part[0] == '"' ? "\"x" : "x");
    EXPECT_FALSE(ParseEvents(other).ok()) << part;
  }
}

// ---- Head history ----

v1::HeadDescription SomeHead() {
  v1::HeadDescription head;
  head.mutable_spec()->set_name("lm");
  head.mutable_state()->set_step(180);
  return head;
}

TEST(HeadHistoryTest, OneLine) {
  v1::HeadHistory history;
  EXPECT_EQ(HistoryText(history), "");
  history.set_applied_unix_seconds(1'700'000'000);
  EXPECT_EQ(HistoryText(history), "last step 2023-11-14 22:13:20Z");
  history.set_run("run-\n1");
  history.set_checkpoint("lm/best");
  history.set_checkpoint_step(1007);
  EXPECT_EQ(HistoryText(history).find('\n'), std::string::npos);
  history.set_run("run-1");
  EXPECT_EQ(HistoryText(history), "run run-1, last step 2023-11-14 22:13:20Z; saved as lm/best (step 1,007)");
  history.set_loaded(true);
  history.set_checkpoint_unix_seconds(1'700'000'060);
  history.set_open_run("run-1");
  EXPECT_EQ(
      HistoryText(history),
      "run run-1, last step 2023-11-14 22:13:20Z; loaded from lm/best (step 1,007), of 2023-11-14 22:14:20Z");
  history.set_open_run("run-2");
  EXPECT_TRUE(HistoryText(history).ends_with("; rows of the open step from run run-2"));
}

TEST(HeadHistoryTest, WhatIsLost) {
  v1::HeadDescription head = SomeHead();
  EXPECT_EQ(WhatIsLost(head), "head \"lm\" is at step 180: no checkpoint known");
  head.mutable_history()->set_checkpoint("lm/best");
  head.mutable_history()->set_checkpoint_step(179);
  EXPECT_EQ(WhatIsLost(head), "head \"lm\" is at step 180: 1 step since checkpoint lm/best");
  head.mutable_history()->set_checkpoint_step(180);
  EXPECT_EQ(StepsSinceSave(head), 0u);
  head.mutable_history()->set_checkpoint_step(200);  // the head went back
  EXPECT_EQ(WhatIsLost(head), "head \"lm\" is at step 180: no checkpoint known");
}

TEST(HeadHistoryTest, DescribeShowsIt) {
  v1::HeadDescription head = SomeHead();
  EXPECT_EQ(HeadText(head).find("\nhistory"), std::string::npos);
  EXPECT_EQ(ToJson(head)["history"]["run"], "");
  head.mutable_history()->set_run("run-1");
  EXPECT_NE(HeadText(head).find("history"), std::string::npos);
  EXPECT_NE(HeadText(head).find("run run-1\n"), std::string::npos);
  EXPECT_EQ(ToJson(head)["history"]["run"], "run-1");
}

// ---- HTTP addresses ----

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

// ---- Metrics text ----

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(MetricsTextTest, ReadsSamples) {
  const auto samples = ParseMetrics(
      "# HELP rows_total Rows.\n"
      "# TYPE rows_total counter\n"
      "rows_total{head=\"a\",note=\"quote \\\" brace } comma , slash \\\\ line \\n\"} 12.5 1700000000\n"
      "plain 3\n"
      "empty{} 4\n"
      "big +Inf\n"
      "\n"
      "broken{head=\"a\n"
      "nothing\n"
      "word abc\n");
  ASSERT_EQ(samples.size(), 4u);
  EXPECT_EQ(samples[0].name, "rows_total");
  EXPECT_EQ(samples[0].labels.at("head"), "a");
  EXPECT_EQ(samples[0].labels.at("note"), "quote \" brace } comma , slash \\ line \n");
  EXPECT_EQ(samples[0].value, 12.5);
  EXPECT_EQ(samples[1].value, 3);
  EXPECT_EQ(samples[2].labels.size(), 0u);
  EXPECT_EQ(samples[3].value, kInfinity);
}

TEST(MetricsTextTest, NothingCrashesIt) {
  for (const char* text : {"{", "a{", "a{b", "a{b=", "a{b=\"", "a{b=\"c\\", "a{b=\"c\"", "a{b=\"c\",",
                           "a{b=\"c\"}", "\"", " "}) {
    EXPECT_THAT(ParseMetrics(text), ::testing::IsEmpty()) << text;
  }
}

TEST(MetricsTextTest, BucketsOfSeveralLabelSetsAddUp) {
  const auto samples = ParseMetrics(
      "t_bucket{phase=\"a\",le=\"0.1\"} 1\n"
      "t_bucket{phase=\"a\",le=\"+Inf\"} 3\n"
      "t_bucket{phase=\"b\",le=\"0.1\"} 10\n"
      "t_bucket{phase=\"b\",le=\"+Inf\"} 10\n"
      "other_bucket{le=\"0.1\"} 100\n"
      "t_count 13\n");
  EXPECT_THAT(BucketsOf(samples, "t"),
              ::testing::ElementsAre(::testing::Pair(0.1, 11), ::testing::Pair(kInfinity, 13)));
}

TEST(MetricsTextTest, Quantiles) {
  const Buckets buckets = {{1, 0}, {2, 50}, {4, 100}, {kInfinity, 100}};
  EXPECT_DOUBLE_EQ(*Quantile(buckets, 0.5), 2);
  EXPECT_DOUBLE_EQ(*Quantile(buckets, 0.25), 1.5);
  EXPECT_DOUBLE_EQ(*Quantile(buckets, 0.75), 3);
  EXPECT_DOUBLE_EQ(*Quantile(buckets, 1), 4);
  EXPECT_DOUBLE_EQ(*Quantile({{1, 5}, {kInfinity, 10}}, 0.9), 1) << "beyond the last bound";
  EXPECT_FALSE(Quantile({}, 0.5).has_value());
  EXPECT_FALSE(Quantile({{1, 0}, {kInfinity, 0}}, 0.5).has_value());
  const Buckets later = {{1, 0}, {2, 50}, {4, 300}, {kInfinity, 300}};
  EXPECT_DOUBLE_EQ(*Quantile(Difference(later, buckets), 0.5), 3);
}

// ---- Share balance ----

TEST(ShareBalanceTest, EqualDevicesGetTheSame) {
  EXPECT_THAT(BalancedShares({{100, 1.0, 0}, {100, 1.0, 0}}), ElementsAre(500, 500));
  // However the classes lie now.
  EXPECT_THAT(BalancedShares({{300, 3.0, 0}, {100, 1.0, 0}, {0, 0, 0}}), ElementsAre(333, 333, 333));
}

TEST(ShareBalanceTest, ASlowerDeviceGetsLess) {
  EXPECT_THAT(BalancedShares({{100, 1.0, 0}, {100, 3.0, 0}}), ElementsAre(750, 250));
}

// As lossd.torch.balance() fills stages.
TEST(ShareBalanceTest, TheHeadFillsWhatStagesLeave) {
  EXPECT_THAT(BalancedShares({{100, 2.0, 10}, {100, 2.0, 1}, {0, 0, 1}}), ElementsAre(0, 500, 500));
  EXPECT_THAT(BalancedShares({{100, 2.0, 3}, {100, 2.0, 1}}), ElementsAre(250, 750));
}

TEST(ShareBalanceTest, AHeadThatIsTinyBesideTheStagesIsSharedToo) {
  EXPECT_THAT(BalancedShares({{100, 2e-16, 10}, {100, 2e-16, 3}, {100, 2e-16, 3}}), ElementsAre(0, 500, 500));
}

TEST(ShareBalanceTest, DevicesThatHaveClassesEndTogether) {
  const std::vector<DeviceLoad> loads = {{1000, 2.0, 5.0}, {3000, 9.0, 4.0}, {500, 0.5, 6.0}, {0, 0, 20.0}};
  const std::vector<uint32_t> shares = BalancedShares(loads);
  const uint32_t whole = std::accumulate(shares.begin(), shares.end(), 0u);
  EXPECT_NEAR(whole, 1000, 2);
  EXPECT_EQ(shares[3], 0);
  const double first = SecondsWith(loads[0], loads, shares[0], whole);
  for (size_t i = 1; i < 3; ++i)
    EXPECT_NEAR(SecondsWith(loads[i], loads, shares[i], whole), first, 0.02 * first);
  EXPECT_LT(first, 20.0);
}

// ---- Tensors in files ----

template <typename T>
TensorData Make(formats::DType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  return {dtype, std::move(shape), std::vector<uint8_t>(bytes, bytes + values.size() * sizeof(T))};
}

class TensorIoTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) { return folder_.File(name); }

  test::TempFolder folder_;
};

TEST_F(TensorIoTest, ThereAndBack) {
  const TensorData tensor = Make<float>(formats::DType::kFloat32, {2, 3}, {1, 2, 3, 4, 5, 6});
  for (const std::string name : {"a.npy", "a.safetensors"}) {
    ASSERT_TRUE(SaveTensors(Path(name), {{"x", tensor}}).ok());
    const auto loaded = LoadTensor(Path(name));
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->shape, tensor.shape);
    EXPECT_EQ(loaded->bytes, tensor.bytes);
    EXPECT_EQ(SaveTensors(Path(name), {{"x", tensor}}).code(), absl::StatusCode::kAlreadyExists);
  }
  EXPECT_EQ(LoadTensor(Path("a.safetensors:x"))->bytes, tensor.bytes);
  EXPECT_EQ(LoadTensor(Path("a.safetensors:y")).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TensorIoTest, OneOfSeveralTensorsMustBeNamed) {
  const TensorData tensor = Make<float>(formats::DType::kFloat32, {1}, {1});
  ASSERT_TRUE(SaveTensors(Path("a.safetensors"), {{"x", tensor}, {"y", tensor}}).ok());
  EXPECT_THAT(std::string(LoadTensor(Path("a.safetensors")).status().message()),
              HasSubstr("(x, y); name one"));
  EXPECT_TRUE(LoadTensor(Path("a.safetensors:y")).ok());
  EXPECT_EQ(SaveTensors(Path("a.npy"), {{"x", tensor}, {"y", tensor}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LoadTensor("a.txt").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckOutputPath("a.txt", 1).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TensorIoTest, Bf16BecomesFp32InNpy) {
  const TensorData tensor = Make<uint16_t>(formats::DType::kBFloat16, {2}, {0x3f80, 0xc000});  // 1, -2
  ASSERT_TRUE(SaveTensors(Path("a.npy"), {{"x", tensor}}).ok());
  const auto loaded = LoadTensor(Path("a.npy"));
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->dtype, formats::DType::kFloat32);
  EXPECT_EQ(loaded->bytes, Make<float>(formats::DType::kFloat32, {2}, {1, -2}).bytes);
}

TEST_F(TensorIoTest, IntegersNarrowWithChecks) {
  EXPECT_THAT(*ToInt32(Make<int64_t>(formats::DType::kInt64, {3}, {-100, 0, 2147483647})),
              ::testing::ElementsAre(-100, 0, 2147483647));
  EXPECT_THAT(*ToInt32(Make<uint16_t>(formats::DType::kUInt16, {1}, {65535})), ::testing::ElementsAre(65535));
  EXPECT_THAT(
      std::string(ToInt32(Make<int64_t>(formats::DType::kInt64, {2}, {0, 2147483648})).status().message()),
      HasSubstr("element 1 is 2147483648"));
  EXPECT_EQ(ToInt32(Make<float>(formats::DType::kFloat32, {1}, {1})).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ConvertTo(v1::DTYPE_FP32, Make<int64_t>(formats::DType::kInt64, {1}, {1})).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RandomRowsTest, SameSeedSameRows) {
  const auto a = RandomRows(100, 33, 7, v1::DTYPE_FP32, 5), b = RandomRows(100, 33, 7, v1::DTYPE_FP32, 5);
  EXPECT_EQ(a->hidden, b->hidden);
  EXPECT_EQ(a->targets, b->targets);
  EXPECT_NE(a->hidden, RandomRows(100, 33, 7, v1::DTYPE_FP32, 6)->hidden);
  std::vector<float> values(100 * 33);
  std::memcpy(values.data(), a->hidden.data(), a->hidden.size());
  double sum = 0, squares = 0;
  for (double value : values) {
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / 3300, 0, 0.1);
  EXPECT_NEAR(squares / 3300, 1, 0.1);
  EXPECT_THAT(a->targets, ::testing::Each(::testing::AllOf(::testing::Ge(0), ::testing::Lt(7))));
}

// ---- Reports ----
// What lossctl prints: descriptions, benchmark reports, errors.

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
}  // namespace lossd::cli::format_test
