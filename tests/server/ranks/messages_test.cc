// SPDX-License-Identifier: Apache-2.0
// Tests of what ranks say to each other: messages, collectives, and the agreement of all ranks.
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

// ---- Messages ----
// What ranks send each other is what they had, field by field. The structured bindings name all fields of a
// type: one that is added has to be added here, and so to the messages.

namespace lossd::ranks::messages_test {
namespace {

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
  const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o] = config;
  const auto& [a0, b0, c0, d0, e0, f0, g0, h0, i0, j0, k0, l0, m0, n0, o0] = none;
  EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0 &&
              i != i0 && j != j0 && k != k0 && l != l0 && m != m0 && n != n0 && o != o0)
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
                                          .nesterov = true};
  const kernels::OptimizerOptions no_step;
  {
    const auto& [a, b, c, d, e, f, g, h, i, j, k] = step;
    const auto& [a0, b0, c0, d0, e0, f0, g0, h0, i0, j0, k0] = no_step;
    EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0 &&
                i != i0 && j != j0 && k != k0);
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
                                     .max_gradient_error = 7};
  const kernels::LossOptions no_loss;
  {
    const auto& [a, b, c, d, e, f, g, h, i] = loss;
    const auto& [a0, b0, c0, d0, e0, f0, g0, h0, i0] = no_loss;
    EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0 &&
                i != i0);
  }
  EXPECT_EQ(*FromProto(ToProto(loss)), loss);
}

TEST(RankMessagesTest, SumsOfSlices) {
  const kernels::SliceSums sums = {.loss = 1,
                                   .z_loss = 2,
                                   .entropy = 3,
                                   .dropped_mass = 4,
                                   .sampling_variance = 5,
                                   .squared_gradient = 6,
                                   .valid_rows = 7,
                                   .correct_rows = 8};
  const kernels::SliceSums back = FromProto(ToProto(sums));
  const auto& [a, b, c, d, e, f, g, h] = back;
  EXPECT_TRUE(a == 1 && b == 2 && c == 3 && d == 4 && e == 5 && f == 6 && g == 7 && h == 8);
}

}  // namespace
}  // namespace lossd::ranks::messages_test

// ---- Collectives ----

namespace lossd::ranks::collectives_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

}  // namespace
}  // namespace lossd::ranks::collectives_test

// ---- Agreement ----

namespace lossd::ranks::agreement_test {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

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

}  // namespace
}  // namespace lossd::ranks::agreement_test
