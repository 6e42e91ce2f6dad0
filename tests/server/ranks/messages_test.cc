// SPDX-License-Identifier: Apache-2.0
// Tests of what ranks say to each other, messages, collectives and the agreement of all ranks, and of what
// launchers say to a rank (start.h).
#include "server/ranks/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/ranks/remote_backend.h"
#include "server/ranks/start.h"
#include "tests/server/ranks/local_worker.h"

namespace lossd::ranks::messages_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

// ---- Messages ----
// What ranks send each other is what they had, field by field. The structured bindings name all fields of a
// type: one that is added has to be added here, and so to the messages.

TEST(RankMessagesTest, HeadConfig) {
  const kernels::HeadConfig config = {.hidden_size = 3,
                                      .vocab_size = 5,
                                      .has_bias = true,
                                      .has_class_weights = true,
                                      .norm = kernels::Norm::kRmsNorm,
                                      .norm_epsilon = 0.25f,
                                      .compute_dtype = kernels::DType::kBFloat16,
                                      .optimizer_state = kernels::OptimizerState::kNone,
                                      .trainable = false,
                                      .logits = kernels::Logits::kRecomputed,
                                      .gradients = kernels::Gradients::kAuto,
                                      .workspace_bytes = 7,
                                      .split = kernels::Split::kVocabulary,
                                      .shares = {3, 0, 1},
                                      .replicas = 2};
  const kernels::HeadConfig none;
  // The class list, the last one, stays with the leader: workers count classes from 0.
  const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, residency, p] = config;
  const auto& [a0, b0, c0, d0, e0, f0, g0, h0, i0, j0, k0, l0, m0, n0, o0, device, p0] = none;
  EXPECT_EQ(residency, device) << "other ranks take no heads in host memory (RemoteBackend::CreateHead)";
  EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0 &&
              i != i0 && j != j0 && k != k0 && l != l0 && m != m0 && n != n0 && o != o0 && p == p0)
      << "a field that is lost shows";
  const auto back = FromProto(ToProto(config));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, config);
  v1::HeadConfig wrong = ToProto(config);
  wrong.set_split(3);
  EXPECT_EQ(FromProto(wrong).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RankMessagesTest, OptionsOfStepsAndLosses) {
  const kernels::OptimizerOptions step = {.kind = kernels::OptimizerOptions::Kind::kSgd,
                                          .learning_rate = 2,
                                          .weight_decay = 3,
                                          .decay_vectors = true,
                                          .grad_multiplier = 4,
                                          .beta1 = 5,
                                          .beta2 = 6,
                                          .epsilon = 7,
                                          .momentum = 8,
                                          .dampening = 9,
                                          .nesterov = true,
                                          .lazy_rows = true};
  const kernels::OptimizerOptions no_step;
  {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l] = step;
    const auto& [a0, b0, c0, d0, e0, f0, g0, h0, i0, j0, k0, l0] = no_step;
    EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0 &&
                i != i0 && j != j0 && k != k0 && l != l0);
  }
  EXPECT_EQ(*FromProto(ToProto(step, 11)), step);
  EXPECT_EQ(ToProto(step, 11).update(), 11);
  const kernels::LossOptions loss = {.logit_scale = 2,
                                     .softcap = 3,
                                     .label_smoothing = 0.5f,
                                     .z_loss = 4,
                                     .use_class_weights = true,
                                     .gradients = kernels::Gradients::kSampled,
                                     .filter_epsilon = 5,
                                     .sample_threshold = 6,
                                     .max_gradient_error = 7,
                                     .objective = {.kind = kernels::ObjectiveKind::kCispo,
                                                   .clip_low = 8,
                                                   .clip_high = 9,
                                                   .dual_clip = 10,
                                                   .kl = kernels::KlEstimator::kK1,
                                                   .kl_coef = 11,
                                                   .entropy_bonus = 12},
                                     .distillation = {.divergence = kernels::Divergence::kReverseKl,
                                                      .beta = 0.25f,
                                                      .temperature = 8,
                                                      .weight = 9,
                                                      .target_weight = 10,
                                                      .teacher_logit_scale = 11,
                                                      .teacher_softcap = 12,
                                                      .teacher = 13},
                                     .rest = kernels::Rest::kOneClass,
                                     .embedding = kernels::Embedding::kRows};
  const kernels::LossOptions no_loss;
  {
    const auto& [a, b, c, d, e, f, g, h, i, j, r, t, u] = loss;
    const auto& [a0, b0, c0, d0, e0, f0, g0, h0, i0, j0, r0, t0, u0] = no_loss;
    EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0 &&
                i != i0 && r != r0 && t != t0 && u != u0);
    const auto& [k, l, m, n, o, p, q] = j;
    const auto& [k0, l0, m0, n0, o0, p0, q0] = j0;
    EXPECT_TRUE(k != k0 && l != l0 && m != m0 && n != n0 && o != o0 && p != p0 && q != q0);
  }
  {
    const auto& [a, b, c, d, e, f, g, h] = loss.distillation;
    const auto& [a0, b0, c0, d0, e0, f0, g0, h0] = no_loss.distillation;
    EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0);
  }
  EXPECT_EQ(*FromProto(ToProto(loss)), loss);
}

TEST(RankMessagesTest, SumsOfSlices) {
  const kernels::LossSums sums = {.loss = 1,
                                  .z_loss = 2,
                                  .entropy = 3,
                                  .dropped_mass = 4,
                                  .sampling_variance = 5,
                                  .squared_gradient = 6,
                                  .valid_rows = 7,
                                  .correct_rows = 8,
                                  .objective = {9, 10, 11, 12, 13},
                                  .divergence = 14,
                                  .target_loss = 15};
  const kernels::LossSums back = FromProto(ToProto(sums));
  const auto& [a, b, c, d, e, f, g, h, i, j, k] = back;
  EXPECT_TRUE(a == 1 && b == 2 && c == 3 && d == 4 && e == 5 && f == 6 && g == 7 && h == 8);
  EXPECT_TRUE(j == 14 && k == 15);
  const auto& [rows, clipped, ratio, old_kl, ref_kl] = i;
  EXPECT_TRUE(rows == 9 && clipped == 10 && ratio == 11 && old_kl == 12 && ref_kl == 13);
}

// ---- Collectives ----

using Offer = std::vector<std::string>;
const Offer kBoth = {"nccl", "gloo"};
const char kVersion[] = "2.28.3";

v1::Hello Worker(uint32_t rank, const std::string& gpu, const Offer& offered,
                 const std::string& nccl_version = kVersion) {
  v1::Hello hello;
  hello.set_nccl_version(nccl_version);
  hello.set_rank(rank);
  hello.set_gpu_uuid(gpu);
  for (const std::string& collectives : offered) hello.add_collectives(collectives);
  return hello;
}

TEST(RankCollectivesTest, NcclWhereAllHaveItAndAGpuEach) {
  const auto choice =
      ChooseCollectives(kBoth, "GPU-0", kVersion, {Worker(1, "GPU-1", kBoth), Worker(2, "GPU-2", kBoth)});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->collectives, "nccl");
  EXPECT_THAT(choice->reason, IsEmpty());
}

TEST(RankCollectivesTest, GlooWhereTwoHaveTheSameGpu) {
  const auto choice =
      ChooseCollectives(kBoth, "GPU-0", kVersion, {Worker(1, "GPU-1", kBoth), Worker(2, "GPU-1", kBoth)});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->collectives, "gloo");
  EXPECT_EQ(
      choice->reason,
      "rank 2: device must be a GPU of its own for collectives nccl, and rank 1 has this one, got GPU-1");
}

TEST(RankCollectivesTest, GlooWhereNcclIsMissing) {
  const auto of_worker = ChooseCollectives(kBoth, "GPU-0", kVersion, {Worker(1, "GPU-1", {"gloo"})});
  ASSERT_TRUE(of_worker.ok()) << of_worker.status();
  EXPECT_EQ(of_worker->collectives, "gloo");
  EXPECT_EQ(of_worker->reason, "rank 1: collectives must have nccl, as rank 0 has, got gloo");
  // At rank 0 it is not offered, and there is nothing that it would be slower than.
  const auto of_leader = ChooseCollectives({"gloo"}, "GPU-0", kVersion, {Worker(1, "GPU-1", kBoth)});
  ASSERT_TRUE(of_leader.ok()) << of_leader.status();
  EXPECT_EQ(of_leader->collectives, "gloo");
  EXPECT_THAT(of_leader->reason, IsEmpty());
}

TEST(RankCollectivesTest, NcclOfOneVersion) {
  const std::vector<v1::Hello> workers = {Worker(1, "GPU-1", kBoth), Worker(2, "GPU-2", kBoth, "2.27.7")};
  const std::string reason = "rank 2: version of NCCL must be what rank 0 has, 2.28.3, got 2.27.7";
  const auto choice = ChooseCollectives(kBoth, "GPU-0", kVersion, workers);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->collectives, "gloo");
  EXPECT_EQ(choice->reason, reason);
  const absl::Status only = ChooseCollectives({"nccl"}, "GPU-0", kVersion, workers).status();
  EXPECT_EQ(only.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(only.message()), HasSubstr(reason));
}

// A link that knows no collectives but Gloo.
TEST(RankCollectivesTest, ProcessesOfSeveralDevicesHaveNoGpuInCommon) {
  NoLink link;
  const std::vector<v1::Hello> workers = {Worker(1, "GPU-1", kBoth), Worker(2, "GPU-0", kBoth)};
  const absl::Status status = UseCollectives(&link, "GPU-0", /*devices=*/2, workers).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      status.message(),
      "rank 2: device must be a GPU of its own for processes of several devices, and rank 0 has this one, "
      "got GPU-0");
  EXPECT_TRUE(UseCollectives(&link, "GPU-0", /*devices=*/1, workers).ok()) << "as tests do";
  EXPECT_TRUE(UseCollectives(&link, "", /*devices=*/2, {Worker(1, "", kBoth), Worker(2, "", kBoth)}).ok());
}

TEST(RankCollectivesTest, RanksOnCpusHaveNoGpuInCommon) {
  const auto choice = ChooseCollectives({"gloo"}, "", "", {Worker(1, "", {"gloo"}), Worker(2, "", {"gloo"})});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->collectives, "gloo");
}

TEST(RankCollectivesTest, WhatIsInTheWayIsNamed) {
  const absl::Status shared =
      ChooseCollectives({"nccl"}, "GPU-0", kVersion, {Worker(1, "GPU-0", {"nccl"})}).status();
  EXPECT_EQ(shared.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shared.message()),
              AllOf(HasSubstr("rank 1: device must be a GPU of its own"), HasSubstr("rank 0 has this one")));
  const absl::Status none = ChooseCollectives(kBoth, "GPU-0", kVersion, {Worker(1, "GPU-1", {})}).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.message()), HasSubstr("rank 1: collectives must have nccl"));
}

// ---- Agreement ----

v1::Hello Worker(const Settings& settings) {
  v1::Hello hello;
  hello.set_rank(2);
  for (const auto& [name, value] : settings) {
    v1::Setting* const setting = hello.add_settings();
    setting->set_name(name);
    setting->set_value(value);
  }
  return hello;
}

v1::Hello WorkerOf(const std::string& device) {
  return Worker(SettingsOf({}, {.name = "cuda", .device = device}));
}

void ExpectRefused(const absl::Status& status, const std::string& message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

TEST(AgreementTest, EverySettingHasToBeTheSame) {
  const Settings leader = {{"version", "1.2"}, {"split", "any"}};
  EXPECT_TRUE(CheckAgreement(leader, {}, Worker(leader)).ok());
  ExpectRefused(CheckAgreement(leader, {}, Worker({{"version", "1.2"}, {"split", "rows"}})),
                "rank 2: split must be what rank 0 has, any, got rows");
  ExpectRefused(CheckAgreement(leader, {}, Worker({{"split", "any"}})),
                "rank 2: version must be what rank 0 has, 1.2, got nothing");
}

TEST(AgreementTest, WhoeverSaysThatItIsAWorkerHearsItsOwnValueAlone) {
  const absl::Status refusal =
      CheckAgreement({{"split", "any"}}, {.device_bytes = 7}, Worker({{"split", "rows"}}), Listener::kWorker);
  EXPECT_EQ(refusal.message(), "rank 2: split must be what rank 0 has (its log says what that is), got rows");
  const absl::Status device = CheckAgreement({}, {.device_bytes = 777}, Worker({}), Listener::kWorker);
  EXPECT_THAT(std::string(device.message()), ::testing::Not(HasSubstr("777")));
}

// Whose settings they are: those of rank 2 of processes with two devices are of process 1.
TEST(AgreementTest, ProcessesOfSeveralDevicesAreNamed) {
  const Settings leader = {{"version", "1.2"}, {kDevices, "2"}, {"split", "any"}};
  const auto worker = [](const std::string& devices, const std::string& split) {
    return Worker({{"version", "1.2"}, {kDevices, devices}, {"split", split}});
  };
  EXPECT_TRUE(CheckAgreement(leader, {}, worker("2", "any")).ok());
  ExpectRefused(CheckAgreement(leader, {}, worker("2", "rows")),
                "process 1: split must be what process 0 has, any, got rows");
  ExpectRefused(CheckAgreement(leader, {}, worker("1", "any")),
                "process 2: number of devices must be what process 0 has, 2, got 1");
  ExpectRefused(CheckAgreement({{kDevices, "1"}}, {}, worker("2", "any")), "process 1: number of devices");
  // Another version may not know of them, and says what it likes.
  ExpectRefused(CheckAgreement(leader, {}, Worker({{"version", "1.1"}})), "process 2: version must be");
  for (const char* const devices : {"0", "-1", "many", "99999999999"}) {
    ExpectRefused(CheckAgreement(leader, {}, worker(devices, "any")), "process 2: number of devices must be");
  }
}

TEST(AgreementTest, AWorkerHasARankBesideTheLeaders) {
  v1::Hello worker;
  for (const uint32_t rank : {0u, 4u, UINT32_MAX}) {
    worker.set_rank(rank);
    ExpectRefused(CheckRank(worker, 4), absl::StrCat("rank must be in [1, 4) for a worker, got ", rank));
  }
  worker.set_rank(3);
  EXPECT_TRUE(CheckRank(worker, 4).ok());
}

TEST(AgreementTest, TheHashOfTheMessagesIsOfTheFileAlone) {
  EXPECT_THAT(ProtocolHash(), MatchesRegex("[0-9a-f]+"));
  EXPECT_EQ(ProtocolHash().size(), 16u);
  EXPECT_EQ(ProtocolHash(), ProtocolHash());
}

TEST(AgreementTest, GpusHaveToBeOfTheSameKindWhateverTheirNumber) {
  const Settings leader = SettingsOf({}, {.name = "cuda", .device = "cuda:0 NVIDIA H200"});
  EXPECT_TRUE(CheckAgreement(leader, {}, WorkerOf("cuda:7 NVIDIA H200")).ok());
  ExpectRefused(CheckAgreement(leader, {}, WorkerOf("cuda:0 NVIDIA H100 PCIe")),
                "rank 2: kind of device must be what rank 0 has, NVIDIA H200, got NVIDIA H100 PCIe");
}

// The same product may have memory of several sizes; drivers keep a little of it.
TEST(AgreementTest, GpusHaveToHaveTheSameMemory) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  v1::Hello worker = WorkerOf("cuda:0 NVIDIA A100");
  const auto check = [&](int64_t leader_bytes, int64_t worker_bytes) {
    worker.set_device_bytes(worker_bytes);
    return CheckAgreement({}, {.device_bytes = leader_bytes}, worker);
  };
  EXPECT_TRUE(check(80 * kGiB, 80 * kGiB).ok());
  EXPECT_TRUE(check(80 * kGiB, 80 * kGiB - kGiB / 2).ok());
  EXPECT_TRUE(check(80 * kGiB - kGiB / 2, 80 * kGiB).ok());
  ExpectRefused(check(80 * kGiB, 40 * kGiB),
                "rank 2: memory of the device must be what rank 0 has, 85899345920 bytes (give or take a "
                "hundredth), got 42949672960");
  ExpectRefused(check(40 * kGiB, 80 * kGiB), "got 85899345920");
  ExpectRefused(check(80 * kGiB, 0), "got 0");
  EXPECT_TRUE(check(0, 0).ok()) << "CPUs";
}

// A rank computes its rows or its classes by itself: threads do not decide who exchanges what.
TEST(AgreementTest, CpusMayHaveOtherNumbersOfThreads) {
  const Settings leader = SettingsOf({}, {.name = "cpu", .device = "1 thread, OpenBLAS"});
  const auto worker = [](const std::string& device) {
    return Worker(SettingsOf({}, {.name = "cpu", .device = device}));
  };
  EXPECT_TRUE(CheckAgreement(leader, {}, worker("16 threads, OpenBLAS")).ok());
  ExpectRefused(CheckAgreement(leader, {}, worker("1 thread, BLIS")), "rank 2: kind of device");
}

TEST(AgreementTest, ThoseThatHaveNotComeAreNamed) {
  EXPECT_EQ(NotCome({2}, 4, absl::Seconds(5)).message(),
            "rank 2 of 4 has not come within 5s (--rank_timeout)");
  EXPECT_EQ(NotCome({1, 3}, 4, absl::Minutes(1)).message(),
            "ranks 1, 3 of 4 have not come within 1m (--rank_timeout)");
  EXPECT_EQ(NotCome({1}, 2, absl::Minutes(1), absl::InvalidArgumentError("why")).message(),
            "rank 1 of 2 has not come within 1m (--rank_timeout); the last that was refused: why");
}

// ---- Launchers ----

struct Case {
  std::string what;
  LaunchFlags flags;
  Environment environment;
  int rank = 0;
  int ranks = 1;
  int local_rank = -1;  // -1: unknown
  std::string leader;
};

TEST(LaunchTest, SaysWhoThisProcessIs) {
  const Environment torchrun = {{"RANK", "3"},
                                {"WORLD_SIZE", "4"},
                                {"LOCAL_RANK", "1"},
                                {"MASTER_ADDR", "10.0.0.7"},
                                {"MASTER_PORT", "29500"}};
  const Environment slurm = {{"SLURM_PROCID", "2"},
                             {"SLURM_NTASKS", "8"},
                             {"SLURM_LOCALID", "2"},
                             {"SLURM_JOB_NODELIST", "gpu[03-05,9],login"}};
  Environment both = slurm;
  both.insert(torchrun.begin(), torchrun.end());
  Environment step = slurm;
  step["SLURM_STEP_NUM_TASKS"] = "4";
  step["SLURM_STEP_NODELIST"] = "gpu05";
  const Environment lws = {
      {"LWS_LEADER_ADDRESS", "lossd-0.lossd.default"}, {"LWS_GROUP_SIZE", "2"}, {"LWS_WORKER_INDEX", "0"}};
  const std::vector<Case> cases = {
      {"nothing", {}, {}, 0, 1, -1, ""},
      {"variables that nobody asks for", {}, both, 0, 1, -1, ""},
      {"auto finds nothing", {.launcher = "auto"}, {}, 0, 1, -1, ""},
      {"flags alone", {.rank = 1, .ranks = 2, .leader = "a:9"}, {}, 1, 2, -1, "a:9"},
      {"a host without a port", {.rank = 1, .ranks = 2, .leader = "a"}, {}, 1, 2, -1, "a:7072"},
      {"an IPv6 address", {.rank = 1, .ranks = 2, .leader = "[fe80::1]"}, {}, 1, 2, -1, "[fe80::1]:7072"},
      {"torchrun", {.launcher = "torchrun"}, torchrun, 3, 4, 1, "10.0.0.7:7072"},
      {"torchrun, another port", {.launcher = "auto", .port = 9}, torchrun, 3, 4, 1, "10.0.0.7:9"},
      {"torchrun and a leader", {.launcher = "torchrun", .leader = "b:5"}, torchrun, 3, 4, 1, "b:5"},
      {"a flag that agrees", {.launcher = "torchrun", .rank = 3}, torchrun, 3, 4, 1, "10.0.0.7:7072"},
      {"torchrun inside Slurm", {.launcher = "auto"}, both, 3, 4, 1, "10.0.0.7:7072"},
      {"Slurm", {.launcher = "slurm"}, slurm, 2, 8, 2, "gpu03:7072"},
      {"Slurm, although torchrun is there", {.launcher = "slurm"}, both, 2, 8, 2, "gpu03:7072"},
      {"a step of a job", {.launcher = "auto"}, step, 2, 4, 2, "gpu05:7072"},
      {"LeaderWorkerSet", {.launcher = "auto"}, lws, 0, 2, -1, "lossd-0.lossd.default:7072"},
      {"JobSet",
       {.launcher = "jobset", .ranks = 3, .leader = "j-0-0.j"},
       {{"JOB_COMPLETION_INDEX", "1"}},
       1,
       3,
       -1,
       "j-0-0.j:7072"},
      {"one rank has no leader",
       {.launcher = "slurm"},
       {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_NODELIST", "a"}},
       0,
       1,
       -1,
       ""},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    const auto launch = ReadLaunch(c.flags, c.environment);
    ASSERT_TRUE(launch.ok()) << launch.status();
    EXPECT_EQ(launch->rank, c.rank);
    EXPECT_EQ(launch->ranks, c.ranks);
    EXPECT_EQ(launch->local_rank.value_or(-1), c.local_rank);
    EXPECT_EQ(launch->leader, c.leader);
  }
}

TEST(LaunchTest, RefusesWhatIsMissingOrContradictsItself) {
  struct Refusal {
    LaunchFlags flags;
    Environment environment;
    std::string message;
  };
  const Environment torchrun = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}};
  const auto with = [](Environment environment, const std::string& name, const std::string& value) {
    environment[name] = value;
    return environment;
  };
  Environment slurm_and_lws = {{"SLURM_PROCID", "1"}, {"LWS_WORKER_INDEX", "1"}};
  const std::vector<Refusal> refusals = {
      {{.launcher = "mpirun"}, {}, "launcher must be none, auto, torchrun, slurm, lws or jobset, got mpirun"},
      {{.launcher = "auto"}, slurm_and_lws, "launcher must say which of slurm and lws is meant, got auto"},
      {{.rank = 1}, {}, "ranks must be given: how many processes there are, got nothing"},
      {{.ranks = 2}, {}, "rank must be given: which of the processes this is, got nothing"},
      {{.rank = 0, .ranks = 2}, {}, "leader must be given: where rank 0 is reached, host:port, got nothing"},
      {{.rank = 0, .ranks = 0}, {}, "ranks must be in [1, 1024], got 0"},
      {{.rank = 2, .ranks = 2, .leader = "a"}, {}, "rank must be in [0, 2), by ranks, got 2"},
      {{.rank = -1, .ranks = 2, .leader = "a"}, {}, "rank must be in [0, 2), by ranks, got -1"},
      {{.launcher = "torchrun"}, {}, "ranks must be given, or WORLD_SIZE be set, as torchrun does"},
      {{.launcher = "torchrun"},
       with(torchrun, "RANK", "one"),
       "RANK must be a whole number in [0, 1023], got one"},
      {{.launcher = "torchrun"},
       with(torchrun, "RANK", ""),
       "RANK must be a whole number in [0, 1023], got "},
      {{.launcher = "torchrun"}, with(torchrun, "RANK", "2"), "RANK must be in [0, 2), by WORLD_SIZE, got 2"},
      {{.launcher = "torchrun"},
       with(torchrun, "WORLD_SIZE", "0"),
       "WORLD_SIZE must be a whole number in [1, 1024], got 0"},
      {{.launcher = "torchrun"}, with(torchrun, "LOCAL_RANK", "-1"), "LOCAL_RANK must be a whole number"},
      {{.launcher = "torchrun", .rank = 0}, torchrun, "rank must agree with RANK, 1, got 0"},
      {{.launcher = "torchrun", .ranks = 3}, torchrun, "ranks must agree with WORLD_SIZE, 2, got 3"},
      {{.launcher = "slurm"},
       {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_NODELIST", "a[1"}},
       "SLURM_JOB_NODELIST must name the host of the first rank, got a[1"},
      {{.launcher = "jobset", .ranks = 2}, {{"JOB_COMPLETION_INDEX", "1"}}, "leader must be given: where"},
  };
  for (const Refusal& refusal : refusals) {
    const auto launch = ReadLaunch(refusal.flags, refusal.environment);
    EXPECT_EQ(launch.status().code(), absl::StatusCode::kInvalidArgument) << refusal.message;
    EXPECT_THAT(std::string(launch.status().message()), HasSubstr(refusal.message));
  }
}

TEST(LaunchTest, FirstHostOfANodeList) {
  EXPECT_EQ(FirstHost("gpu1"), "gpu1");
  EXPECT_EQ(FirstHost("gpu1,gpu2"), "gpu1");
  EXPECT_EQ(FirstHost("gpu[007-012]"), "gpu007");
  EXPECT_EQ(FirstHost("gpu[7,9-12]-ib.cluster,x"), "gpu7-ib.cluster");
  EXPECT_EQ(FirstHost("rack[1-2]n[3-4]"), "rack1n3");
  EXPECT_EQ(FirstHost("gpu[1"), "");
  EXPECT_EQ(FirstHost(""), "");
}

}  // namespace
}  // namespace lossd::ranks::messages_test
