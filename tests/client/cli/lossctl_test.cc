// SPDX-License-Identifier: Apache-2.0
// Runs the lossctl binary against the fake server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cli/tensor_io.h"
#include "tests/client/cli/lossctl_fixture.h"

namespace lossd::cli::lossctl_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST_F(LossctlTest, HelpIsNoError) {
  const Outcome outcome = Run("--help");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.out, HasSubstr("Exit codes:"));
  for (const char* command :
       {"health", "server",    "heads", "describe", "create",      "delete", "loss",  "grad-norm",
        "step",   "zero-grad", "save",  "load",     "checkpoints", "read",   "write", "add-grad",
        "bench",  "plan",      "watch", "metrics",  "events",      "trace",  "top",   "reset"}) {
    EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("  ", command, " ")));
    const Outcome help = Run(absl::StrCat(command, " --help"));
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_THAT(help.out, HasSubstr(absl::StrCat("Usage: lossctl ", command)));
  }
}

TEST_F(LossctlTest, VersionIsNoError) {
  const Outcome outcome = Run("--version");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.out, ::testing::StartsWith("lossctl "));
}

TEST_F(LossctlTest, WrongCommandLinesExitWith2) {
  for (const char* arguments :
       {"", "nonsense", "describe", "heads --bogus", "create x --hidden 3", "loss head",
        "loss head --random 5 --hidden a.npy --targets b.npy", "create x --hidden 3 --vocab 4 --norm x",
        "create x --hidden 3 --vocab 4 --seed 1 --zeros", "create x --hidden 3 --vocab 4 --from f",
        "step head --lr 1 --sgd --beta1 0.5", "read head weight --rows 1", "--timeout -1 heads",
        "bench head --slice-bytes 3X"}) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_NE(outcome.err, "") << arguments;
  }
}

TEST_F(LossctlTest, NoServerExitsWith3AndSaysWhatToDo) {
  const absl::Time start = absl::Now();
  const Outcome outcome = RunAt("127.0.0.1:1", "heads");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_EQ(outcome.err,
            "lossctl: no server at 127.0.0.1:1: the connection was refused, because nothing listens there; "
            "start one "
            "with `lossd`, or name another with --server HOST:PORT or "
            "LOSSD_SERVER\n");
  EXPECT_LT(absl::Now() - start, absl::Seconds(4)) << "a refused connection is not waited for";
  EXPECT_EQ(Run("--server 127.0.0.1:1 heads").exit_code, 3) << "the option goes before the environment";
  const auto error = nlohmann::json::parse(RunAt("127.0.0.1:1", "--json heads").err);
  EXPECT_EQ(error["error"]["code"], "UNAVAILABLE");
  EXPECT_EQ(Run("metrics --http 127.0.0.1:1").exit_code, 3);
}

TEST_F(LossctlTest, AnAddressThatCannotBeMeantExitsWith4) {
  const Outcome outcome = RunAt(absl::StrCat("http://", server_.target()), "heads");
  EXPECT_EQ(outcome.exit_code, 4);
  EXPECT_EQ(outcome.err, absl::StrCat("lossctl: the server's address is 'http://", server_.target(),
                                      "'; write the address without 'http://': '", server_.target(),
                                      "'; --server or LOSSD_SERVER names it\n"));
  const Outcome host = RunAt("no-such-host.invalid:7070", "heads");
  EXPECT_EQ(host.exit_code, 3);
  EXPECT_THAT(host.err, HasSubstr("the name of the host was not found"));
  EXPECT_THAT(host.err, HasSubstr("spelled right? start one with"));
}

TEST_F(LossctlTest, RefusalsExitWith4) {
  EXPECT_EQ(Run("describe none").exit_code, 4);
  EXPECT_THAT(Run("describe none").err, HasSubstr("`lossctl heads` lists the heads"));
  EXPECT_EQ(Run("create head --hidden 3 --vocab 4").exit_code, 4);
  EXPECT_EQ(Run("step head --lr 1 --expect-rows 5").exit_code, 4);
  EXPECT_EQ(Run("read head weight --rows 5:11").exit_code, 4);
  EXPECT_EQ(Run("read head norm-gain").exit_code, 4);
  EXPECT_EQ(Run("write head weight missing.npy").exit_code, 4);
  EXPECT_EQ(Run("loss head --random 5 --grad-out x.txt").exit_code, 4);
}

TEST_F(LossctlTest, HealthAndServer) {
  const Outcome health = Run("health");
  EXPECT_EQ(health.exit_code, 0);
  EXPECT_EQ(health.out, absl::StrCat(server_.target(), ": serving\n"));
  EXPECT_EQ(Run("health no.Service").exit_code, 1);
  EXPECT_EQ(Json("health")["health"], "serving");
  EXPECT_THAT(Run("server").out, HasSubstr("up               1h 02m 05s\n"));
  EXPECT_EQ(Json("server")["uptime_seconds"], 3725.5);
}

TEST_F(LossctlTest, HeadsComeAndGo) {
  EXPECT_EQ(Run("heads").out,
            "NAME  HIDDEN x VOCAB  COMPUTE  STEP  STEP ROWS  TOTAL ROWS  STREAMS  QUEUE  MEMORY\n"
            "head  4 x 10 + bias   fp32        0          0           0        0      0   320 B\n");
  const auto created =
      Json("create other --hidden 5 --vocab 6 --norm layernorm --optimizer-state momentum --frozen");
  EXPECT_EQ(created["norm"], "layernorm");
  EXPECT_EQ(created["optimizer_state"], "momentum");
  EXPECT_EQ(created["frozen"], true);
  EXPECT_EQ(created["logits"], "stored");
  EXPECT_EQ(created["gradients"], "exact");
  const auto small = Json(
      "create small --hidden 5 --vocab 6 --logits recomputed --gradients auto --workspace-bytes 64MiB "
      "--split vocabulary");
  EXPECT_EQ(created["split"], "any");
  EXPECT_EQ(small["split"], "vocabulary");
  EXPECT_EQ(small["logits"], "recomputed");
  EXPECT_EQ(small["gradients"], "auto");
  EXPECT_EQ(small["workspace_bytes"], 64 << 20);
  const std::string described = Run("describe small").out;
  EXPECT_THAT(described, ContainsRegex("\nlogits +recomputed\n"));
  EXPECT_THAT(described, ContainsRegex("\ngradients +auto\n"));
  EXPECT_THAT(described, ContainsRegex("\nsplit +vocabulary\n"));
  EXPECT_THAT(described, HasSubstr("workspace limit  64.0 MiB"));
  EXPECT_THAT(Run("create bad --hidden 5 --vocab 6 --logits kept").err, HasSubstr("--logits"));
  EXPECT_THAT(Run("create bad --hidden 5 --vocab 6 --gradients rough").err, HasSubstr("--gradients"));
  Run("delete small --yes");
  EXPECT_EQ(Json("heads").size(), 2u);
  EXPECT_EQ(Json("describe other")["vocab_size"], 6);
  EXPECT_EQ(Run("delete other --yes").out, "deleted head \"other\"\n");
  EXPECT_EQ(Json("heads").size(), 1u);
}

TEST_F(LossctlTest, LossOfFiles) {
  const std::vector<float> x = {1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 3, 0};  // sums 1, 2, 3
  const std::vector<int64_t> y = {4, -100, 8};
  const auto bytes = [](const auto& values) {
    const auto* data = reinterpret_cast<const uint8_t*>(values.data());
    return std::vector<uint8_t>(data, data + values.size() * sizeof(values[0]));
  };
  ASSERT_TRUE(
      SaveTensors(folder_.File("in.safetensors"), {{"x", {formats::DType::kFloat32, {3, 4}, bytes(x)}},
                                                   {"y", {formats::DType::kInt64, {3}, bytes(y)}}})
          .ok());
  const auto json = Json(
      "loss head --hidden in.safetensors:x --targets in.safetensors:y --grad-out dx.npy --rows-out "
      "rows.safetensors");
  EXPECT_EQ(json["valid_rows"], 2);
  EXPECT_DOUBLE_EQ(json["loss"], (1 + 1 + 3 + 2) / 2.0);
  const auto dx = LoadTensor(folder_.File("dx.npy"));
  ASSERT_TRUE(dx.ok()) << dx.status();
  EXPECT_EQ(dx->shape, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(dx->bytes, bytes(std::vector<float>{2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0}));
  EXPECT_EQ(LoadTensor(folder_.File("rows.safetensors:row_loss"))->bytes, bytes(std::vector<float>{2, 0, 5}));
  EXPECT_EQ(LoadTensor(folder_.File("rows.safetensors:row_argmax"))->bytes,
            bytes(std::vector<int32_t>{4, -1, 8}));

  EXPECT_EQ(Run("loss head --hidden in.safetensors:x --targets in.safetensors:y --grad-out dx.npy").exit_code,
            4)
      << "files are not overwritten";
  EXPECT_EQ(Run("loss head --hidden in.safetensors:x --targets in.safetensors:y --rows-out rows.csv "
                "--reduction sum")
                .exit_code,
            0);
  EXPECT_EQ(Read(folder_.File("rows.csv")),
            "row,target,loss,lse,entropy,logprob,argmax\n"
            "0,4,2,3,0.5,-2,4\n"
            "1,-100,0,0,0,0,-1\n"
            "2,8,5,6,1,-5,8\n");
  EXPECT_THAT(Run("loss head --hidden in.safetensors --targets in.safetensors:y").err,
              HasSubstr("(x, y); name one"));
  EXPECT_THAT(Run("loss head --hidden in.safetensors:y --targets in.safetensors:y").err,
              HasSubstr("not floating point"));
}

TEST_F(LossctlTest, ATrainingStep) {
  const auto loss = Json("loss head --random 100 --seed 3 --accumulate --dtype fp32 --microbatch-id 7");
  EXPECT_EQ(loss["accumulated_rows"], 100);
  EXPECT_EQ(
      Json("loss head --random 100 --seed 3 --accumulate --dtype fp32 --microbatch-id 7")["repeated_rows"],
      100);
  EXPECT_GT(Json("grad-norm head")["grad_norm"], 0);
  EXPECT_THAT(Run("step head --lr 1e-3 --expect-rows 100 --expect-microbatches 7").out,
              StartsWith("applied step 0: gradient norm "));
  EXPECT_EQ(Json("step head --lr 0.1 --sgd --momentum 0.9 --nesterov")["step"], 2);
  EXPECT_EQ(Run("zero-grad head").out, "discarded the gradients of step 2\n");
  EXPECT_EQ(Run("save head --name best").out, "saved head/best (step 2, 160 B) in 250 ms\n");
  EXPECT_EQ(Run("save head --keep 1").out,
            "saved head/step-0000000000 (step 2, 160 B) in 250 ms\nremoved head/old\n");
  EXPECT_EQ(Json("save head --cancel-with-call")["pruned"].size(), 0u);
  EXPECT_EQ(Run("load head/best").out, "loaded head/best into head \"head\", step 2\n");
}

TEST_F(LossctlTest, ListsCheckpoints) {
  EXPECT_EQ(Run("checkpoints").out,
            "CHECKPOINT            STEP      SIZE  SAVED                                   NAMED BY\n"
            "head/step-0000000007     7  3.00 MiB  2023-11-14 22:13:20Z                    server\n"
            "head/damaged                          the manifest's checksum does not match\n"
            "and 2 more\n");
  const auto list = Json("checkpoints head");
  EXPECT_EQ(list["left_out"], 2);
  EXPECT_EQ(list["checkpoints"][0]["step"], 7);
  EXPECT_EQ(list["checkpoints"][1]["error"], "the manifest's checksum does not match");
}

TEST_F(LossctlTest, TensorsGoThereAndBack) {
  std::vector<float> rows = {1, 2, 3, 4, 5, 6, 7, -8};
  const auto* data = reinterpret_cast<const uint8_t*>(rows.data());
  ASSERT_TRUE(
      SaveTensors(folder_.File("w.npy"), {{"w", {formats::DType::kFloat32, {2, 4}, {data, data + 32}}}})
          .ok());
  EXPECT_EQ(Run("write head weight w.npy --rows 3:5").out, "wrote rows [3, 5) of head weight value\n");
  EXPECT_EQ(Run("write head weight w.npy").exit_code, 4) << "another shape";
  const auto json = Json("read head weight --rows 3:5 --out back.npy");
  EXPECT_EQ(json["min"], -8);
  EXPECT_EQ(json["max"], 7);
  EXPECT_EQ(json["shape"], (std::vector<int>{2, 4}));
  EXPECT_EQ(LoadTensor(folder_.File("back.npy"))->bytes, LoadTensor(folder_.File("w.npy"))->bytes);
  EXPECT_THAT(Run("read head bias").out, HasSubstr("shape     10\n"));
}

TEST_F(LossctlTest, Bench) {
  const auto json = Json("bench head --microbatches 20 --in-flight 3 --rows 100 --warmup 1");
  EXPECT_EQ(json["microbatches"], 20);
  EXPECT_EQ(json["rows"], 2000);
  EXPECT_GT(json["rows_per_second"], 0);
  EXPECT_EQ(Json("describe head")["step_rows"], 0) << "gradients of the benchmark are discarded";
  ASSERT_EQ(Run("loss head --random 10 --accumulate").exit_code, 0);
  EXPECT_EQ(Run("bench head --microbatches 1").exit_code, 4) << "gradients of others are not";
  EXPECT_EQ(Run("bench head --microbatches 1 --what dx").exit_code, 0);
  EXPECT_EQ(Json("describe head")["step_rows"], 10);
  EXPECT_EQ(Run("bench none --microbatches 1").exit_code, 4);
}

TEST_F(LossctlTest, WatchPrintsLinesWithoutATerminal) {
  const Outcome outcome = Run("watch --count 3 --interval 0.05");
  EXPECT_EQ(outcome.exit_code, 0);
  const std::vector<std::string> lines = absl::StrSplit(outcome.out, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_THAT(lines, ::testing::Each(HasSubstr(" rows/s  1 head  0 streams  0 queued")));
  const Outcome json = Run("--json watch --count 2 --interval 0.05");
  for (const absl::string_view line : absl::StrSplit(json.out, '\n', absl::SkipEmpty())) {
    EXPECT_EQ(nlohmann::json::parse(line)["heads"].size(), 1u);
  }
}

TEST_F(LossctlTest, WatchRestoresTheTerminal) {
  // script(1) gives the command a terminal of its own, and says nothing of its kind.
  if (std::system("script -qec true /dev/null >/dev/null 2>&1 </dev/null") != 0) {
    GTEST_SKIP() << "no script(1), or no pseudo-terminal";
  }
  const std::string command =
      absl::StrCat("TERM=xterm timeout --foreground -s INT 2 " LOSSCTL_PATH " --server ", server_.target(),
                   " watch --interval 0.1");
  ASSERT_NE(std::system(absl::StrCat("script -qec '", command, "' ", folder_.File("typescript"),
                                     " >/dev/null </dev/null")
                            .c_str()),
            -1);
  const std::string screen = Read(folder_.File("typescript"));
  EXPECT_THAT(screen, HasSubstr("\033[?1049h\033[?25l"));
  EXPECT_THAT(screen, HasSubstr("lossd at " + server_.target()));
  EXPECT_THAT(screen, HasSubstr("\033[?25h\033[?1049l"));
}

TEST_F(LossctlTest, Metrics) {
  httplib::Server http;
  http.Get("/metrics", [](const httplib::Request&, httplib::Response& response) {
    response.set_content("# TYPE lossd_rows_total counter\nlossd_rows_total{head=\"a\"} 5\nother 1\n",
                         "text/plain");
  });
  const int port = http.bind_to_any_port("127.0.0.1");
  std::thread thread([&http] { http.listen_after_bind(); });
  const std::string address = absl::StrCat("--http 127.0.0.1:", port);
  EXPECT_EQ(Run("metrics " + address).out,
            "# TYPE lossd_rows_total counter\nlossd_rows_total{head=\"a\"} 5\nother 1\n");
  EXPECT_EQ(Run("metrics --filter '^oth' " + address).out, "other 1\n");
  const auto json = Json("metrics --filter rows " + address);
  ASSERT_EQ(json.size(), 1u);
  EXPECT_EQ(json[0]["labels"]["head"], "a");
  EXPECT_EQ(json[0]["value"], 5);
  EXPECT_EQ(Run("metrics --filter '(' " + address).exit_code, 4);
  http.stop();
  thread.join();
}

TEST_F(LossctlTest, AddsAFileToTheGradientOnce) {
  TensorData ones{formats::DType::kFloat32, {10, 4}, std::vector<uint8_t>(10 * 4 * 4)};
  for (size_t i = 0; i < 40; ++i) {
    const float value = 1.0f;
    std::memcpy(&ones.bytes[4 * i], &value, 4);
  }
  ASSERT_TRUE(SaveTensors(folder_.File("ones.npy"), {{"ones", ones}}).ok());
  EXPECT_THAT(Run("add-grad head weight ones.npy --id 3 --scale 0.5").out,
              HasSubstr("added 10 rows to the gradient of head weight in step 0, 0 were there before"));
  const nlohmann::json again = Json("add-grad head weight ones.npy --id 3 --scale 0.5");
  EXPECT_EQ(again["added_rows"], 0);
  EXPECT_EQ(again["repeated_rows"], 10);
  EXPECT_EQ(server_.accumulated("head"), 5.0);
  EXPECT_EQ(Json("describe head")["step_contributions"], 1);
  EXPECT_EQ(Run("add-grad head weight ones.npy --rows 0:5 --id 4").exit_code, 4) << "a file of other rows";
  EXPECT_THAT(Run("step head --lr 1 --expect-rows 0").out,
              HasSubstr("0 rows of 0 microbatches, 1 contributions"));
}

TEST_F(LossctlTest, NonFiniteStepsAreSkippedOnRequest) {
  TensorData huge{formats::DType::kFloat32, {10, 4}, std::vector<uint8_t>(10 * 4 * 4, 0)};
  const float infinite = HUGE_VALF;
  std::memcpy(huge.bytes.data(), &infinite, 4);
  ASSERT_TRUE(SaveTensors(folder_.File("huge.npy"), {{"huge", huge}}).ok());
  ASSERT_EQ(Run("add-grad head weight huge.npy --id 1").exit_code, 0);
  EXPECT_EQ(Run("step head --lr 1").exit_code, 4);
  EXPECT_THAT(Run("step head --lr 1 --skip-non-finite").out, StartsWith("skipped step 0: gradient norm inf"));
  EXPECT_THAT(Run("step head --lr 1 --step 0 --skip-non-finite").out,
              StartsWith("had already skipped step 0"));
  EXPECT_EQ(Json("describe head")["updates"], 0);
}

TEST_F(LossctlTest, ARestartHasAnExitCodeOfItsOwn) {
  const std::string incarnation = Json("server")["incarnation"];
  const std::string known = absl::StrCat("--incarnation ", incarnation, " ");
  EXPECT_EQ(Run(known + "loss head --random 20 --accumulate").exit_code, 0);
  server_.Restart();
  const Outcome outcome = Run(known + "step head --lr 1");
  EXPECT_EQ(outcome.exit_code, 5) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(absl::StrCat("server restarted (incarnation ", incarnation, " -> ")));
  const Outcome json = Run(known + "--json step head --lr 1");
  EXPECT_EQ(nlohmann::json::parse(json.err)["error"]["restarted"]["incarnation_before"], incarnation);
  EXPECT_EQ(Run("describe head").exit_code, 0) << "no flag asked for it";
  EXPECT_EQ(Run("--incarnation xyz describe head").exit_code, 2);
}

TEST_F(LossctlTest, ARestartWithinACommandIsReportedToo) {
  server_.SetFaults({.fail_slice = [](uint64_t n) { return n == 2 ? 14 : 0; }, .restart_on_failure = true});
  const Outcome outcome = Run("loss head --random 200 --accumulate --slice-bytes 256");
  EXPECT_EQ(outcome.exit_code, 5) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("gradients of step 0 are lost"));
}

TEST_F(LossctlTest, BrokenCallsAreSentAgain) {
  server_.SetFaults({.fail_slice = [](uint64_t n) { return n <= 4 ? 14 : 0; }});
  EXPECT_EQ(Run("--attempts 1 loss head --random 20 --accumulate").exit_code, 3);
  const nlohmann::json result = Json("--attempts 10 loss head --random 20 --accumulate --microbatch-id 2");
  EXPECT_EQ(result["accumulated_rows"], 20);
  EXPECT_EQ(result["repeats"], 3);
}

}  // namespace
}  // namespace lossd::cli::lossctl_test
