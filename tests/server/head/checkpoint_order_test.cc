// SPDX-License-Identifier: Apache-2.0
// Which checkpoint of a head is the newest: the one that was saved last, whatever the clock said, whatever
// its step is, and whatever has been removed meanwhile.
#include <sys/stat.h>
#include <time.h>

#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "server/head/checkpoint_store.h"
#include "server/head/manifest.h"
#include "tests/server/head/checkpoint_fixture.h"

namespace lossd::head::checkpoint_order_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Json = nlohmann::ordered_json;

class CheckpointOrderTest : public CheckpointTest {
 protected:
  CheckpointOrderTest() { subject_.config = {.hidden_size = 2, .vocab_size = 3}; }
  ~CheckpointOrderTest() override { clocks::SetWallClockForTesting(absl::ZeroDuration()); }

  std::string SaveStep(uint64_t step, absl::string_view name = "") {
    subject_.step = step;
    Head head = RandomHead(subject_);
    const auto saved = Save(subject_, head, name);
    EXPECT_TRUE(saved.ok()) << saved.status();
    return saved.ok() ? saved->name : "";
  }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    const auto list = *ListCheckpoints(root_, "lm");
    for (const CheckpointInfo& info : list) names.push_back(info.name.substr(3));
    return names;
  }
  // Has a manifest say something else, with a checksum that fits.
  void Edit(const std::string& name, const std::function<void(Json&)>& edit) {
    const std::string path = root_ + "/lm/" + name + "/manifest.json";
    Json json = Json::parse(test::ReadWholeFile(path));
    json.erase("checksum");
    edit(json);
    const std::string text = json.dump();
    Checksum checksum;
    checksum.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
    json["checksum"] = checksum.Digest();
    test::WriteWholeFile(path, json.dump(2));
  }
  // As a server that does not count saves writes it.
  void MakeOld(const std::string& name, absl::string_view saved_at) {
    Edit(name, [&](Json& json) {
      json.erase("save_number");
      json["saved_at"] = std::string(saved_at);
    });
  }

  CheckpointSubject subject_ = SomeSubject();
};

TEST_F(CheckpointOrderTest, AClockThatIsSetBackChangesNothing) {
  SaveStep(3);
  SaveStep(4);
  clocks::SetWallClockForTesting(-absl::Hours(1));
  SaveStep(5);
  SaveStep(6);
  EXPECT_THAT(Names(),
              ElementsAre("step-0000000006", "step-0000000005", "step-0000000004", "step-0000000003"));
  EXPECT_EQ(ListNewest(root_, "lm", 1, 100)->checkpoints[0].subject.step, 6u);
  EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000006", 2),
              ElementsAre("lm/step-0000000004", "lm/step-0000000003"));
}

// Within one second the times in manifests say nothing, and the step of a branch that was left is larger.
TEST_F(CheckpointOrderTest, AnAbandonedBranchIsNotTheNewest) {
  SaveStep(7);
  SaveStep(9);
  SaveStep(2);
  SaveStep(3);
  EXPECT_THAT(Names(),
              ElementsAre("step-0000000003", "step-0000000002", "step-0000000009", "step-0000000007"));
}

TEST_F(CheckpointOrderTest, TheNumberSurvivesTheRemovalOfAll) {
  SaveStep(1);
  SaveStep(2);
  const uint64_t last = ListCheckpoints(root_, "lm")->front().save_number;
  EXPECT_EQ(last, 2u);
  fs::remove_all(root_ + "/lm/step-0000000001");
  fs::remove_all(root_ + "/lm/step-0000000002");
  SaveStep(1);
  EXPECT_EQ(ListCheckpoints(root_, "lm")->front().save_number, last + 1);
}

// Somebody has removed what lay beside the checkpoints, or copied a checkpoint from elsewhere.
TEST_F(CheckpointOrderTest, ManifestsCountToo) {
  SaveStep(1);
  Edit("step-0000000001", [](Json& json) { json["save_number"] = 40; });
  for (const auto& entry : fs::directory_iterator(root_ + "/lm")) {
    if (entry.is_regular_file()) fs::remove(entry.path());
  }
  SaveStep(2, "mine");
  EXPECT_EQ(ListCheckpoints(root_, "lm")->front().save_number, 41u);
}

TEST_F(CheckpointOrderTest, TheNumbersDoNotEnd) {
  SaveStep(1);
  Edit("step-0000000001", [](Json& json) { json["save_number"] = uint64_t{1} << 53; });
  SaveStep(2);
  EXPECT_EQ(Names().size(), 2u);
  Edit("step-0000000001", [](Json& json) { json["save_number"] = (uint64_t{1} << 53) + 1; });
  const auto list = *ListCheckpoints(root_, "lm");
  EXPECT_EQ(list.back().status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(list.back().status.message()), HasSubstr("save_number is 9007199254740993"));
}

// Those that servers without numbers saved lie where their times say, and among themselves as ever.
TEST_F(CheckpointOrderTest, ManifestsWithoutANumber) {
  for (const char* name : {"a", "b", "c"}) SaveStep(1, name);
  MakeOld("a", "2025-01-01T00:00:01+00:00");
  MakeOld("b", "2025-01-01T00:00:03+00:00");
  MakeOld("c", "2025-01-01T00:00:02+00:00");
  EXPECT_THAT(Names(), ElementsAre("b", "c", "a"));
  SaveStep(1, "d");
  Edit("d", [](Json& json) { json["saved_at"] = "2025-01-01T00:00:02+00:00"; });
  EXPECT_THAT(Names(), ElementsAre("b", "c", "d", "a"));
  SaveStep(1, "e");  // now
  EXPECT_THAT(Names(), ElementsAre("e", "b", "c", "d", "a"));
  EXPECT_TRUE(CheckpointReader::Open(root_, "lm/a").ok());
}

TEST_F(CheckpointOrderTest, StepsBeyondAllCountingAreRefused) {
  SaveStep(1);
  Edit("step-0000000001", [](Json& json) { json["step"] = ~uint64_t{0}; });
  const absl::Status status = CheckpointReader::Open(root_, "lm/step-0000000001").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("step is 18446744073709551615, which is no whole number from 0 to 9007199254740992"));
}

// ---- What is known of manifests ----

class CheckpointInfosTest : public CheckpointOrderTest {
 protected:
  // As if its last change were some time ago.
  static void Settle() { clocks::SetWallClockForTesting(absl::Minutes(1)); }
};

TEST_F(CheckpointInfosTest, AManifestIsReadOnce) {
  for (uint64_t step = 1; step <= 5; ++step) SaveStep(step);
  Settle();
  ASSERT_EQ(ListCheckpoints(root_, "lm")->size(), 5u);
  const int64_t read = ManifestsReadForTesting();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(ListCheckpoints(root_, "")->size(), 5u);
  EXPECT_EQ(ManifestsReadForTesting(), read);
}

TEST_F(CheckpointInfosTest, AChangeIsSeen) {
  SaveStep(1);
  Settle();
  EXPECT_EQ(ListCheckpoints(root_, "lm")->front().subject.step, 1u);
  Edit("step-0000000001", [](Json& json) { json["step"] = 2; });
  EXPECT_EQ(ListCheckpoints(root_, "lm")->front().subject.step, 2u);
  fs::remove_all(root_ + "/lm/step-0000000001");
  EXPECT_TRUE(ListCheckpoints(root_, "lm")->empty());
}

// What was written a moment ago may be written again without a trace in its times.
TEST_F(CheckpointInfosTest, WhatIsYoungIsReadAgain) {
  SaveStep(1);
  ListCheckpoints(root_, "lm").IgnoreError();
  const int64_t read = ManifestsReadForTesting();
  ListCheckpoints(root_, "lm").IgnoreError();
  EXPECT_EQ(ManifestsReadForTesting(), read + 1);
}

TEST_F(CheckpointInfosTest, ADamagedOneIsReadOnceToo) {
  SaveStep(1);
  test::WriteWholeFile(root_ + "/lm/step-0000000001/manifest.json", "{}");
  Settle();
  EXPECT_FALSE(ListCheckpoints(root_, "lm")->front().status.ok());
  const int64_t read = ManifestsReadForTesting();
  EXPECT_FALSE(ListCheckpoints(root_, "lm")->front().status.ok());
  EXPECT_EQ(ManifestsReadForTesting(), read);
}

// ---- Values that are not finite ----

TEST_F(CheckpointOrderTest, SaysHowManyValuesAreNotFinite) {
  subject_.step = 1;
  Head head = RandomHead(subject_);
  auto& weight =
      static_cast<MemoryKernels&>(head.kernels()).tensor({kernels::Param::kWeight, kernels::Role::kValue});
  for (const auto& [id, values] : static_cast<MemoryKernels&>(head.kernels()).tensors()) {
    auto& all = static_cast<MemoryKernels&>(head.kernels()).tensor({id.first, id.second});
    std::fill(all.begin(), all.end(), 1.0f);
  }
  EXPECT_EQ(Save(subject_, head, "finite")->not_finite, 0);
  weight[0] = std::numeric_limits<float>::infinity();
  weight[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(Save(subject_, head, "not")->not_finite, 2);
}

}  // namespace
}  // namespace lossd::head::checkpoint_order_test
