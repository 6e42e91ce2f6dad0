// SPDX-License-Identifier: Apache-2.0
// What the engine tells of the chunks it has computed: how, and how their gradients turned out.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/silent_observer.h"

namespace lossd::engine::chunk_reports_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST_F(EngineTest, TellsWhenChunksAreComputedOtherwise) {
  struct Observer : SilentObserver {
    void OnChoices(const ChoicesReport& report) override {
      EXPECT_EQ(report.head, "head");
      seen.push_back(report.choices.front().choice);
    }
    std::vector<std::string> seen;  // read when no chunk is under way
  } observer;
  Start({}, {&observer});
  EXPECT_THAT(engine_->Describe("head")->choices,
              ElementsAre(kernels::Choice{.what = "head", .choice = "fake"}));
  EXPECT_THAT(engine_->Describe("head")->last_chunk_choices, IsEmpty());
  using kernels::Gradients;
  uint64_t id = 0;
  for (Gradients gradients : {Gradients::kAuto, Gradients::kAuto, Gradients::kExact, Gradients::kAuto}) {
    StreamSpec spec = Whole(++id, 2);
    spec.options.gradients = gradients;
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(spec, collector);
    Send(*stream, id, {0, 2});
    ASSERT_TRUE(collector->Wait().ok());
    EXPECT_EQ(engine_->Describe("head")->last_chunk_choices.front().choice, Name(gradients));
  }
  EXPECT_THAT(observer.seen, ElementsAre("auto", "exact", "auto"));
  engine_ = nullptr;  // before the observer
}

TEST_F(EngineTest, TellsHowTheGradientsOfChunksTurnedOut) {
  using kernels::Gradients;
  struct Observer : SilentObserver {
    void OnChunk(const ChunkReport& report) override { seen.push_back(report.gradients); }
    std::vector<Gradients> seen;  // read when no chunk is under way
  } observer;
  Start({}, {&observer});
  uint64_t id = 0;
  device_.on_chunk = [](const kernels::Chunk& chunk) { EXPECT_FALSE(chunk.independent); };
  for (const Gradients gradients : {Gradients::kSampled, Gradients::kExact}) {
    device_.decide = [gradients](const kernels::Chunk&) { return gradients; };
    StreamSpec spec = Whole(++id, 2);
    spec.options.gradients = Gradients::kAuto;
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(spec, collector);
    Send(*stream, id, {0, 2});
    ASSERT_TRUE(collector->Wait().ok());
  }
  EXPECT_THAT(observer.seen, ElementsAre(Gradients::kSampled, Gradients::kExact));
  engine_ = nullptr;  // before the observer
}

}  // namespace
}  // namespace lossd::engine::chunk_reports_test
