// SPDX-License-Identifier: Apache-2.0
// Runs the lossctl binary against the real server: models from files, checkpoints there and back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "kernels/data/real_rows.h"
#include "proto/tensorfile/safetensors.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::cli::lossctl_server_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kD = 6;
constexpr int64_t kV = 20;

class LossctlServerTest : public ::testing::Test {
 protected:
  LossctlServerTest() {
    std::filesystem::create_directories(Model(""));
    for (int64_t i = 0; i < kV * kD; ++i) weight_.push_back(static_cast<float>(i) / 7);
    Start();
  }

  // With more flags, if there are any.
  void Start(const std::string& flag = "--log_level=off", const std::string& other = "--log_level=off") {
    server_ = nullptr;
    std::filesystem::remove(folder_.File("ports.json"));
    server_ = std::make_unique<test::ChildProcess>(std::vector<std::string>{
        LOSSD_BINARY, "--listen=127.0.0.1:0", "--http=", "--port_file=" + folder_.File("ports.json"),
        "--checkpoint_dir=" + folder_.File("checkpoints"), "--log_level=off", "--threads=1", "--backend=cpu",
        "--slice_bytes=64KiB", "--staging_bytes=4MiB", "--workspace_bytes=4MiB", "--keep_checkpoints=2", flag,
        other});
    target_.clear();
    for (int i = 0; i < 4000 && target_.empty(); ++i) {
      std::ifstream file(folder_.File("ports.json"));
      const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
      if (json.is_object()) {
        target_ = json["grpc"];
        http_ = json["http"];
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    ASSERT_NE(target_, "") << "lossd did not start";
  }

  std::string Model(const std::string& name) { return folder_.File("checkpoints/model/" + name); }

  void WriteModel(const std::string& file, const std::string& tensor) {
    auto writer = formats::CreateSafetensors(
        Model(file), {{{.name = tensor, .dtype = formats::DType::kFloat32, .shape = {kV, kD}}}});
    ASSERT_TRUE(writer.ok()) << writer.status();
    const auto* bytes = reinterpret_cast<const uint8_t*>(weight_.data());
    ASSERT_TRUE((*writer)->Append({bytes, weight_.size() * sizeof(float)}).ok());
    ASSERT_TRUE((*writer)->Finish().ok());
  }

  // Runs `lossctl ARGUMENTS`; what it printed, on both streams.
  std::string Run(const std::string& arguments, int exit_code = 0) {
    const std::string out = folder_.File("out");
    const std::string command =
        absl::StrCat("cd ", folder_.path(), " && LOSSD_CONFIG=contexts.json LOSSD_SERVER=", target_,
                     " " LOSSCTL_PATH " ", arguments, " >", out, " 2>&1");
    const int status = std::system(command.c_str());
    const std::string text = test::ReadWholeFile(out);
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, exit_code) << arguments << ": " << text;
    return text;
  }

  // Computes rows of the head, which several devices divide, until the program ends. Returns when the first
  // have been computed.
  std::unique_ptr<test::ChildProcess> Train(const std::string& head) {
    const auto rows = [&] {
      return nlohmann::json::parse(Run("--json shares " + head))["devices"][0]["rows"].get<uint64_t>();
    };
    const uint64_t before = rows();
    auto bench = std::make_unique<test::ChildProcess>(
        std::vector<std::string>{"/bin/sh", "-c",
                                 absl::StrCat("exec " LOSSCTL_PATH " --server ", target_, " bench ", head,
                                              " --what dx --rows 64 --seconds 300 >/dev/null 2>&1")});
    for (int i = 0; i < 400 && rows() == before; ++i) absl::SleepFor(absl::Milliseconds(20));
    return bench;
  }

  std::string ReadWeight(const std::string& head) {
    std::filesystem::remove(folder_.File(head + ".safetensors"));
    Run(absl::StrCat("read ", head, " weight --out ", head, ".safetensors"));
    const auto reader = formats::SafetensorsReader::Open(folder_.File(head + ".safetensors"));
    EXPECT_TRUE(reader.ok()) << reader.status();
    std::string bytes(weight_.size() * sizeof(float), '\0');
    const auto span = absl::MakeSpan(reinterpret_cast<uint8_t*>(bytes.data()), bytes.size());
    EXPECT_TRUE((*reader)->ReadBytes((*reader)->tensors()[0], 0, span).ok());
    return bytes;
  }
  std::string Weight() const {
    return {reinterpret_cast<const char*>(weight_.data()), weight_.size() * sizeof(float)};
  }

  test::TempFolder folder_;
  std::vector<float> weight_;
  std::unique_ptr<test::ChildProcess> server_;
  std::string target_;
  std::string http_;  // empty: none
};

TEST_F(LossctlServerTest, ProbesSayWhatTheServerSaysOverHttp) {
  httplib::Server http;  // of a server that drains
  http.Get("/livez", [](const httplib::Request&, httplib::Response& response) {
    response.set_content("ok\n", "text/plain");
  });
  http.Get("/readyz", [](const httplib::Request&, httplib::Response& response) {
    response.status = 503;
    response.set_content("draining\n", "text/plain");
  });
  const std::string address = absl::StrCat("127.0.0.1:", http.bind_to_any_port("127.0.0.1"));
  std::thread thread([&http] { http.listen_after_bind(); });
  EXPECT_EQ(Run(absl::StrCat("health --probe live --http ", address)), absl::StrCat(address, ": live\n"));
  EXPECT_EQ(Run(absl::StrCat("health --probe ready --http ", address), 1),
            absl::StrCat(address, ": not ready: draining\n"));
  const auto json =
      nlohmann::json::parse(Run(absl::StrCat("--json health --probe ready --http ", address), 1));
  EXPECT_EQ(json["status"], 503);
  // gRPC is not asked.
  EXPECT_EQ(Run(absl::StrCat("--server 127.0.0.1:1 health --probe live --http ", address)),
            absl::StrCat(address, ": live\n"));
  http.stop();
  thread.join();
  EXPECT_THAT(Run("health --probe live --http 127.0.0.1:1", 3), HasSubstr("nothing answers"));
  EXPECT_THAT(Run("health --probe dead", 2), HasSubstr("--probe"));
  EXPECT_THAT(Run("health --probe live some.Service", 2),
              HasSubstr("SERVICE cannot be given together with --probe"));
  Start("--http=127.0.0.1:0");
  EXPECT_EQ(Run(absl::StrCat("health --probe ready --http ", http_)), absl::StrCat(http_, ": ready\n"));
}

TEST_F(LossctlServerTest, Events) {
  Start("--http=127.0.0.1:0");
  const std::string at_http = absl::StrCat(" --http ", http_);
  Run("create one --hidden 6 --vocab 20");
  const std::string printed = Run("events" + at_http);
  EXPECT_THAT(printed, ContainsRegex("Z info    lossd [^ ]+ serves"));
  EXPECT_THAT(printed, HasSubstr("Z info    one: head created: 20 classes of 6 values, step 0\n"));
  const auto json = nlohmann::json::parse(Run("events --json --after 1" + at_http));
  EXPECT_EQ(json["events"][0]["kind"], "head_created");
  EXPECT_EQ(json["last_id"], json["events"].back()["id"]);
  EXPECT_EQ(json["missed"], false);
  EXPECT_THAT(Run("events --http 127.0.0.1:1", 3), HasSubstr("127.0.0.1:1"));

  const std::string followed = folder_.File("followed");
  test::WriteWholeFile(followed, "");
  test::ChildProcess follower(
      {"/bin/sh", "-c", absl::StrCat("exec " LOSSCTL_PATH " events --follow", at_http, " >", followed)});
  const auto await = [&](absl::string_view text) {
    for (int i = 0; i < 4000 && !absl::StrContains(test::ReadWholeFile(followed), text); ++i) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    EXPECT_THAT(test::ReadWholeFile(followed), HasSubstr(text));
  };
  const std::string documents = folder_.File("documents");
  test::ChildProcess other(
      {"/bin/sh", "-c",
       absl::StrCat("exec " LOSSCTL_PATH " -o json events --follow", at_http, " >", documents)});
  await("one: head created");
  Run("describe two", 4);
  await("DescribeHead ended with NOT_FOUND\n");
  Run("describe two", 4);
  await("DescribeHead ended with NOT_FOUND (2 times)\n");
  const std::string address = http_;
  Start("--http=" + address);  // events of another server are numbered anew
  Run("create three --hidden 6 --vocab 20");
  await("three: head created");
  follower.Signal(SIGINT);
  EXPECT_EQ(follower.WaitFor(absl::Seconds(60)), 0);
  for (int i = 0; i < 4000 && !absl::StrContains(test::ReadWholeFile(documents), "three"); ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  other.Signal(SIGINT);
  EXPECT_EQ(other.WaitFor(absl::Seconds(60)), 0);
  size_t events = 0;
  for (const absl::string_view line :
       absl::StrSplit(test::ReadWholeFile(documents), '\n', absl::SkipEmpty())) {
    const auto look = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(look.is_object()) << line;
    EXPECT_FALSE(look["events"].empty()) << "a look without news prints nothing";
    events += look["events"].size();
  }
  EXPECT_GE(events, 5u);
}

// What each command prints as a document, with arguments that work in this order on a server of two devices.
constexpr const char* kDocuments[] = {"health",
                                      "health --probe ready --http HTTP",
                                      "server",
                                      "create head --hidden 6 --vocab 20 --split vocabulary",
                                      "heads",
                                      "describe head",
                                      "shares head",
                                      "shares head even",
                                      "loss head --random 5 --accumulate",
                                      "shares head --balance --interval 1",
                                      "grad-norm head",
                                      "zero-grad head",
                                      "loss head --random 5 --accumulate",
                                      "step head --lr 0.1",
                                      "read head weight --out weight.npy",
                                      "write head weight weight.npy",
                                      "add-grad head weight weight.npy --id 7",
                                      "save head --name one",
                                      "checkpoints",
                                      "load head/one --yes",
                                      "checkpoints rm head/one --yes",
                                      "reset head --scope all --yes",
                                      "bench head --microbatches 1 --rows 4",
                                      "watch --count 1 --http HTTP",
                                      "top --count 1 --interval 0.05",
                                      "metrics --http HTTP",
                                      "metrics --filter nothing --http HTTP",
                                      "events --http HTTP",
                                      "trace --seconds 0.01 --http HTTP",
                                      "plan --hidden 4096 --vocab 128256",
                                      "context add here --server 127.0.0.1:1 --use",
                                      "context list",
                                      "context show",
                                      "context use --none",
                                      "context remove here",
                                      "delete head --yes"};

// docs/lossctl.md, "Documents for scripts": each command prints an object.
TEST_F(LossctlServerTest, EveryCommandPrintsAnObject) {
  Start("--cpu_devices=2", "--http=127.0.0.1:0");
  std::set<std::string> seen;
  for (const char* const command : kDocuments) {
    SCOPED_TRACE(command);
    seen.insert(std::string(command).substr(0, std::string(command).find(' ')));
    std::unique_ptr<test::ChildProcess> training;  // that --balance measures
    if (absl::StrContains(command, "--balance")) training = Train("head");
    const std::string text = Run(absl::StrCat("-o json ", absl::StrReplaceAll(command, {{"HTTP", http_}})));
    EXPECT_TRUE(nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false).is_object()) << text;
  }
  const std::string help = Run("--help");
  const std::string list =
      help.substr(help.find("Subcommands:\n") + 13, help.find("\nExit codes") - help.find("Subcommands:\n"));
  size_t commands = 0;
  for (const absl::string_view line : absl::StrSplit(list, '\n')) {
    if (!absl::StartsWith(line, "  ") || absl::StartsWith(line, "   ")) continue;
    const std::string command(line.substr(2, line.find(' ', 2) - 2));
    ++commands;
    EXPECT_TRUE(command == "completion" || seen.contains(command)) << command << " has no case here";
  }
  EXPECT_GT(commands, 20u);
}

TEST_F(LossctlServerTest, ATraceOfARealRunIsInOrder) {
  Start("--http=127.0.0.1:0");
  Run("create one --hidden 6 --vocab 20");
  test::ChildProcess bench({"/bin/sh", "-c",
                            absl::StrCat("exec " LOSSCTL_PATH " --server ", target_,
                                         " bench one --rows 1024 --seconds 300 >/dev/null 2>&1")});
  nlohmann::json trace;
  std::set<std::string> seen;
  // Until it has all kinds: the first one may be from before the load.
  for (int i = 0; i < 60 && !(seen.contains("send") && seen.contains("weight gradient")); ++i) {
    ASSERT_TRUE(bench.Running());
    trace = nlohmann::json::parse(Run(absl::StrCat("trace --seconds 0.5 --http ", http_)));
    seen.clear();
    for (const auto& event : trace["traceEvents"]) seen.insert(event["name"]);
  }
  bench.Signal(SIGTERM);
  for (const char* name : {"receive", "queue", "compute", "send", "results", "weight gradient"}) {
    EXPECT_TRUE(seen.contains(name)) << name;
  }
  EXPECT_EQ(trace["displayTimeUnit"], "ms");
  EXPECT_LE(trace["otherData"]["seconds"], 0.5);
  // As the format has it: what begins ends, with the same category, id, name and process.
  std::map<std::string, std::vector<double>> open;
  for (const auto& event : trace["traceEvents"]) {
    const std::string phase = event["ph"];
    ASSERT_TRUE(event["pid"].is_number_unsigned() && event["tid"].is_number_unsigned()) << event;
    if (phase == "M") {
      EXPECT_EQ(event["name"], "process_name");
      EXPECT_TRUE(event["args"]["name"].is_string());
      continue;
    }
    ASSERT_TRUE(event["cat"].is_string() && event["ts"].is_number()) << event;
    EXPECT_GE(event["ts"], 0.0);
    EXPECT_LE(event["ts"], 0.5e6);
    if (phase == "i") continue;
    ASSERT_TRUE(phase == "b" || phase == "e") << event;
    std::vector<double>& begun =
        open[absl::StrCat(event["pid"].get<int>(), event["cat"].get<std::string>(),
                          event["id"].get<std::string>(), event["name"].get<std::string>())];
    if (phase == "b") {
      EXPECT_GT(event["args"]["rows"], 0);
      begun.push_back(event["ts"]);
    } else {
      ASSERT_FALSE(begun.empty()) << event;
      EXPECT_GE(event["ts"], begun.back());
      begun.pop_back();
    }
  }
  for (const auto& [what, begun] : open) EXPECT_TRUE(begun.empty()) << what;
}

TEST_F(LossctlServerTest, CreatesFromFiles) {
  WriteModel("model.safetensors", "lm_head.weight");
  Run("create single --hidden 6 --vocab 20 --from model/model.safetensors --weight lm_head.weight");
  EXPECT_EQ(ReadWeight("single"), Weight());
  Run("create folder --hidden 6 --vocab 20 --from model --weight lm_head.weight");
  EXPECT_EQ(ReadWeight("folder"), Weight());
  WriteModel("model-00001-of-00001.safetensors", "model.embed_tokens.weight");
  test::WriteWholeFile(
      Model("model.safetensors.index.json"),
      R"({"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}})");
  Run("create tied --hidden 6 --vocab 20 --from model --weight model.embed_tokens.weight");
  EXPECT_EQ(ReadWeight("tied"), Weight());

  EXPECT_THAT(
      Run("create no --hidden 6 --vocab 20 --from model --weight lm_head.weight", 4),
      HasSubstr("tensor_file.weight: model/model.safetensors.index.json: no tensor 'lm_head.weight'"));
  EXPECT_THAT(Run("create no --hidden 6 --vocab 21 --from model --weight model.embed_tokens.weight", 4),
              HasSubstr("of shape [20, 6]"));
  EXPECT_THAT(Run("create no --hidden 6 --vocab 20 --from ../etc --weight x", 4), HasSubstr(".."));
}

TEST_F(LossctlServerTest, ADryRunSaysWhatWouldBeMadeAndMakesNothing) {
  const std::string spec = "head --hidden 6 --vocab 20 --norm rmsnorm";
  const std::string planned = Run("create " + spec + " --dry-run");
  const std::string nothing = Run("heads");
  EXPECT_THAT(nothing, ::testing::Not(HasSubstr("head ")));
  EXPECT_EQ(Run("create " + spec), planned);
  EXPECT_THAT(Run("create " + spec + " --dry-run", 4), HasSubstr("is taken by another head"));
}

TEST_F(LossctlServerTest, AHeadInHostMemory) {
  const std::string spec = "head --hidden 6 --vocab 20 --frozen --residency host";
  const std::string planned = Run("create " + spec + " --dry-run");
  EXPECT_EQ(Run("create " + spec), planned);
  EXPECT_THAT(planned, ContainsRegex("\nresidency +host memory, not on the device\n"));
  EXPECT_THAT(Run("-o wide heads"), ContainsRegex("CHUNK ROWS +VALUES(.|\n)* host "));
  Run("loss head --random 50");
  EXPECT_THAT(Run("describe head"),
              ContainsRegex("\nresidency +host memory, on the device now; copied 1 times .*left 0 times\n"));
  EXPECT_THAT(Run("-o wide heads"), HasSubstr("host, on device"));
  const auto json = nlohmann::json::parse(Run("--json describe head"));
  EXPECT_EQ(json["residency"], "host");
  EXPECT_EQ(json["paging"]["copies"], 1);
  EXPECT_EQ(json["paging"]["on_device"], true);
  EXPECT_THAT(Run("create no --hidden 6 --vocab 20 --residency host", 4), HasSubstr("spec.residency"));
  Run("create on --hidden 6 --vocab 20");
  EXPECT_EQ(nlohmann::json::parse(Run("--json describe on"))["residency"], "device");
}

TEST_F(LossctlServerTest, DescribeSaysWhatWasChosen) {
  Run("create head --hidden 6 --vocab 20");
  EXPECT_THAT(Run("describe head"),
              AllOf(HasSubstr("\nFULL CHUNKS "), HasSubstr("\nproducts "), Not(HasSubstr("LAST CHUNK"))));
  Run("loss head --random 50 --gradients filtered --accumulate --step 0");
  EXPECT_THAT(Run("describe head"), ContainsRegex("\nLAST CHUNK .*\ngradients +filtered"));
  const auto json = nlohmann::json::parse(Run("--json describe head"));
  EXPECT_EQ(json["choices"][0]["what"], "chunk");
  EXPECT_EQ(json["choices"][0]["workspace_bytes"], json["memory"]["workspace"]);
  EXPECT_EQ(json["last_chunk_choices"][0]["choice"], "filtered");
}

TEST_F(LossctlServerTest, BenchOfAnEmbedding) {
  Run("create head --hidden 6 --vocab 20");
  const auto rows = nlohmann::json::parse(Run("--json bench head --what rows --rows 300 --microbatches 4"));
  EXPECT_EQ(rows["rows"], 1200);
  EXPECT_GT(rows["received_bytes_per_second"], 0);
  EXPECT_THAT(Run("bench head --what row-gradients --rows 300 --microbatches 4"),
              HasSubstr("sums of gradients of an embedding's rows"));
  EXPECT_EQ(nlohmann::json::parse(Run("--json describe head"))["step_rows"], 0);
}

// The classes of the head lie on two devices, which sample them apart and tell the error of all.
TEST_F(LossctlServerTest, SampledGradientsOfAHeadSplitByVocabularySayTheirError) {
  Start("--cpu_devices=2", "--http=127.0.0.1:0");
  Run("create head --hidden 6 --vocab 20 --split vocabulary --gradients sampled");
  EXPECT_THAT(Run("describe head"),
              AllOf(ContainsRegex("\ndevices +2, by vocabulary"), ContainsRegex("\ngradients +sampled")));
  const std::string loss = "loss head --random 50 --sample-threshold 0.05 ";
  EXPECT_THAT(Run(loss + "--accumulate --step 0"), ContainsRegex("\ngradient error +[0-9.e-]+ predicted"));
  EXPECT_THAT(Run("describe head"), ContainsRegex("\nLAST CHUNK .*\ngradients +sampled"));
  EXPECT_THAT(Run(loss + "--gradients auto --max-gradient-error 1e-6 --grad-out dx.npy"),
              Not(HasSubstr("gradient error")));
  EXPECT_THAT(Run("loss head --random 50 --gradients filtered --filter-epsilon 0.03 --grad-out filtered.npy"),
              HasSubstr("\ndropped mass"));
}

TEST_F(LossctlServerTest, DepthsHaveWeightsAndLossesOfTheirOwn) {
  Run("create head --hidden 6 --vocab 20");
  const std::string rows = "loss head --random 50 --seed 3 --dtype fp32 ";
  const std::string divided = rows + "--depth-weights 1,0.25 --accumulate --step 0";
  EXPECT_THAT(Run(divided),
              AllOf(ContainsRegex("\ndepth 0 +loss [0-9.]+, weight 1, 25 valid rows, [0-9]+ correct"),
                    ContainsRegex("\ndepth 1 +loss [0-9.]+, weight 0.25, 25 valid rows")));
  const auto repeat = nlohmann::json::parse(Run("--json " + divided));
  EXPECT_EQ(repeat["depths"][1]["repeated_rows"], 25);
  const auto whole = nlohmann::json::parse(Run("--json " + rows));
  EXPECT_EQ(whole["depths"].size(), 0u);
  const double first = repeat["depths"][0]["loss"], second = repeat["depths"][1]["loss"];
  EXPECT_NEAR(repeat["loss"].get<double>(), first + 0.25 * second, 1e-9);
  EXPECT_NEAR(whole["loss"].get<double>(), (first + second) / 2, 1e-5);
  EXPECT_THAT(Run(rows + "--depth-weights 1,1,1", 4), HasSubstr("50 rows cannot be divided into 3 depths"));
  EXPECT_THAT(Run(rows + "--depth-weights 1,-1", 4), HasSubstr("microbatch.depths[1].weight"));
}

TEST_F(LossctlServerTest, ADraftVocabularyComesFromAFile) {
  constexpr int32_t kClasses[] = {2, 3, 5, 8};
  auto writer =
      formats::CreateSafetensors(folder_.File("classes.safetensors"),
                                 {{{.name = "classes", .dtype = formats::DType::kInt32, .shape = {4}}}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Append({reinterpret_cast<const uint8_t*>(kClasses), sizeof(kClasses)}).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  const std::string create =
      "create head --hidden 6 --vocab 4 --class-list classes.safetensors --full-vocab ";
  EXPECT_THAT(Run(create + "8", 4), HasSubstr("spec.class_list[3]"));
  EXPECT_THAT(Run(create + "20"), ContainsRegex("\nvocabulary +4 of 20 classes"));
  EXPECT_EQ(nlohmann::json::parse(Run("--json describe head"))["class_list"], nlohmann::json({2, 3, 5, 8}));
  // Random targets are below 4, where the head has two classes.
  const auto loss = nlohmann::json::parse(Run("--json loss head --random 50 --reduction sum"));
  EXPECT_EQ(loss["valid_rows"].get<int>() + loss["unlisted_rows"].get<int>(), 50);
  EXPECT_THAT(Run("loss head --random 50"), HasSubstr("\nunlisted "));
  EXPECT_THAT(Run("loss head --random 50 --refuse-unlisted", 4), HasSubstr("refuse_unlisted"));
}

// The log-probabilities of one call are the old ones of the next: the ratio of every row is 1.
TEST_F(LossctlServerTest, ObjectivesTakeNumbersOfRowsFromFiles) {
  Run("create head --hidden 6 --vocab 20");
  const std::string rows = "loss head --random 50 --seed 3 --dtype fp32 ";
  Run(rows + "--rows-out rows.safetensors");
  const std::string numbers =
      "--advantages rows.safetensors:row_loss --old-logprobs rows.safetensors:row_logprob ";
  EXPECT_THAT(Run(rows + "--objective ppo --clip-high 0.28 --dual-clip 3 " + numbers),
              ContainsRegex("\nobjective +ratio 1, 0.00 % clipped, KL from old [0-9.e-]+, from reference 0"));
  const auto grpo = nlohmann::json::parse(Run("--json " + rows +
                                              "--objective ppo --kl k1 --kl-coef 0.1 --entropy-bonus 0.01 " +
                                              numbers + "--ref-logprobs rows.safetensors:row_lse"));
  EXPECT_EQ(grpo["objective"]["rows"], 50);
  EXPECT_NEAR(grpo["objective"]["ratio"].get<double>(), 50.0, 1e-3);
  EXPECT_LT(grpo["objective"]["ref_kl"].get<double>(), 0.0);
  EXPECT_THAT(Run(rows + "--objective dft"), HasSubstr("\nobjective "));
  EXPECT_THAT(Run(rows + "--objective ppo --advantages rows.safetensors:row_loss", 4),
              HasSubstr("open.old_logprobs"));
  EXPECT_THAT(Run(rows + "--objective cispo --dual-clip 3 " + numbers, 4),
              HasSubstr("open.options.objective.dual_clip"));
}

TEST_F(LossctlServerTest, DistilsFromATeacher) {
  Run("create head --hidden 6 --vocab 20");
  Run("create teacher --hidden 9 --vocab 20 --frozen");
  const std::string random = "loss head --random 50 --dtype fp32 ";
  EXPECT_THAT(Run(random + "--teacher teacher --target-weight 0.5"),
              ContainsRegex("\ndivergence +[0-9.e-]+, loss with targets [0-9.]+\n"));
  for (const std::string divergence : {"forward-kl", "reverse-kl", "jensen-shannon", "total-variation"}) {
    const auto json = nlohmann::json::parse(
        Run("--json " + random + "--teacher teacher --temperature 2 --beta 0.25 --divergence-weight 3 " +
            "--target-weight 0.5 --teacher-softcap 30 --teacher-logit-scale 0.5 --divergence " + divergence));
    EXPECT_NEAR(json["loss_sum"].get<double>(),
                3 * json["divergence_sum"].get<double>() + 0.5 * json["target_loss_sum"].get<double>(), 1e-3);
  }
  EXPECT_THAT(Run(random + "--teacher teacher --gradients sampled --sample-threshold 0.5 --grad-out dx.npy"),
              HasSubstr("\ndivergence"));
  EXPECT_THAT(Run(random + "--teacher nobody", 4), HasSubstr("nobody"));
  EXPECT_THAT(Run(random + "--teacher teacher --teacher-hidden dx.npy", 4), HasSubstr("--teacher-hidden"));
  const std::string files =
      "loss head --hidden dx.npy --targets rows.safetensors:row_argmax --teacher teacher ";
  Run(random + "--rows-out rows.safetensors");
  EXPECT_THAT(Run(files, 4), HasSubstr("--teacher-hidden"));
  EXPECT_THAT(Run(files + "--teacher-hidden dx.npy", 4), HasSubstr("9 of the teacher"));
}

// The most probable class of one call is the soft target of the next, with the row's loss as its weight.
TEST_F(LossctlServerTest, SoftTargetsComeFromFiles) {
  Run("create head --hidden 6 --vocab 20");
  const std::string rows = "loss head --random 50 --seed 3 --dtype fp32 ";
  Run(rows + "--top-k 1 --rows-out rows.safetensors");
  const std::string weights = "--target-weights rows.safetensors:row_loss ";
  const std::string files = "--target-classes rows.safetensors:top_classes " + weights;
  EXPECT_THAT(Run(rows + "--rest renormalized " + files), ContainsRegex("^loss +[0-9.]+"));
  EXPECT_THAT(Run(rows + "--rest one-class " + files, 4), HasSubstr("open.target_weights"));
  EXPECT_THAT(Run(rows + "--rest none --target-classes rows.safetensors:row_argmax " + weights, 4),
              HasSubstr("both must have [N, K]"));
  // Classes of 50 rows by 2, weights of the first 25 rows by 4: as many numbers.
  Run("loss head --random 25 --seed 3 --top-k 4 --rows-out few.safetensors");
  Run(rows + "--top-k 2 --rows-out many.safetensors");
  EXPECT_THAT(
      Run(rows + "--rest none --target-classes many.safetensors:top_classes " +
              "--target-weights few.safetensors:top_logprobs",
          4),
      HasSubstr("many.safetensors:top_classes has shape [50, 2] and few.safetensors:top_logprobs [25, 4]"));
}

TEST_F(LossctlServerTest, ABenchmarkKeepsGradientsOfOthers) {
  Run("create head --hidden 4 --vocab 12");
  Run("read head weight --out weight.npy");
  Run("add-grad head weight weight.npy --step 0 --id 5");
  EXPECT_THAT(Run("bench head --rows 8 --microbatches 1", 4),
              HasSubstr("holds gradients of 1 contributions (AddGradient)"));
  EXPECT_THAT(Run("grad-norm head"), Not(HasSubstr(" 0\n")));
  Run("bench head --rows 8 --microbatches 1 --what dx");
  Run("bench head --rows 8 --microbatches 1 --force");
  Run("loss head --random 5 --accumulate --step 0");
  EXPECT_THAT(Run("bench head --rows 8 --microbatches 1", 4), HasSubstr("holds gradients of 5 rows"));
}

TEST_F(LossctlServerTest, AHeadWithReplicasSaysHowItLies) {
  Start("--cpu_devices=4");
  Run("create head --hidden 6 --vocab 20 --replicas 2 --shares 3,1");
  EXPECT_THAT(Run("describe head"), AllOf(ContainsRegex("\nreplicas +2\n"), ContainsRegex("\nshares +3, 1\n"),
                                          ContainsRegex("\ndevices +4, 2 replicas of 2 by vocabulary")));
  EXPECT_EQ(nlohmann::json::parse(Run("--json describe head"))["replicas"], 2);
  EXPECT_THAT(Run("loss head --random 50 --accumulate --step 0"),
              AllOf(ContainsRegex("^loss +[0-9]"), HasSubstr("\naccumulated  50 rows into step 0")));
}

TEST_F(LossctlServerTest, CheckpointsSurviveARestart) {
  Run("create head --hidden 6 --vocab 20 --seed 3");
  for (int step = 0; step < 4; ++step) {
    Run(absl::StrCat("loss head --random 50 --accumulate --step ", step));
    Run("step head --lr 0.1 --expect-rows 50");
    Run("save head");
  }
  EXPECT_THAT(Run("save head", 4), HasSubstr("step-0000000004"));
  Run("save head --name mine");
  const std::string weight = ReadWeight("head");
  const auto list = nlohmann::json::parse(Run("--json checkpoints"));
  ASSERT_EQ(list["checkpoints"].size(), 3u) << list;
  server_->Signal(SIGKILL);
  Start();
  EXPECT_EQ(Run("load head/step-0000000004"), "loaded head/step-0000000004 into head \"head\", step 4\n");
  EXPECT_EQ(ReadWeight("head"), weight);
  EXPECT_THAT(Run("checkpoints head"), HasSubstr("head/mine"));
  EXPECT_THAT(Run("describe head"),
              ContainsRegex("\nhistory +run .*loaded from head/step-0000000004 .step 4."));
}

TEST_F(LossctlServerTest, RemovesAndResets) {
  Run("create head --hidden 6 --vocab 20 --seed 3");
  const std::string first = ReadWeight("head");
  Run("loss head --random 50 --accumulate --step 0");
  Run("step head --lr 0.1");
  Run("save head --name mine");
  EXPECT_THAT(Run("checkpoints rm head/mine </dev/null", 2), HasSubstr("--yes"));
  EXPECT_THAT(Run("checkpoints rm head/mine --yes"), ContainsRegex("^removed head/mine .[0-9.]+ KiB.\n$"));
  EXPECT_THAT(Run("checkpoints rm head/mine --yes", 4), HasSubstr("there is none of this name"));
  EXPECT_EQ(Run("checkpoints"), "no checkpoints on this server\n");
  EXPECT_NE(ReadWeight("head"), first);
  EXPECT_THAT(Run("create head --hidden 6 --vocab 20 --if-exists=keep"), ContainsRegex("\nopen step +1 "));
  EXPECT_THAT(Run("create head --hidden 6 --vocab 21 --if-exists=reset", 4),
              HasSubstr("vocab_size 20 instead of 21"));
  EXPECT_THAT(Run("reset head --scope=all --seed 3 </dev/null", 2), HasSubstr("--yes"));
  EXPECT_EQ(Run("reset head --scope=optimizer --yes"), "reset the optimizer of head \"head\", step 1\n");
  EXPECT_EQ(Run("reset head --scope=all --seed 3 --yes"), "reset all of head \"head\", step 0\n");
  EXPECT_EQ(ReadWeight("head"), first);
  EXPECT_THAT(Run("create head --hidden 6 --vocab 20 --if-exists=reset --zeros"),
              ContainsRegex("\nopen step +0 "));
  EXPECT_NE(ReadWeight("head"), first);
}

TEST_F(LossctlServerTest, BenchOfRealRowsReplacesTheWeight) {
  constexpr int64_t kHidden = 64, kVocab = 9000;  // more classes than are written at a time
  Run("create real --hidden 64 --vocab 9000");
  EXPECT_THAT(Run("bench real --data real --microbatches 2", 4), HasSubstr("--overwrite-weight"));
  EXPECT_THAT(Run("bench real --data real --overwrite-weight --microbatches 2 --rows 300 --seed 5"),
              HasSubstr("300 real rows"));
  const auto rows = data::RealRows::Create(300, kHidden, kVocab, 5);
  ASSERT_TRUE(rows.ok()) << rows.status();
  weight_.resize(kVocab * kHidden);
  data::FillWeight(*rows, 0, kVocab, weight_.data());
  EXPECT_TRUE(ReadWeight("real") == Weight());

  Run("create biased --hidden 64 --vocab 2000 --bias");
  EXPECT_THAT(Run("bench biased --data real --overwrite-weight --microbatches 2", 4),
              HasSubstr("norm and bias"));
  Run("create small --hidden 16 --vocab 20");
  EXPECT_THAT(Run("bench small --data real --overwrite-weight --microbatches 2", 4),
              HasSubstr("hidden size"));
}

}  // namespace
}  // namespace lossd::cli::lossctl_server_test
