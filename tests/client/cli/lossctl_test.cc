// SPDX-License-Identifier: Apache-2.0
// Tests of the lossctl binary against the fake server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <pty.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cli/tensors.h"
#include "tests/client/fake_server.h"
#include "tests/support/temp_folder.h"

namespace lossd::cli::lossctl_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Outcome {
  int exit_code = -1;
  std::string out, err;
};

class LossctlTest : public testing::Test {
 protected:
  void SetUp() override { server_.AddHead("head", 4, 10); }

  // Runs `lossctl ARGUMENTS` in a shell, with the fake server as the default one.
  Outcome Run(const std::string& arguments) { return RunAt(server_.target(), arguments); }
  Outcome RunAt(const std::string& server, const std::string& arguments) {
    const std::string out = folder_.File("out"), err = folder_.File("err");
    const std::string command = absl::StrCat("cd ", folder_.path(), " && LOSSD_SERVER=", server,
                                             " " LOSSCTL_PATH " ", arguments, " >", out, " 2>", err);
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, Read(out), Read(err)};
  }
  nlohmann::json Json(const std::string& arguments) {
    const Outcome outcome = Run("--json " + arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    nlohmann::json json = nlohmann::json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(json.is_discarded()) << outcome.out;
    return json;
  }
  static std::string Read(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  test::TempFolder folder_;
  fake::FakeServer server_;
};

// ---- Commands ----
// Runs each command.

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
                                      "' (from LOSSD_SERVER); write the address without 'http://': '",
                                      server_.target(), "'; --server or LOSSD_SERVER names it\n"));
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
  EXPECT_EQ(Json("heads")["heads"].size(), 2u);
  EXPECT_EQ(Json("describe other")["vocab_size"], 6);
  EXPECT_EQ(Run("delete other --yes").out, "deleted head \"other\"\n");
  EXPECT_EQ(Json("heads")["heads"].size(), 1u);
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
  EXPECT_EQ(Run("loss head --hidden in.safetensors:x --targets in.safetensors:y --rows-out classes.csv "
                "--classes 6,0 --top-k 2")
                .exit_code,
            0);
  EXPECT_EQ(Read(folder_.File("classes.csv")),
            "row,target,loss,lse,entropy,logprob,argmax,logprob_6,logprob_0,top_class_1,top_logprob_1,"
            "top_class_2,top_logprob_2\n"
            "0,4,2,3,0.5,-2,4,-3,-0,4,-0,5,-1\n"
            "1,-100,0,0,0,0,-1,0,0,-1,0,-1,0\n"
            "2,8,5,6,1,-5,8,-3,-0,8,-0,9,-1\n");
  EXPECT_EQ(Run("loss head --hidden in.safetensors:x --targets in.safetensors:y --rows-out top.safetensors "
                "--top-k 1")
                .exit_code,
            0);
  const auto top = LoadTensor(folder_.File("top.safetensors:top_classes"));
  ASSERT_TRUE(top.ok()) << top.status();
  EXPECT_EQ(top->shape, (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(top->bytes, bytes(std::vector<int32_t>{4, -1, 8}));
  EXPECT_NE(Run("loss head --random 3 --top-k 2").exit_code, 0) << "goes with --rows-out";
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

TEST_F(LossctlTest, AStepAsksForLazyRows) {
  std::vector<bool> asked;
  server_.SetFaults({.on_apply = [&](const v1::ApplyStepRequest& request) {
    asked.push_back(request.optimizer().lazy_rows());
    return fake::Fault();
  }});
  EXPECT_EQ(Run("step head --lr 1e-3 --lazy-rows").exit_code, 0);
  EXPECT_EQ(Run("step head --lr 1e-3 --sgd --lazy-rows").exit_code, 0);
  EXPECT_EQ(Run("step head --lr 1e-3").exit_code, 0);
  EXPECT_EQ(asked, (std::vector<bool>{true, true, false}));
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
  EXPECT_EQ(Run("bench head --microbatches 3 --what row-gradients").exit_code, 0);
  EXPECT_EQ(Json("describe head")["step_rows"], 0) << "gradients of the benchmark are discarded";
  ASSERT_EQ(Run("loss head --random 10 --accumulate").exit_code, 0);
  EXPECT_EQ(Run("bench head --microbatches 1").exit_code, 4) << "gradients of others are not";
  EXPECT_EQ(Run("bench head --microbatches 1 --what dx").exit_code, 0);
  EXPECT_EQ(Run("bench head --microbatches 1 --what row-gradients").exit_code, 4) << "they would be mixed";
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
  const auto json = Json("metrics --filter rows " + address)["samples"];
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

// ---- Output ----
// How lossctl prints: documents, wide tables, colours.

constexpr char kEscape = '\033';

using LossctlOutputTest = LossctlTest;

// Every command that prints, with arguments that work on a new head, in an order that works.
const char* const kCommands[] = {"health",
                                 "server",
                                 "heads",
                                 "describe head",
                                 "create other --hidden 4 --vocab 10",
                                 "loss head --random 5 --accumulate",
                                 "grad-norm head",
                                 "step head --lr 0.1",
                                 "zero-grad head",
                                 "read head weight",
                                 "save head",
                                 "checkpoints",
                                 "checkpoints rm head/old --yes",
                                 "reset head --scope optimizer --yes",
                                 "bench head --microbatches 1 --rows 4",
                                 "watch --count 1",
                                 "top --count 1 --interval 0.05",
                                 "context list",
                                 "context show",
                                 "delete other --yes"};

TEST_F(LossctlOutputTest, EveryCommandPrintsADocument) {
  for (const char* command : kCommands) {
    SCOPED_TRACE(command);
    const Outcome outcome = Run(absl::StrCat("-o json ", command));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    const auto document = nlohmann::json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(document.is_object()) << outcome.out;
  }
}

TEST_F(LossctlOutputTest, JsonIsTheSameByEitherOption) {
  for (const char* command : {"heads", "server", "describe head"}) {
    const Outcome json = Run(absl::StrCat("--json ", command));
    EXPECT_EQ(json.out, Run(absl::StrCat(command, " -o json")).out);
    EXPECT_EQ(json.out, Run(absl::StrCat(command, " --output=json")).out);
    EXPECT_FALSE(nlohmann::json::parse(json.out, nullptr, false).is_discarded());
  }
  EXPECT_EQ(Run("--json -o table heads").exit_code, 2);
  EXPECT_EQ(Run("-o xml heads").exit_code, 2);
}

TEST_F(LossctlOutputTest, WideTablesHaveMoreColumns) {
  const std::string usual = Run("heads").out, wide = Run("-o wide heads").out;
  EXPECT_EQ(Run("-o table heads").out, usual);
  EXPECT_THAT(usual, Not(HasSubstr("OPTIMIZER")));
  EXPECT_THAT(
      wide,
      HasSubstr("MEMORY  OPTIMIZER  LOGITS  GRADIENTS  UPDATES  RETAINED  CHUNK ROWS  VALUES  INCARNATION"));
  EXPECT_THAT(Run("-o wide server").out, HasSubstr("\nHTTP "));
  EXPECT_THAT(Run("-o wide describe head").out, HasSubstr("\nweights version "));
}

TEST_F(LossctlOutputTest, ColoursAreForTerminalsAndForThoseWhoAsk) {
  EXPECT_THAT(Run("server").out, Not(HasSubstr(std::string(1, kEscape))));
  EXPECT_THAT(Run("--color=always server").out, HasSubstr("\033[32mserving\033[0m"));
  EXPECT_THAT(Run("--color=always describe none").err, StartsWith("\033[1;31mlossctl:\033[0m "));
  EXPECT_THAT(Run("describe none").err, StartsWith("lossctl: "));
  EXPECT_THAT(Run("--color=always --json heads").out, Not(HasSubstr(std::string(1, kEscape))));
  EXPECT_EQ(Run("--color=sometimes heads").exit_code, 2);
}

TEST_F(LossctlOutputTest, ATerminalHasColoursUnlessTheEnvironmentSaysNo) {
  if (std::system("script -qec true /dev/null >/dev/null 2>&1 </dev/null") != 0) {
    GTEST_SKIP() << "no script(1), or no pseudo-terminal";
  }
  const auto on_terminal = [this](const std::string& environment, const std::string& options) {
    const std::string command = absl::StrCat("env -u NO_COLOR ", environment, " " LOSSCTL_PATH " --server ",
                                             server_.target(), " ", options, " server");
    EXPECT_EQ(std::system(absl::StrCat("script -qec '", command, "' ", folder_.File("typescript"),
                                       " >/dev/null </dev/null")
                              .c_str()),
              0);
    return Read(folder_.File("typescript"));
  };
  const std::string escape = "\033[32mserving";
  EXPECT_THAT(on_terminal("TERM=xterm", ""), HasSubstr(escape));
  EXPECT_THAT(on_terminal("TERM=xterm NO_COLOR=1", ""), Not(HasSubstr(escape)));
  EXPECT_THAT(on_terminal("TERM=xterm NO_COLOR=", ""), HasSubstr(escape));
  EXPECT_THAT(on_terminal("TERM=dumb", ""), Not(HasSubstr(escape)));
  EXPECT_THAT(on_terminal("TERM=xterm", "--color=never"), Not(HasSubstr(escape)));
  EXPECT_THAT(on_terminal("TERM=dumb NO_COLOR=1", "--color=always"), HasSubstr(escape));
}

// ---- Wrong command lines ----
// What lossctl says of command lines that are wrong, of numbers that are too large, and of output that goes
// nowhere.

using LossctlUsageTest = LossctlTest;

// What is wrong, and with which value; then where to read on.
TEST_F(LossctlUsageTest, WrongCommandLinesAreSaidInWords) {
  const auto first_line = [this](const std::string& arguments) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_THAT(outcome.err, StartsWith("lossctl: ")) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr("\n`lossctl ")) << arguments;
    return outcome.err.substr(std::strlen("lossctl: "), outcome.err.find('\n') - std::strlen("lossctl: "));
  };
  EXPECT_EQ(first_line(""), "a command is missing, such as `lossctl heads`");
  EXPECT_EQ(first_line("context"), "context wants a command of its own");
  EXPECT_EQ(first_line("helth"), "there is no command \"helth\". Did you mean health?");
  EXPECT_EQ(first_line("context remvoe x"), "context has no command \"remvoe\". Did you mean remove?");
  EXPECT_EQ(first_line("create --hiden 8 x --vocab 8"),
            "create has no option --hiden. Did you mean --hidden?");
  EXPECT_EQ(first_line("--verbose heads"), "lossctl has no option --verbose");
  EXPECT_EQ(first_line("heads head"), "heads takes no further argument, got \"head\"");
  EXPECT_EQ(first_line("step head --lr"), "--lr wants a value: FLOAT");
  EXPECT_EQ(first_line("create x --hidden 8"), "--vocab is required");
  EXPECT_EQ(first_line("--context a --server b:1 heads"), "--server cannot be given together with --context");
  EXPECT_EQ(first_line("read head weigth"),
            "PARAM must be one of bias|class-weights|norm-gain|norm-shift|weight, got \"weigth\"");
  for (const char* number : {"-8", "8.5", "8k", "99999999999999999999", "nan", "\"\"", "\" 8\""}) {
    const std::string got = number[0] == '"' ? number : absl::StrCat("\"", number, "\"");
    EXPECT_EQ(first_line(absl::StrCat("create x --vocab 8 --hidden ", number)),
              absl::StrCat("--hidden must be a whole number from 0 to 2^64 - 1, got ", got));
    EXPECT_EQ(first_line(absl::StrCat("loss head --random ", number)),
              absl::StrCat("--random must be a whole number from 1 to 2^64 - 1, got ", got));
  }
  EXPECT_EQ(first_line("save head --keep 5000000000"), "--keep cannot be \"5000000000\"");
  for (const char* seconds : {"-1", "0", "abc", "1e400", "inf", "nan"}) {
    EXPECT_EQ(first_line(absl::StrCat("heads --timeout ", seconds)),
              absl::StrCat("--timeout must be a number above 0, got \"", seconds, "\""));
  }
  EXPECT_EQ(first_line("step head --lr fast"), "--lr must be a number, got \"fast\"");
  EXPECT_EQ(first_line("watch --count -1"), "--count must be a whole number from 0 to 2^64 - 1, got \"-1\"");
  EXPECT_EQ(first_line("watch --interval 0"), "--interval must be a number from 0.05 to 3600, got \"0\"");
  EXPECT_EQ(first_line("bench head --in-flight 0"),
            "--in-flight must be a whole number from 1 to 1024, got \"0\"");
  EXPECT_EQ(first_line("bench head --transport smoke"),
            "--transport must be one of auto|cuda_ipc|grpc|shared_memory, got \"smoke\"");
  EXPECT_EQ(first_line("bench head --slice-bytes 3X"),
            "--slice-bytes must be a number of bytes such as 4096, 64KiB or 2GiB, got \"3X\"");
  EXPECT_EQ(first_line("read head weight --rows -1:3"),
            "--rows must be BEGIN:END, such as 0:16 or 16:, got \"-1:3\"");
  EXPECT_THAT(first_line("--incarnation zz heads"), HasSubstr("hexadecimal digits"));
  EXPECT_EQ(first_line("load head"),
            "CHECKPOINT must be HEAD/NAME, as `lossctl checkpoints` prints it, got \"head\"");
  EXPECT_EQ(first_line("save head --name ''"), "--name must not be empty");
  for (const char* address :
       {"7", "host", "host:0", "host:99999", "ftp://host:1", "http://", "a b:1", "unix:/x"}) {
    EXPECT_THAT(first_line(absl::StrCat("metrics --http '", address, "'")),
                StartsWith("--http must be HOST:PORT, http://HOST:PORT or https://HOST:PORT, got"))
        << address;
  }
  EXPECT_THAT(Run("step head --lr fast").err, ::testing::EndsWith("\n`lossctl step --help` describes it.\n"));
}

TEST_F(LossctlUsageTest, WrongCommandLinesAreDocumentsForThoseWhoAsk) {
  for (const char* arguments :
       {"--json helth", "create x --json --hidden 8.5 --vocab 8", "-o json heads --bogus", "--json"}) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 2);
    const auto error = nlohmann::json::parse(outcome.err, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(error.is_object()) << arguments << ": " << outcome.err;
    EXPECT_EQ(error["error"]["code"], "INVALID_ARGUMENT");
    EXPECT_EQ(error["error"]["exit_code"], 2);
  }
}

TEST_F(LossctlUsageTest, RowsThatNoMachineHasMemoryForAreRefused) {
  for (const char* arguments :
       {"loss head --random 1000000000000000", "loss head --random 18446744073709551615",
        "bench head --rows 1000000000000000"}) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 4) << arguments << outcome.err;
    EXPECT_THAT(outcome.err,
                ContainsRegex("^lossctl: --r[a-z]+ must be at most [0-9,]+ with 4 values a row"));
  }
}

TEST_F(LossctlUsageTest, WhatCannotBePrintedIsAnError) {
  const auto with_stdout = [this](const std::string& redirection, const std::string& arguments) {
    const std::string err = folder_.File("err");
    const int status = std::system(absl::StrCat("LOSSD_SERVER=", server_.target(), " " LOSSCTL_PATH " ",
                                                arguments, " ", redirection, " 2>", err)
                                       .c_str());
    return Outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -1, "", Read(err)};
  };
  for (const char* command :
       {"heads", "--json heads", "completion bash", "watch --count 1 --interval 0.05"}) {
    const Outcome full = with_stdout(">/dev/full", command);
    EXPECT_EQ(full.exit_code, 1) << command;
    EXPECT_THAT(full.err, HasSubstr("cannot write to the standard output: No space left on device"));
    EXPECT_EQ(with_stdout(">&-", command).exit_code, 1) << command;
  }
  EXPECT_EQ(with_stdout(">/dev/null <&-", "heads").exit_code, 0);
}

// ---- Plans ----

TEST_F(LossctlTest, PlanNeedsNoServer) {
  const std::string no_server = "--server 127.0.0.1:1 ";
  EXPECT_EQ(Json(no_server + "plan --hidden 4096 --vocab 128256")["server"][0]["chunk_rows"], 8192);
  EXPECT_EQ(Run(no_server + "plan").exit_code, 4);
  EXPECT_THAT(Run(no_server + "plan --hidden 4096 --vocab 128256 --trainers 0").err, HasSubstr("trainers"));
}

TEST_F(LossctlTest, PlanOfACardThatWasNotMeasuredSaysSo) {
  const std::string asked = "plan --hidden 4096 --vocab 128256 ";
  EXPECT_THAT(
      Run(asked + "--card h100-sxm").out,
      HasSubstr("Server: 1 NVIDIA H100 SXM with 74.5 GiB; not measured: bounds by data sheets, from times "
                "on an NVIDIA H200 of real rows"));
  const auto json = Json(asked + "--card h100-sxm");
  EXPECT_EQ(json["measured_on"], "NVIDIA H200");
  EXPECT_EQ(json["times"][0]["microbatch"]["basis"], "bounds by data sheets");
  EXPECT_FALSE(Json(asked).contains("measured_on"));
  EXPECT_THAT(Run(asked + "--card a100").err, HasSubstr("card must be one of h100-nvl, h100-sxm, h200"));
}

TEST_F(LossctlTest, PlanOfATrainersMemory) {
  std::ofstream(folder_.File("config.json"))
      << R"({"model_type": "llama", "hidden_size": 4096, "vocab_size": 128256, "num_hidden_layers": 32,
             "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8})";
  const std::string asked = "plan config.json --trainer-gpus 16 --trainer-memory 75GiB ";
  const auto memory = Json(asked + "--bytes-per-parameter 8")["trainer_memory"];
  EXPECT_EQ(memory["parameters"], 8'030'261'248);
  EXPECT_EQ(memory["heads"][0]["logit_bytes"], int64_t{65'536} * 128'256 * 4);
  EXPECT_EQ(memory["heads"][0]["largest_batch"], 1'579'332);  // published: 1,579,333, rounded to the nearest
  EXPECT_EQ(memory["heads"][1]["largest_batch"], 4'670'135);
  EXPECT_FALSE(Json("plan config.json").contains("trainer_memory"));
  const std::string text = Run(asked + "--bytes-per-parameter 8 --trainer-rows 2000000").out;
  EXPECT_THAT(text,
              HasSubstr("Memory of a trainer with 16 GPUs of 75.0 GiB for a batch of 2,000,000 rows\n"));
  EXPECT_THAT(text, ContainsRegex("stored logits .*1,579,332 rows  the batch does not fit\n"));
  EXPECT_THAT(text, ContainsRegex("fused loss .*4,670,135 rows  2.96 times\n"));
  EXPECT_THAT(text, HasSubstr("8,030,261,248 parameters of 8 bytes; activations: 262,144 bytes a row"));
  // Other sizes than the file's have another number of parameters.
  EXPECT_THAT(Run(asked + "--vocab 32000").err, HasSubstr("parameters must be given"));
  EXPECT_EQ(Json(asked + "--vocab 32000 --parameters 7.24B")["trainer_memory"]["parameters"], 7'240'000'000);
}

TEST_F(LossctlTest, PlanOfATrainersMemoryKeepsAnEmbeddingThatIsTheClassifier) {
  std::ofstream(folder_.File("config.json"))
      << R"({"model_type": "gemma2", "hidden_size": 2304, "vocab_size": 256000, "num_hidden_layers": 26,
             "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256})";
  const auto memory = Json("plan config.json --trainer-gpus 1")["trainer_memory"];
  EXPECT_EQ(memory["heads"][2]["head"], "server");
  EXPECT_EQ(memory["heads"][2]["state_bytes"], 16 * 2'614'341'888);
  const std::string text = Run("plan config.json --trainer-gpus 1").out;
  EXPECT_THAT(text, HasSubstr("Memory of a trainer with 1 GPU of 131 GiB for a batch of 65,536 rows\n"));
  EXPECT_THAT(text, HasSubstr("The classifier is the embedding, whose state is counted"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("A GPU")));
}

TEST_F(LossctlTest, PlanOfATrainersMemoryNamesWhatIsWrong) {
  const auto refused = [&](const std::string& options, int exit_code, const std::string& says) {
    const Outcome outcome = Run("plan --hidden 4096 --vocab 128256 " + options);
    EXPECT_EQ(outcome.exit_code, exit_code) << options;
    EXPECT_EQ(outcome.out, "") << options;
    EXPECT_THAT(outcome.err, HasSubstr(says)) << options;
  };
  refused("--trainer-gpus 0", 2, "--trainer-gpus");
  refused("--trainer-memory 75GiB", 2, "--trainer-gpus");
  const std::string asked = "--trainer-gpus 16 ";
  refused(asked, 4, "parameters must be given");
  refused(asked + "--parameters many", 2, "--parameters");
  refused(asked + "--parameters 0", 2, "--parameters");
  refused(asked + "--parameters 1M", 4, "parameters must be at least the 525336576 of the head, got 1000000");
  refused(asked + "--parameters 8B", 4, "layers must be from 1 to 65536, got 0");
  const std::string complete = asked + "--parameters 8B --layers 32 ";
  refused(complete + "--trainer-memory 0", 4, "trainer_memory must be > 0, got 0");
  refused(complete + "--trainer-memory 8192GiB", 4, "trainer_memory");
  refused(complete + "--trainer-rows 0", 2, "--trainer-rows");
  refused(complete + "--bytes-per-parameter -8", 4,
          "bytes_per_parameter must be > 0 and at most 1024, got -8");
  refused(complete + "--activation-bytes -1", 2, "--activation-bytes");
  refused(complete + "--logit-bytes 0", 4, "logit_bytes must be from 1 to 64, got 0");
}

TEST_F(LossctlTest, PlanOfAPipelineHasSharesToPaste) {
  const std::string asked =
      "plan --hidden 2304 --vocab 256000 --layers 13 --stages 4 --rows 196608 --layer-seconds 0.007 ";
  const std::string text = Run(asked).out;
  EXPECT_THAT(text, ContainsRegex("local, compiled .* 1\\.00 .* GiB"));
  EXPECT_THAT(text, ContainsRegex("server, exact .*held up by the server\n"));
  EXPECT_THAT(text, ContainsRegex("colocated, exact .*--shares [0-9]+,[0-9]+,[0-9]+,[0-9]+\n"));
  EXPECT_THAT(text, ContainsRegex("colocated, sampled, no MPS .*--shares "));
  EXPECT_THAT(text, ContainsRegex("Steps are predicted by [0-9]+ measured ones.* % apart \\[[0-9, ]+\\]"));
  EXPECT_THAT(Run(asked + "--memory 20GiB").out, ContainsRegex("colocated, exact .*; does not fit\n"));
  const auto json = Json(asked + "--head-seconds 0.06 --embedding-seconds 0.002");
  const auto& colocated = json["pipelines"][5];
  EXPECT_EQ(colocated["kind"], "colocated");
  EXPECT_EQ(colocated["mps"], true);
  EXPECT_EQ(colocated["head_seconds"], 0.06);
  EXPECT_EQ(colocated["stage_bytes"].size(), 4u);
  EXPECT_LT(colocated["shares"][0], colocated["shares"][1]);
  EXPECT_THAT(Run(asked + "--layer-seconds 0.1,0.2").err, HasSubstr("layer_seconds must be one"));
  EXPECT_THAT(Run("plan --hidden 64 --vocab 1000 --head-seconds 1").err, HasSubstr("--stages"));
}

// ---- Commands that ask ----
// Commands that throw something away: they ask on a terminal, and want --yes in scripts.

class LossctlAskingTest : public LossctlTest {
 protected:
  // The same on a terminal, where somebody types `answer`. What stands on the terminal is `out`.
  Outcome RunOnTerminal(const std::string& arguments, const std::string& answer) {
    int terminal = -1;
    const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
    if (child == 0) {
      setenv("LOSSD_SERVER", server_.target().c_str(), 1);
      std::vector<std::string> words = absl::StrSplit(absl::StrCat(LOSSCTL_PATH " ", arguments), ' ');
      std::vector<char*> argv;
      for (std::string& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      execv(argv[0], argv.data());
      _exit(127);
    }
    Outcome outcome;
    bool answered = false;
    char buffer[4096];
    for (ssize_t count = 0; (count = read(terminal, buffer, sizeof(buffer))) > 0;) {
      outcome.out.append(buffer, static_cast<size_t>(count));
      if (!answered && outcome.out.find("[y/N] ") != std::string::npos) {
        answered = true;
        EXPECT_EQ(write(terminal, answer.data(), answer.size()), static_cast<ssize_t>(answer.size()));
      }
    }
    int status = 0;
    waitpid(child, &status, 0);
    close(terminal);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return outcome;
  }
  bool HeadIsThere() { return Run("describe head").exit_code == 0; }
};

TEST_F(LossctlAskingTest, ScriptsNeedYes) {
  std::ofstream(folder_.File("yes")) << "y\n";
  for (const char* arguments : {"delete head", "reset head --scope all", "reset head --scope=optimizer",
                                "checkpoints rm head/old", "checkpoints rm head/old head/older"}) {
    const Outcome outcome = Run(absl::StrCat(arguments, " </dev/null"));
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("--yes"), HasSubstr("stdin is no terminal"))) << arguments;
    EXPECT_EQ(Run(absl::StrCat("--json ", arguments, " </dev/null")).exit_code, 2);
    EXPECT_EQ(Run(absl::StrCat(arguments, " <yes")).exit_code, 2) << "what a file says is no answer";
  }
  EXPECT_TRUE(HeadIsThere());
  EXPECT_EQ(server_.deletions(), 0u);
  EXPECT_EQ(Run("checkpoints rm head/old --yes </dev/null").out, "removed head/old (3.00 MiB)\n");
  EXPECT_EQ(Run("delete head -y </dev/null").out, "deleted head \"head\"\n");
  EXPECT_FALSE(HeadIsThere());
  EXPECT_EQ(Run("delete head --yes </dev/null").exit_code, 4);
}

TEST_F(LossctlAskingTest, TerminalsAreAsked) {
  for (const char* answer : {"n\n", "\n", "yess\n", "\x04", "Y es\n"}) {
    const Outcome outcome = RunOnTerminal("delete head", answer);
    EXPECT_EQ(outcome.exit_code, 1) << answer;
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("head \"head\" is at step 0: no checkpoint known. Delete it? [y/N]"),
                      HasSubstr("not deleted")));
    EXPECT_TRUE(HeadIsThere()) << answer;
  }
  ASSERT_EQ(Run("step head --lr 0.1").exit_code, 0);
  ASSERT_EQ(Run("loss head --random 5 --accumulate").exit_code, 0);
  EXPECT_THAT(RunOnTerminal("delete head", "n\n").out,
              HasSubstr("at step 1: no checkpoint known, and 5 rows in the open"));
  const Outcome missing = RunOnTerminal("delete nothing", "y\n");
  EXPECT_EQ(missing.exit_code, 4);
  EXPECT_THAT(missing.out, Not(HasSubstr("[y/N]")));
  EXPECT_EQ(RunOnTerminal("delete head", " YES \n").exit_code, 0);
  EXPECT_FALSE(HeadIsThere());
}

TEST_F(LossctlAskingTest, SaysHowManyStepsAreLost) {
  ASSERT_EQ(Run("save head --name best").exit_code, 0);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Run("step head --lr 0.1").exit_code, 0);
  EXPECT_THAT(RunOnTerminal("delete head", "n\n").out,
              HasSubstr("at step 3: 3 steps since checkpoint head/best. Delete"));
  EXPECT_THAT(RunOnTerminal("load head/best", "n\n").out,
              HasSubstr("at step 3: 3 steps since checkpoint head/best. Load head/best over it?"));
  EXPECT_EQ(Run("load head/best </dev/null").exit_code, 0);
  EXPECT_THAT(RunOnTerminal("reset head --scope=all", "n\n").out, HasSubstr("Reset all of it? [y/N]"));
  EXPECT_THAT(RunOnTerminal("reset head --scope=optimizer", "n\n").out,
              AllOf(HasSubstr("has made 3 updates. Reset its optimizer?"), HasSubstr("not reset")));
  ASSERT_EQ(Run("save head --name last").exit_code, 0);
  EXPECT_EQ(RunOnTerminal("load head/last", "").exit_code, 0) << "nothing is lost, so nothing is asked";
}

TEST_F(LossctlAskingTest, RemovesCheckpoints) {
  EXPECT_THAT(RunOnTerminal("checkpoints rm head/a head/b", "n\n").out,
              AllOf(HasSubstr("Remove 2 checkpoints: head/a, head/b? [y/N]"), HasSubstr("not removed")));
  EXPECT_EQ(server_.deletions(), 0u);
  EXPECT_EQ(RunOnTerminal("checkpoints rm head/a", "y\n").exit_code, 0);
  EXPECT_EQ(server_.deletions(), 1u);
  // The rest goes on.
  const Outcome some = Run("checkpoints rm --yes head/b head/missing head/c head/b");
  EXPECT_EQ(some.exit_code, 4);
  EXPECT_EQ(some.out, "removed head/b (3.00 MiB)\nremoved head/c (3.00 MiB)\n");
  EXPECT_THAT(some.err, HasSubstr("no such checkpoint"));
  EXPECT_EQ(server_.deletions(), 3u);
  const auto json = Json("checkpoints rm head/d --yes");
  EXPECT_EQ(json["removed"][0]["checkpoint"], "head/d");
  EXPECT_EQ(json["removed"][0]["bytes"], 3 << 20);
  EXPECT_EQ(Run("checkpoints rm --yes").exit_code, 2);
  EXPECT_EQ(Run("checkpoints rm head --yes").exit_code, 2);
  // Lists as before.
  EXPECT_THAT(Run("checkpoints head").out, HasSubstr("head/step-0000000007"));
  EXPECT_EQ(Run("checkpoints head other").exit_code, 2);
}

TEST_F(LossctlAskingTest, ResetsHeads) {
  ASSERT_EQ(Run("step head --lr 0.1").exit_code, 0);
  EXPECT_EQ(Run("reset head --scope=optimizer --yes").out, "reset the optimizer of head \"head\", step 1\n");
  EXPECT_EQ(Json("reset head --scope=all --yes")["step"], 0);
  for (const char* arguments :
       {"reset head --yes", "reset head --scope=some --yes", "reset --scope=all --yes",
        "reset head --scope=optimizer --zeros --yes", "reset head --scope=optimizer --seed 0 --yes",
        "reset head --scope=all --zeros --seed 1 --yes"}) {
    EXPECT_EQ(Run(arguments).exit_code, 2) << arguments;
  }
  EXPECT_EQ(Run("reset nothing --scope=all --yes").exit_code, 4);
}

TEST_F(LossctlAskingTest, CreateSaysWhatHappensToAHeadThatExists) {
  ASSERT_EQ(Run("create other --hidden 3 --vocab 5").exit_code, 0);
  ASSERT_EQ(Run("step other --lr 0.1").exit_code, 0);
  EXPECT_EQ(Run("create other --hidden 3 --vocab 5").exit_code, 4);
  EXPECT_EQ(Run("create other --hidden 3 --vocab 5 --if-exists=error").exit_code, 4);
  EXPECT_EQ(Json("create other --hidden 3 --vocab 5 --if-exists=keep")["step"], 1);
  const Outcome different = Run("create other --hidden 4 --vocab 5 --bias --norm rmsnorm --if-exists=keep");
  EXPECT_EQ(different.exit_code, 4);
  EXPECT_THAT(different.err,
              AllOf(HasSubstr("hidden_size 3 instead of 4"), HasSubstr("bias false instead of true"),
                    HasSubstr("norm none instead of rmsnorm")));
  EXPECT_EQ(Run("create other --hidden 4 --vocab 5 --if-exists=reset").exit_code, 4);
  EXPECT_EQ(Json("describe other")["step"], 1);
  EXPECT_EQ(Json("create other --hidden 3 --vocab 5 --if-exists=reset")["step"], 0);
  EXPECT_EQ(Json("create another --hidden 3 --vocab 5 --if-exists=reset")["step"], 0);
  EXPECT_EQ(Run("create other --hidden 3 --vocab 5 --if-exists=maybe").exit_code, 2);
  EXPECT_EQ(Run("create other --hidden 3 --vocab 5 --if-exists=keep --dry-run").exit_code, 2);
}

// ---- Contexts ----
// `lossctl context`, and which server and credentials a command uses.

class LossctlContextsTest : public LossctlTest {
 protected:
  // Without LOSSD_SERVER; `environment` like "LOSSD_TOKEN=x".
  Outcome Lossctl(const std::string& arguments, const std::string& environment = "") {
    const std::string out = folder_.File("out"), err = folder_.File("err");
    const std::string command =
        absl::StrCat("cd ", folder_.path(), " && env -u LOSSD_SERVER -u LOSSD_CONTEXT LOSSD_CONFIG=", File(),
                     " ", environment, " " LOSSCTL_PATH " ", arguments, " >", out, " 2>", err);
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, Read(out), Read(err)};
  }
  nlohmann::json Show(const std::string& options, const std::string& environment = "") {
    const Outcome outcome = Lossctl(options + " --json context show", environment);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out, nullptr, false);
  }
  static std::string Normal(const std::string& path) {
    return std::filesystem::path(path).lexically_normal();
  }
  std::string File() const { return folder_.File("config/contexts.json"); }
  void Add(const std::string& name, const std::string& options) {
    const Outcome outcome = Lossctl(absl::StrCat("context add ", name, " ", options));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  }
  void WriteToken(int mode) {
    std::ofstream(folder_.File("token")) << "0123456789abcdef\n";
    ASSERT_EQ(chmod(folder_.File("token").c_str(), static_cast<mode_t>(mode)), 0);
  }
};

TEST_F(LossctlContextsTest, ContextsAreAddedListedUsedAndRemoved) {
  EXPECT_THAT(Lossctl("context list").out, HasSubstr("no contexts in "));
  WriteToken(0600);
  Add("lab", "--server gpu-7:7070 --http gpu-7:7171 --token-file token");
  Add("here", absl::StrCat("--server ", server_.target(), " --use"));
  EXPECT_EQ(Lossctl("context list").out,
            absl::StrCat("CURRENT  NAME  SERVER", std::string(server_.target().size() - 6, ' '),
                         "  TLS  SHOWS\n*        here  ", server_.target(),
                         "  no   none\n         lab   gpu-7:7070",
                         std::string(server_.target().size() - 10, ' '), "  no   token\n"));
  EXPECT_THAT(Lossctl("context list -o wide").out, HasSubstr(Normal(folder_.File("token"))));
  const auto list = nlohmann::json::parse(Lossctl("context list -o json").out);
  EXPECT_EQ(list["current"], "here");
  EXPECT_EQ(list["contexts"][1]["token_file"], Normal(folder_.File("token"))) << "paths are absolute";
  EXPECT_EQ(Lossctl("health").out, absl::StrCat(server_.target(), ": serving\n"));
  EXPECT_EQ(Lossctl("context use lab").out, "using context \"lab\"\n");
  EXPECT_EQ(Show("")["server"], "gpu-7:7070");
  EXPECT_EQ(Lossctl("context remove lab").exit_code, 0);
  EXPECT_EQ(Show("")["server"], "127.0.0.1:7070") << "none is the current one";
  EXPECT_EQ(Lossctl("context use here").exit_code, 0);
  EXPECT_EQ(Lossctl("context use --none").exit_code, 0);
  EXPECT_EQ(Show("")["context"], "");
  struct stat file = {};
  ASSERT_EQ(stat(File().c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, 0600);
}

TEST_F(LossctlContextsTest, MistakesChangeNothing) {
  Add("lab", "--server gpu-7:7070");
  const std::string before = Read(File());
  for (const auto& [arguments, says] :
       {std::pair("context add lab --server x:1", "already, for gpu-7:7070; --replace"),
        {"context add other", "--server must be given"},
        {"context add other --server foo", "--server is 'foo'; it has no port"},
        {"context add .x --server x:1", "context must have 1 to 64 characters"},
        {"context add other --server http://x", "write the address without"},
        {"context add other --server x:1 --ca none.pem", "none.pem"},
        {"context add other --server x:1 --cert a", "is not given"},
        {"context add other --server x:1 --token-file none", "none cannot be read"},
        {"context use other", "there is no context \"other\""},
        {"context remove other", "there is no context \"other\""}}) {
    const Outcome outcome = Lossctl(arguments);
    EXPECT_EQ(outcome.exit_code, 4) << arguments << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(says)) << arguments;
    EXPECT_EQ(Read(File()), before) << arguments;
  }
  EXPECT_EQ(Lossctl("context use").exit_code, 2);
  EXPECT_EQ(Lossctl("context").exit_code, 2);
  EXPECT_EQ(Lossctl("--context lab --server x:1 health").exit_code, 2);
  EXPECT_EQ(Lossctl("context add lab --server x:1 --replace").exit_code, 0);
  EXPECT_EQ(Show("--context lab")["server"], "x:1");
}

TEST_F(LossctlContextsTest, FlagsGoBeforeTheEnvironmentAndThatBeforeContexts) {
  Add("lab", "--server lab:1 --use");
  Add("other", "--server other:1");
  EXPECT_EQ(Show("")["server"], "lab:1");
  EXPECT_EQ(Show("", "LOSSD_CONTEXT=other")["server"], "other:1");
  EXPECT_EQ(Show("", "LOSSD_CONTEXT=other LOSSD_SERVER=environment:1")["server"], "environment:1");
  EXPECT_EQ(Show("--context lab", "LOSSD_CONTEXT=other LOSSD_SERVER=environment:1")["server"], "lab:1");
  EXPECT_EQ(Show("--server flag:1", "LOSSD_CONTEXT=other LOSSD_SERVER=environment:1")["server"], "flag:1");
  EXPECT_EQ(Show("--context lab")["context"], "lab");
  EXPECT_EQ(Show("--server flag:1")["context"], "");
  const Outcome unknown = Lossctl("--context none health");
  EXPECT_EQ(unknown.exit_code, 4);
  EXPECT_THAT(unknown.err, HasSubstr("there is no context \"none\" in " + File() + "; it has lab, other"));
}

TEST_F(LossctlContextsTest, CredentialsGoToTheirOwnServerOnly) {
  std::filesystem::create_directories(folder_.File("config"));
  std::ofstream(File()) << R"({"current": "lab", "contexts": {"lab": {"server": "lab:1", "ca": "ca.pem",
      "cert": "me.pem", "key": "me.key", "token_file": "../token"}}})";
  WriteToken(0600);
  const auto lab = Show("");
  EXPECT_EQ(lab["ca"], folder_.File("config/ca.pem")) << "relative to the file";
  EXPECT_EQ(lab["cert"], folder_.File("config/me.pem"));
  EXPECT_EQ(lab["token"], true);
  for (const auto& other : {Show("--server other:1"), Show("", "LOSSD_SERVER=other:1")}) {
    EXPECT_EQ(other["ca"], "");
    EXPECT_EQ(other["cert"], "");
    EXPECT_EQ(other["token"], false);
  }
  const auto mixed = Show("--ca flag.pem", "LOSSD_CA=variable.pem LOSSD_CERT=c LOSSD_KEY=k");
  EXPECT_EQ(mixed["ca"], "flag.pem");
  EXPECT_EQ(mixed["cert"], "c");
  EXPECT_EQ(mixed["key"], "k");
  EXPECT_EQ(mixed["server"], "lab:1");
}

TEST_F(LossctlContextsTest, ATokenThatOthersCanReadIsRefused) {
  WriteToken(0600);
  Add("here", absl::StrCat("--server ", server_.target(), " --token-file token --use"));
  EXPECT_EQ(Lossctl("health").exit_code, 0);
  WriteToken(0644);
  const Outcome refused = Lossctl("health");
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_THAT(refused.err, HasSubstr("token has the mode 0644, so others can read it; `chmod 600 "));
  EXPECT_THAT(refused.err, Not(HasSubstr("0123456789abcdef")));
  EXPECT_EQ(Lossctl("health", "LOSSD_TOKEN=fedcba9876543210").exit_code, 0) << "the file is not needed";
  EXPECT_EQ(Lossctl("context list").exit_code, 0);
}

TEST_F(LossctlContextsTest, AFileThatIsNotInOrderIsNamedWithItsLine) {
  std::filesystem::create_directories(folder_.File("config"));
  std::ofstream(File()) << "{\"contexts\": {\n  \"lab\": {\n    \"sever\": \"x:1\"}}}";
  const Outcome outcome = Lossctl("health");
  EXPECT_EQ(outcome.exit_code, 4);
  EXPECT_THAT(outcome.err, HasSubstr(File() + ":3: contexts.lab.sever must be one of server, ca"));
  EXPECT_EQ(Lossctl("--server 127.0.0.1:1 health").exit_code, 3)
      << "a command that does not need it does not read it";
}

TEST_F(LossctlContextsTest, NamesAreCompleted) {
  Add("lab", "--server gpu-7:7070");
  Add("lob", "--server gpu-8:7070");
  EXPECT_EQ(Lossctl("__complete --context l").out, "lab\nlob\n");
  EXPECT_EQ(Lossctl("__complete context use la").out, "lab\n");
  EXPECT_THAT(Lossctl("__complete context ''").out, HasSubstr("remove\t"));
  EXPECT_THAT(Lossctl("__complete -o ''").out, ::testing::AllOf(HasSubstr("json"), HasSubstr("wide")));
  EXPECT_THAT(Lossctl("context remov lab").err, HasSubstr("Did you mean remove?"));
}

}  // namespace
}  // namespace lossd::cli::lossctl_test
