// SPDX-License-Identifier: Apache-2.0
// What the engine refuses, and that nothing else changes: bad slices, bad streams, rows that are not finite,
// what is over a limit.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "server/engine/engine.h"
#include "server/engine/errors.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::refusals_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

using RefusalsTest = EngineTest;

TEST_F(RefusalsTest, BadSlicesFailTheirStreamAndNothingElse) {
  Start();
  struct Case {
    RowRange rows;
    int64_t extra_bytes;
    const char* message;
  };
  const std::vector<Case> cases = {{{3, 3}, 0, "slice.rows"}, {{4, 9}, 0, "slice.rows"},
                                   {{2, 1}, 0, "slice.rows"}, {{-1, 2}, 0, "slice.rows"},
                                   {{0, 2}, 4, "payload"},    {{0, 2}, -4, "payload"}};
  uint64_t id = 1;
  for (const Case& bad : cases) {
    SCOPED_TRACE(absl::StrCat(bad.rows.begin, " ", bad.rows.end, " ", bad.extra_bytes));
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Whole(++id, 8), collector);
    Send(*stream, id, bad.rows, bad.extra_bytes);
    EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(collector->Wait().message()), HasSubstr(bad.message));
    EXPECT_TRUE(errors::GetFieldViolation(collector->Wait()).has_value());
  }
  auto repeated = std::make_shared<RowCollector>();
  auto stream = Open(Whole(100, 8), repeated);
  Send(*stream, 100, {0, 2});
  Send(*stream, 100, {1, 3});
  EXPECT_EQ(repeated->Wait().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(repeated->Wait().message()), HasSubstr("repeats row 1"));

  auto early = std::make_shared<RowCollector>();
  auto short_stream = Open(Whole(101, 8), early);
  short_stream->HalfClose();
  EXPECT_EQ(early->Wait().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(early->Wait().message()), HasSubstr("row 0"));

  auto middle = std::make_shared<RowCollector>();
  StreamSpec with_ignored = Whole(103, 8);
  with_ignored.targets[2] = with_ignored.ignore_index;
  auto cut_stream = Open(with_ignored, middle);
  Send(*cut_stream, 103, {0, 2});
  Send(*cut_stream, 103, {4, 8});
  cut_stream->HalfClose();
  EXPECT_THAT(std::string(middle->Wait().message()), HasSubstr("nothing for row 3"))
      << "rows 0 and 1 were sent, and row 2 has no target";

  auto good = std::make_shared<RowCollector>();
  auto next = Open(Whole(102, 2), good);
  Send(*next, 102, {0, 2});
  EXPECT_TRUE(good->Wait().ok());
}

TEST_F(RefusalsTest, BadSpecsAreRefusedAndChangeNothing) {
  Start();
  const auto code_of = [this](auto change) {
    StreamSpec spec = Whole(1, 4);
    change(spec);
    return engine_->Open(spec, std::make_shared<RowCollector>()).status();
  };
  const auto expect = [&](const char* text, absl::StatusCode code, auto change) {
    const absl::Status status = code_of(change);
    EXPECT_EQ(status.code(), code) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  using enum absl::StatusCode;
  expect("open.head must name a head of this server, got x", kNotFound, [](StreamSpec& s) { s.head = "x"; });
  expect("open.targets[2]", kInvalidArgument, [](StreamSpec& s) { s.targets[2] = 10; });
  expect("open.targets[0]", kInvalidArgument, [](StreamSpec& s) { s.targets[0] = -1; });
  expect("open.targets", kInvalidArgument, [](StreamSpec& s) { s.targets.pop_back(); });
  expect("open.row_weights", kInvalidArgument, [](StreamSpec& s) { s.row_weights = {1.0f}; });
  expect("open.row_weights[1]", kInvalidArgument, [](StreamSpec& s) { s.row_weights = {1, NAN, 1, 1}; });
  expect("open.rows", kInvalidArgument, [](StreamSpec& s) { s.rows = {0, 5}; });
  expect("open.rows", kInvalidArgument, [](StreamSpec& s) { s.rows = {3, 2}; });
  expect("open.microbatch_rows", kInvalidArgument, [](StreamSpec& s) { s.microbatch_rows = -1; });
  expect("open.grad_output", kInvalidArgument, [](StreamSpec& s) { s.grad_output = INFINITY; });
  expect("open.options.label_smoothing", kInvalidArgument,
         [](StreamSpec& s) { s.options.label_smoothing = 1.5f; });
  expect("open.options.use_class_weights", kInvalidArgument,
         [](StreamSpec& s) { s.options.use_class_weights = true; });
  expect("open.normalizer", kInvalidArgument, [](StreamSpec& s) { s.normalizer = 3.0; });
  expect("open.normalizer", kInvalidArgument, [](StreamSpec& s) {
    s.reduction = Reduction::kMean;
    s.normalizer = 0.0;
  });
  expect("open.normalizer", kInvalidArgument, [](StreamSpec& s) {
    s.reduction = Reduction::kMean;
    s.microbatch_rows = 9;
  });
  expect("open.step", kInvalidArgument, [](StreamSpec& s) { s.step.reset(); });
  expect("open.step", kFailedPrecondition, [](StreamSpec& s) { s.step = 1; });
  EXPECT_EQ(engine_->stats().open_streams, 0);
  EXPECT_EQ(engine_->stats().ledger_rows, 0);
}

TEST_F(RefusalsTest, FrozenHeadsRefuseAccumulation) {
  Start();
  AddHead("frozen", false);
  StreamSpec spec = Whole(1, 2);
  spec.head = "frozen";
  EXPECT_EQ(engine_->Open(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  spec.accumulate_gradients = false;
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(spec, collector);
  Send(*stream, 1, {0, 2});
  EXPECT_TRUE(collector->Wait().ok());
  EXPECT_THAT(device_.accumulated(), IsEmpty());
}

TEST_F(RefusalsTest, ANonFiniteRowFailsItsSliceOnly) {
  Start();
  auto bad = std::make_shared<RowCollector>();
  auto good = std::make_shared<RowCollector>();
  auto bad_stream = Open(Whole(1, 4), bad);
  auto good_stream = Open(Whole(2, 4), good);
  device_.Close();
  Send(*good_stream, 2, {0, 2});
  Send(*bad_stream, 1, {2, 4}, 0, NAN);
  Send(*good_stream, 2, {2, 4});
  device_.Open();
  EXPECT_EQ(bad->Wait().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(bad->Wait().message()), HasSubstr("row 2"));
  EXPECT_TRUE(good->Wait().ok());
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(2, {0, 4})));
  const absl::Status missing = engine_->ApplyStep("head", {.expected_microbatches = {1, 2}}).status();
  EXPECT_FALSE(missing.ok());
  EXPECT_THAT(GetMissing(missing), ElementsAre("microbatch 1: never opened"));
}

TEST_F(RefusalsTest, LimitsAreEnforced) {
  Start({.max_streams = 2, .max_heads = 2, .max_ledger_rows = 10});
  auto a = Open(Whole(1, 6), std::make_shared<RowCollector>());
  EXPECT_EQ(engine_->Open(Whole(2, 6), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kResourceExhausted);  // ledger rows
  auto b = Open(Whole(2, 4), std::make_shared<RowCollector>());
  EXPECT_EQ(engine_->Open(Whole(3, 0), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kResourceExhausted);  // streams
  AddHead("second");
  const kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = 10};
  EXPECT_EQ(engine_->CreateHead("third", config).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->CreateHead("head", config).code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(RefusalsTest, MicrobatchesOfAStepAreBoundedEvenWithoutRows) {
  Start({.max_step_microbatches = 2});
  for (uint64_t id : {1, 2}) EXPECT_NE(Open(Whole(id, 0), std::make_shared<RowCollector>()), nullptr);
  const absl::Status full = engine_->Open(Whole(3, 0), std::make_shared<RowCollector>()).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(errors::GetFieldViolation(full).value_or(errors::FieldViolation()).field, "open.microbatch_id");
  EXPECT_NE(Open(Whole(2, 0), std::make_shared<RowCollector>()), nullptr) << "it is known";
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  EXPECT_NE(Open(Whole(3, 0, 1), std::make_shared<RowCollector>()), nullptr);
}

}  // namespace
}  // namespace lossd::engine::refusals_test
