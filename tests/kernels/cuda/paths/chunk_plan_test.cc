// SPDX-License-Identifier: Apache-2.0
// Tests of chunk_plan.h: the plan of a chunk, and its layout in memory.
#include "kernels/cuda/paths/chunk_plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/decision.h"

// ---- Chunk plan ----

namespace lossd::kernels::cuda::chunk_plan_test {
namespace {

using ::testing::_;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;

constexpr DeviceLimits kHopper = {.has_clusters = true, .fused_clusters = 66, .has_branches = true};

// A chunk of 8192 rows of (4096, 128256) in bf16, and what is done with it.
struct Case {
  LossOptions options;
  ChunkFacts chunk = {{.vocab = 128256}, 8192, 8192, true};
  PlanLimits limits = {
      .filter = {.chunk_rows = 8192, .vocab = 128256, .padded_vocab = 128256, .padded_hidden = 4096},
      .device = kHopper};

  ChunkPlan Plan() const { return PlanChunk(options, chunk, limits); }
  void SetRows(int64_t rows) { chunk.rows = chunk.padded_rows = rows; }
};

TEST(ChunkPlan, ExactLossesOfLargeChunksAreFused) {
  const ChunkPlan plan = Case().Plan();
  EXPECT_EQ(plan.gradients, Gradients::kExact);
  EXPECT_EQ(plan.why_exact, "exact was asked for");
  EXPECT_TRUE(plan.fused());
}

TEST(ChunkPlan, FilteredChunksNeedTheirLogits) {
  Case c;
  c.options.gradients = Gradients::kFiltered;
  const ChunkPlan plan = c.Plan();
  EXPECT_EQ(plan.gradients, Gradients::kFiltered);
  EXPECT_EQ(plan.why_exact, "");
  EXPECT_THAT(plan.why_not_fused, HasSubstr("logits"));
}

// They are selected from exponentials in memory or, where there are none in the order of the logits, from
// logits in memory, whatever the gradients are.
TEST(ChunkPlan, ChunksThatSelectTopClassesAreFusedWhereExponentialsAreInOrder) {
  for (Gradients gradients : {Gradients::kExact, Gradients::kSampled, Gradients::kAuto}) {
    Case stored;
    stored.options.gradients = gradients;
    stored.chunk.selects_top = true;
    EXPECT_TRUE(stored.Plan().fused());
    EXPECT_EQ(stored.Plan().gradients, gradients);
    Case recomputed = stored, capped = stored, split = stored;
    recomputed.limits.logits = Logits::kRecomputed;
    capped.chunk.terms.softcap = 30.0f;
    split.limits.split = true;
    for (Case& c : {std::ref(recomputed), std::ref(capped), std::ref(split)}) {
      EXPECT_EQ(c.Plan().gradients, gradients);
      EXPECT_EQ(c.Plan().why_not_fused, "the most probable classes are selected from the logits");
      c.chunk.selects_top = false;
      EXPECT_TRUE(c.Plan().fused());
    }
  }
}

TEST(ChunkPlan, ExponentialsOfSelectedClassesHaveNoRoomInFp16) {
  Case c;
  c.limits.filter.dtype = DType::kFloat16;
  c.chunk.wants_gradient = false;
  EXPECT_TRUE(c.Plan().fused());
  c.chunk.selects_top = true;
  EXPECT_EQ(c.Plan().why_not_fused, "fp16 has no room for exponentials");
}

TEST(ChunkPlan, SampledChunksAreFusedAsExactOnesAre) {
  Case c;
  for (Gradients gradients : {Gradients::kSampled, Gradients::kAuto}) {
    c.options.gradients = gradients;
    EXPECT_EQ(c.Plan().gradients, gradients);
    EXPECT_TRUE(c.Plan().sampled());
    EXPECT_FALSE(c.Plan().filtered());
    EXPECT_TRUE(c.Plan().fused());
    EXPECT_TRUE(c.Plan().own_gemms());
  }
}

TEST(ChunkPlan, TheUniformPartIsApartWhereItHasAClosedForm) {
  Case c;
  c.options.label_smoothing = 0.1f;
  for (Gradients gradients :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    c.options.gradients = gradients;
    EXPECT_EQ(c.Plan().uniform_apart, gradients == Gradients::kSampled);
  }
  c.options.gradients = Gradients::kSampled;
  c.options.softcap = 5.0f;
  EXPECT_FALSE(c.Plan().uniform_apart);
  EXPECT_TRUE(c.Plan().sampled());
}

// Candidates are listed by the pass that computes the loss.
TEST(ChunkPlan, FilteredChunksOfRecomputedLogitsAreFused) {
  Case c;
  c.limits.logits = Logits::kRecomputed;
  for (Gradients gradients : {Gradients::kExact, Gradients::kFiltered}) {
    c.options.gradients = gradients;
    const ChunkPlan plan = c.Plan();
    EXPECT_EQ(plan.gradients, gradients);
    EXPECT_EQ(plan.filtered(), gradients == Gradients::kFiltered);
    EXPECT_TRUE(plan.fused()) << plan.why_not_fused;
    EXPECT_FALSE(plan.own_gemms());
    EXPECT_EQ(Describe(plan).front().choice, Name(gradients));
  }
}

// All parts of a head that is split plan alike, whatever classes they have.
TEST(ChunkPlan, PartsOfAHeadPlanAlike) {
  Case c;
  c.limits.split = true;
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    c.limits.logits = logits;
    for (Gradients gradients :
         {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
      c.options.gradients = gradients;
      const ChunkPlan plan = c.Plan();
      EXPECT_EQ(plan.gradients, gradients) << plan.why_exact;
      EXPECT_EQ(plan.filters_elements, gradients == Gradients::kFiltered);
      EXPECT_EQ(plan.fused(), gradients != Gradients::kFiltered) << "elements are filtered unfused";
    }
  }
  c.options = {.label_smoothing = 0.1f, .gradients = Gradients::kFiltered};
  c.limits.logits = Logits::kStored;
  EXPECT_FALSE(c.Plan().uniform_apart) << "the matrix may have to be multiplied";
  c.limits.logits = Logits::kRecomputed;
  EXPECT_TRUE(c.Plan().uniform_apart);
  // Of two classes each of two devices has one.
  c.chunk.terms.vocab = c.chunk.terms.elsewhere = 1;
  c.options.gradients = Gradients::kSampled;
  EXPECT_EQ(c.Plan().gradients, Gradients::kSampled);
  c.chunk.terms.elsewhere = 0;
  EXPECT_EQ(c.Plan().why_exact, "one class has no gradient");
}

TEST(ChunkPlan, WhatCannotBeFilteredMayBeFused) {
  Case c;
  c.options.gradients = Gradients::kFiltered;
  c.chunk.wants_gradient = false;
  EXPECT_EQ(c.Plan().why_exact, "no gradient is wanted");
  EXPECT_TRUE(c.Plan().fused());
  c.chunk.wants_gradient = true;
  c.limits.device.has_branches = false;
  EXPECT_THAT(c.Plan().why_exact, HasSubstr("driver"));
  EXPECT_TRUE(c.Plan().fused());
  c.limits.device.has_branches = true;
  c.chunk.terms.any_coef_entropy = true;
  EXPECT_THAT(c.Plan().why_exact, HasSubstr("entropy"));
  EXPECT_TRUE(c.Plan().fused());
}

TEST(ChunkPlan, RowsWithATeacherAreNotFused) {
  Case c;
  EXPECT_TRUE(c.Plan().fused());
  c.chunk.distilled = true;
  EXPECT_FALSE(c.Plan().fused());
  EXPECT_TRUE(c.Plan().exact());
  EXPECT_THAT(c.Plan().why_not_fused, HasSubstr("teacher"));
}

TEST(ChunkPlan, LogitsOfAForwardDivergenceAloneAreReadOnce) {
  Case c;
  c.options.distillation = {.divergence = Divergence::kForwardKl, .target_weight = 0.0f};
  EXPECT_THAT(c.Plan().why_logits_twice, HasSubstr("teacher"));
  c.chunk.distilled = true;
  EXPECT_EQ(c.Plan().why_logits_twice, "");
  c.limits.logits = Logits::kRecomputed;
  EXPECT_THAT(c.Plan().why_logits_twice, HasSubstr("recomputed"));
  c.limits.logits = Logits::kStored;
  c.limits.split = true;
  EXPECT_THAT(c.Plan().why_logits_twice, HasSubstr("other devices"));
  c.limits.split = false;
  c.chunk.selects_top = true;
  EXPECT_THAT(c.Plan().why_logits_twice, HasSubstr("most probable classes"));
  c.chunk.selects_top = false;
  c.options.distillation.target_weight = 0.5f;
  EXPECT_THAT(c.Plan().why_logits_twice, HasSubstr("targets"));
  c.options.distillation = {.divergence = Divergence::kReverseKl, .target_weight = 0.0f};
  EXPECT_THAT(c.Plan().why_logits_twice, HasSubstr("divergence"));
  c.options.distillation.divergence = Divergence::kForwardKl;
  c.SetRows(64);
  EXPECT_EQ(c.Plan().why_logits_twice, "few rows");
  c.limits.fused_loss = FusedLoss::kWherePossible;
  EXPECT_EQ(c.Plan().why_logits_twice, "");
  c.limits.device.fused_clusters = 0;
  EXPECT_THAT(c.Plan().why_logits_twice, HasSubstr("Hopper"));
  c.limits.fused_loss = FusedLoss::kNever;
  EXPECT_EQ(c.Plan().why_logits_twice, "switched off");
}

TEST(ChunkPlan, OfRowsWithATeacherAllOfTheGradientIsSampled) {
  Case c;
  c.options.gradients = Gradients::kSampled;
  c.options.label_smoothing = 0.1f;
  EXPECT_TRUE(c.Plan().uniform_apart);
  c.chunk.distilled = true;
  EXPECT_TRUE(c.Plan().sampled());
  EXPECT_FALSE(c.Plan().uniform_apart);
}

TEST(ChunkPlan, RowsWithSoftTargetsAreNotFusedAndListedWhereFiltered) {
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    Case c;
    c.limits.logits = logits;
    c.options.rest = Rest::kNone;
    c.chunk.terms.soft = true;
    EXPECT_FALSE(c.Plan().fused());
    EXPECT_THAT(c.Plan().why_not_fused, HasSubstr("rows name"));
    c.options.gradients = Gradients::kFiltered;
    EXPECT_TRUE(c.Plan().filtered() && c.Plan().filters_elements);
    c.options.rest = Rest::kOneClass;
    EXPECT_TRUE(c.Plan().exact());
    EXPECT_FALSE(c.Plan().filters_elements);
    EXPECT_THAT(c.Plan().why_exact, HasSubstr("rest of a row's targets"));
    c.options.gradients = Gradients::kSampled;
    EXPECT_TRUE(c.Plan().sampled());
  }
}

TEST(ChunkPlan, GradientsOfEntropiesAreFused) {
  Case c;
  c.chunk.terms.any_coef_entropy = true;
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    for (const Gradients gradients :
         {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
      c.limits.logits = logits;
      c.options.gradients = gradients;
      EXPECT_TRUE(c.Plan().fused()) << c.Plan().why_not_fused;
      EXPECT_EQ(c.Plan().own_gemms(), logits == Logits::kStored);
    }
  }
  c.limits.logits = Logits::kStored;
  c.limits.filter.dtype = DType::kFloat16;
  EXPECT_THAT(c.Plan().why_not_fused, HasSubstr("fp16"));
}

TEST(ChunkPlan, TheOptionOfTheBackendDecidesWhereSizeWould) {
  Case c;
  c.limits.fused_loss = FusedLoss::kNever;
  EXPECT_EQ(c.Plan().why_not_fused, "switched off");
  c.limits.fused_loss = FusedLoss::kWherePossible;
  c.SetRows(8);
  EXPECT_TRUE(c.Plan().fused());
  c.limits.fused_loss = FusedLoss::kWhereFaster;
  EXPECT_EQ(c.Plan().why_not_fused, "few rows");
  c.limits.device.fused_clusters = 0;
  c.limits.fused_loss = FusedLoss::kWherePossible;
  EXPECT_THAT(c.Plan().why_not_fused, HasSubstr("Hopper"));
}

TEST(ChunkPlan, GradientsAreOwnProductsWhereTheyAreFaster) {
  Case c;
  EXPECT_TRUE(c.Plan().own_gemms());
  c.SetRows(760);
  EXPECT_FALSE(c.Plan().own_gemms());
  c.SetRows(2048);
  c.limits.device.fused_clusters = 0;
  EXPECT_THAT(c.Plan().why_library_gemms, HasSubstr("Hopper"));
}

TEST(ChunkPlan, TheOptionOfTheBackendHoldsForProductsToo) {
  Case c;
  c.limits.fused_loss = FusedLoss::kNever;
  EXPECT_EQ(c.Plan().why_library_gemms, "switched off");
  c.limits.fused_loss = FusedLoss::kWherePossible;
  EXPECT_TRUE(c.Plan().own_gemms());
  c.chunk.wants_gradient = false;
  EXPECT_EQ(c.Plan().why_library_gemms, "no gradient is wanted");
}

TEST(ChunkPlan, DescribesWhatItChose) {
  Case c;
  EXPECT_THAT(Describe(c.Plan()),
              ElementsAre(Choice{.what = "gradients", .choice = "exact", .reason = "exact was asked for"},
                          Choice{.what = "loss", .choice = "in the logits product"},
                          Choice{.what = "hidden gradient", .choice = "own product"},
                          Choice{.what = "weight gradient", .choice = "own product"}));
  c.options.gradients = Gradients::kFiltered;
  EXPECT_THAT(Describe(c.Plan()), ElementsAre(Field(&Choice::choice, "filtered"),
                                              Field(&Choice::choice, "after the logits product"), _, _));
  for (const Choice& choice : Describe(c.Plan())) {
    EXPECT_EQ(choice.reason.empty(), choice.choice == "own product") << choice.what;
  }
}

TEST(ChunkPlan, DescribesTheNormIfThereIsOne) {
  ChunkPlan plan = Case().Plan();
  plan.norm = NormPlan{NormRows::kRegisters, ""};
  const Choice forward = {.what = "norm", .choice = "rows in registers"};
  EXPECT_THAT(Describe(plan), ElementsAre(_, _, _, _, forward));
  plan.norm_gradient = NormPlan{NormRows::kWarpCopies, "short rows"};
  EXPECT_THAT(Describe(plan), ElementsAre(_, _, _, _, forward,
                                          Choice{"norm gradient", "rows by copies of warps", "short rows"}));
}

}  // namespace
}  // namespace lossd::kernels::cuda::chunk_plan_test

// ---- Chunk layout ----

namespace lossd::kernels::cuda::chunk_layout_test {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kCapacity = 64;

// Host blocks of a chunk of up to kCapacity rows.
struct Blocks {
  std::vector<uint8_t> in = std::vector<uint8_t>(static_cast<size_t>(InputBlockBytes(kCapacity)) + 256);
  std::vector<uint8_t> out = std::vector<uint8_t>(static_cast<size_t>(OutputBlockBytes(kCapacity)) + 256);
  RowInputBlock inputs;
  RowOutputBlock outputs;
  Blocks() {
    Carver in_carver(in.data()), out_carver(out.data());
    inputs = RowInputBlock::Carve(in_carver, kCapacity);
    outputs = RowOutputBlock::Carve(out_carver, kCapacity);
  }
};

LayoutHead Head(DType compute) {
  LayoutHead head;
  head.config.hidden_size = 4;
  head.config.vocab_size = 10;
  head.compute_dtype = compute;
  head.chunk_rows = kCapacity;
  return head;
}

TEST(ChunkLayout, APartOfAHeadHasRandomNumbersOfItsOwn) {
  Blocks blocks;
  const std::vector<int32_t> targets = {3, kIgnoredTarget, 5};
  Slice slice;
  slice.rows = 3;
  slice.targets = targets.data();
  slice.sample_seed = 11;
  slice.first_row = 40;
  Chunk chunk;
  chunk.slices = absl::MakeSpan(&slice, 1);
  chunk.options.gradients = Gradients::kSampled;
  for (const int64_t first_class : {0, 5}) {
    LayoutHead head = Head(DType::kBFloat16);
    head.first_class = first_class;
    LayOutChunk(head, chunk, blocks.inputs);
    EXPECT_EQ(blocks.inputs.omega[0], SampleOf(11, 40, static_cast<uint64_t>(first_class)));
    EXPECT_EQ(blocks.inputs.omega[1], SampleOf(11, 42, static_cast<uint64_t>(first_class)));
  }
}

// Rows of gradients of an embedding, and the order in which a device adds them up.
void ExpectOrderedByClass(int64_t vocab, int64_t first_class, int64_t classes, int64_t rows,
                          std::mt19937_64& rng) {
  std::vector<uint8_t> memory(static_cast<size_t>(InputBlockBytes(rows)) + 256);
  Carver carver(memory.data());
  const RowInputBlock inputs = RowInputBlock::Carve(carver, rows);
  // About half of the rows in 40 classes, some rows of no class, some that are not accumulated.
  std::vector<int32_t> targets;
  std::vector<uint8_t> accumulate;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t most = rng() % 2 == 0 ? std::min<int64_t>(vocab, 40) : vocab;
    const auto id = static_cast<int32_t>(rng() % static_cast<uint64_t>(most));
    targets.push_back(rng() % 5 == 0 ? kIgnoredTarget : id);
    accumulate.push_back(rng() % 4 == 0 ? 0 : 1);
  }
  Slice slice = {
      .rows = rows, .targets = targets.data(), .accumulate = accumulate.data(), .grad_scale = 0.3f};
  Chunk chunk;
  chunk.options.embedding = Embedding::kGradients;
  chunk.slices = absl::MakeSpan(&slice, 1);
  LayoutHead head;
  head.config.vocab_size = vocab;
  head.chunk_rows = rows;
  head.first_class = first_class;
  const ChunkLayout layout = LayOutChunk(head, chunk, inputs);
  EXPECT_EQ(layout.unit, 1.0f);
  if (layout.compact_rows > 0) {
    EXPECT_EQ(inputs.coef_loss[layout.compact_rows - 1], 0.3f);
  }

  std::map<int32_t, std::vector<int32_t>> want;  // compact rows by class
  for (int32_t row = 0; row < layout.compact_rows; ++row) {
    const int32_t place = inputs.target[row];
    EXPECT_EQ(place, targets[static_cast<size_t>(inputs.raw_of_compact[row])] - first_class);
    if (inputs.accumulate[row] != 0 && place >= 0 && place < classes) want[place].push_back(row);
  }
  const ClassRuns runs = OrderByClass(layout, classes, inputs);
  EXPECT_EQ(runs.runs, static_cast<int64_t>(want.size()));
  int64_t rows_of_runs = 0;
  for (int64_t run = 0; run < runs.runs; ++run) {
    const int32_t* const begin = inputs.row_order() + inputs.run_begin()[run];
    const std::vector<int32_t> got(begin, begin + inputs.run_rows()[run]);
    EXPECT_EQ(got, want[inputs.target[got.front()]]);
    EXPECT_EQ(got.size() >= static_cast<size_t>(kLongClassRun), run < runs.long_runs);
    rows_of_runs += static_cast<int64_t>(got.size());
    const bool first_of_kind = run == 0 || run == runs.long_runs;
    if (first_of_kind) continue;
    EXPECT_GT(inputs.target[got.front()], inputs.target[inputs.row_order()[inputs.run_begin()[run - 1]]]);
  }
  EXPECT_EQ(rows_of_runs, runs.rows);
}

TEST(ChunkLayout, RowsOfAnEmbeddingAreOrderedByClass) {
  std::mt19937_64 rng(std::random_device{}());
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (const int64_t vocab :
       {int64_t{1}, int64_t{7}, int64_t{2048}, int64_t{2049}, int64_t{256'000}, kMost}) {
    for (const int64_t rows : {int64_t{1}, int64_t{9}, int64_t{3000}}) {
      ExpectOrderedByClass(vocab, 0, vocab, rows, rng);
      ExpectOrderedByClass(vocab, vocab / 3, vocab / 2, rows, rng);
      ExpectOrderedByClass(vocab, vocab / 3, 0, rows, rng);
    }
  }
}

// Three slices; some rows have no target, and in the second slice none has one.
struct SlicesWithoutSomeTargets {
  const std::vector<int32_t> targets[3] = {{3, kIgnoredTarget, 5}, {kIgnoredTarget}, {kIgnoredTarget, 9}};
  Slice slices[3];

  SlicesWithoutSomeTargets() {
    for (int i = 0; i < 3; ++i) {
      slices[i].rows = static_cast<int64_t>(targets[i].size());
      slices[i].targets = targets[i].data();
    }
  }
};

// The bad rows of gradients are those of their slices; other results there are none.
TEST(ChunkLayout, RowsOfAnEmbeddingHaveNoResults) {
  Blocks blocks;
  SlicesWithoutSomeTargets slices;
  Chunk chunk;
  chunk.slices = absl::MakeSpan(slices.slices);
  for (const Embedding embedding : {Embedding::kGradients, Embedding::kRows}) {
    chunk.options.embedding = embedding;
    const ChunkLayout layout = LayOutChunk(Head(DType::kBFloat16), chunk, blocks.inputs);
    blocks.outputs.first_bad[0] = -1;
    blocks.outputs.first_bad[1] = 2;
    UnpackResults(chunk, layout, blocks.inputs, blocks.outputs);
    EXPECT_EQ(slices.slices[0].sums.valid_rows, 2);
    EXPECT_EQ(slices.slices[1].sums.valid_rows, 0);
    EXPECT_EQ(slices.slices[2].sums.valid_rows, 1);
    EXPECT_EQ(slices.slices[0].first_nonfinite_row, -1);
    EXPECT_EQ(slices.slices[1].first_nonfinite_row, -1);
    EXPECT_EQ(slices.slices[2].first_nonfinite_row, embedding == Embedding::kGradients ? 1 : -1);
  }
}

TEST(ChunkLayout, LeavesOutRowsWithoutTarget) {
  Blocks blocks;
  SlicesWithoutSomeTargets slices;
  Chunk chunk;
  chunk.slices = absl::MakeSpan(slices.slices);
  const ChunkLayout layout = LayOutChunk(Head(DType::kBFloat16), chunk, blocks.inputs);
  EXPECT_EQ(layout.raw_rows, 6);
  EXPECT_EQ(layout.compact_rows, 3);
  EXPECT_EQ(layout.padded_rows, 8);
  EXPECT_EQ(layout.device_slices, 2);
  const auto ints = [](const int32_t* p, size_t n) { return std::vector<int32_t>(p, p + n); };
  EXPECT_THAT(ints(blocks.inputs.compact_of_raw, 6), ElementsAre(0, -1, 1, -1, -1, 2));
  EXPECT_THAT(ints(blocks.inputs.raw_of_compact, 3), ElementsAre(0, 2, 5));
  EXPECT_THAT(ints(blocks.inputs.target, 3), ElementsAre(3, 5, 9));
  EXPECT_THAT(ints(blocks.inputs.slice_begin, 3), ElementsAre(0, 2, 3));
}

// Rows that stand in for others keep their places and their part in the unit, and nothing else.
TEST(ChunkLayout, RowsThatStandInHaveNoGradient) {
  Blocks blocks;
  const std::vector<int32_t> targets = {1, 2};
  const std::vector<uint8_t> accumulate = {0, 0};
  float hidden_gradient[8] = {};
  Slice slices[2];
  for (Slice& slice : slices) {
    slice.rows = 2;
    slice.targets = targets.data();
    slice.accumulate = accumulate.data();
    slice.grad_hidden = hidden_gradient;
  }
  slices[0].grad_scale = 1024.0f;
  slices[0].stands_in = true;
  Chunk chunk;
  chunk.slices = absl::MakeSpan(slices);
  const ChunkLayout layout = LayOutChunk(Head(DType::kBFloat16), chunk, blocks.inputs);
  EXPECT_EQ(layout.compact_rows, 4);
  EXPECT_EQ(layout.unit, 1024.0f);
  EXPECT_TRUE(layout.want_hidden_gradient);
  EXPECT_THAT(std::vector<int32_t>(blocks.inputs.with_gradient, blocks.inputs.with_gradient + 4),
              ElementsAre(0, 0, 1, 1));
}

// Of weight 0, and of these the one whose lse has a gradient is not absent.
TEST(ChunkLayout, AbsentRowsHaveResultsAndNoGradient) {
  Blocks blocks;
  const std::vector<int32_t> targets = {1, kIgnoredTarget, 2, 3, 4};
  const std::vector<float> weights = {0.0f, 0.0f, 0.0f, 1.0f, 0.0f},
                           grad_lse = {0.0f, 0.0f, 0.5f, 0.0f, 0.0f};
  std::vector<float> loss(5), lse(5), entropy(5), logprob(5), gradient(20);
  std::vector<int32_t> argmax(5);
  Slice slice;
  slice.rows = 5;
  slice.targets = targets.data();
  slice.row_weights = weights.data();
  slice.grad_lse = grad_lse.data();
  slice.grad_hidden = gradient.data();
  slice.grad_scale = 3.0f;
  slice.out = {loss.data(), lse.data(), entropy.data(), logprob.data(), argmax.data()};
  Chunk chunk;
  chunk.slices = absl::MakeSpan(&slice, 1);
  const ChunkLayout layout = LayOutChunk(Head(DType::kFloat32), chunk, blocks.inputs);
  EXPECT_EQ(layout.compact_rows, 4);
  EXPECT_EQ(layout.absent_rows, 2);
  EXPECT_EQ(layout.slices[0].absent_rows, 2);
  EXPECT_TRUE(layout.accumulate);
  EXPECT_TRUE(layout.accumulate_all);
  const auto first = [](const auto* p, size_t n) { return std::vector(p, p + n); };
  EXPECT_THAT(first(blocks.inputs.compact_of_raw, 5), ElementsAre(0, -1, 1, 2, 3));
  EXPECT_THAT(first(blocks.inputs.gradient_of_raw, 5), ElementsAre(-1, -1, 1, 2, -1));
  EXPECT_THAT(first(blocks.inputs.accumulate, 4), ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(first(blocks.inputs.with_gradient, 4), ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(first(blocks.inputs.checks, 4), ElementsAre(RowCheck::kNothing, RowCheck::kHiddenGradient,
                                                          RowCheck::kHiddenGradient, RowCheck::kNothing));
  EXPECT_EQ(blocks.inputs.coef_loss[0], 0.0f);
  for (int r = 0; r < 4; ++r) {
    blocks.outputs.loss[r] = blocks.outputs.z_loss[r] = 2.0f;
    blocks.outputs.lse[r] = blocks.outputs.entropy[r] = blocks.outputs.target_logprob[r] = 4.0f;
    blocks.outputs.argmax[r] = 4;
  }
  blocks.outputs.loss[3] = blocks.outputs.lse[3] = NAN;
  blocks.outputs.first_bad[0] = -1;
  UnpackResults(chunk, layout, blocks.inputs, blocks.outputs);
  EXPECT_THAT(loss, ElementsAre(0.0f, 0.0f, 2.0f, 2.0f, 0.0f));
  EXPECT_THAT(std::vector(lse.begin(), lse.end() - 1), ElementsAre(4.0f, 0.0f, 4.0f, 4.0f));
  EXPECT_TRUE(std::isnan(lse[4]) && std::isnan(entropy[4]) && std::isnan(logprob[4]));
  EXPECT_THAT(argmax, ElementsAre(4, -1, 4, 4, -1));
  EXPECT_EQ(slice.sums.loss, 4.0);
  EXPECT_EQ(slice.sums.z_loss, 4.0);
  EXPECT_EQ(slice.sums.entropy, 12.0);
  EXPECT_EQ(slice.sums.valid_rows, 4);
  EXPECT_EQ(slice.sums.correct_rows, 0);
}

// The inputs of rows [0, rows), one vector for each array that every chunk has.
std::vector<std::vector<float>> InputsOf(const RowInputBlock& in, int64_t rows) {
  std::vector<std::vector<float>> values;
  const auto add = [&](const auto* array) { values.emplace_back(array, array + rows); };
  for (const int32_t* array : {in.raw_of_compact, in.target, in.accumulate, in.with_gradient}) add(array);
  for (const float* array : {in.weight, in.coef_loss, in.coef_lse, in.coef_entropy, in.omega}) add(array);
  for (int64_t row = 0; row < rows; ++row) values.front().push_back(static_cast<float>(in.checks[row]));
  return values;
}

// A slice with arrays whose values are all the same has the inputs of a slice without these arrays.
TEST(ChunkLayout, ArraysOfEqualValuesAreAsGoodAsNone) {
  std::mt19937_64 rng(std::random_device{}());
  for (int repetition = 0; repetition < 50; ++repetition) {
    std::vector<std::vector<int32_t>> targets(1 + rng() % 3);
    std::vector<Slice> plain;
    std::vector<float> gradient(4 * kCapacity);
    for (std::vector<int32_t>& each : targets) {
      each.resize(1 + rng() % 20);
      for (int32_t& target : each)
        target = rng() % 3 == 0 ? kIgnoredTarget : static_cast<int32_t>(rng() % 10);
      plain.push_back({.rows = static_cast<int64_t>(each.size()),
                       .targets = each.data(),
                       .grad_scale = std::ldexp(1.0f + static_cast<float>(rng() % 8) / 8.0f,
                                                static_cast<int>(rng() % 9) - 4),
                       .sample_seed = rng(),
                       .first_row = static_cast<int64_t>(rng() % 1000),
                       .grad_hidden = rng() % 2 == 0 ? gradient.data() : nullptr});
    }
    const std::vector<float> ones(kCapacity, 1.0f), zeros(kCapacity, 0.0f);
    const std::vector<uint8_t> all(kCapacity, 1);
    std::vector<Slice> with_arrays = plain;
    for (Slice& slice : with_arrays) {
      slice.row_weights = slice.grad_loss = ones.data();
      slice.grad_lse = slice.grad_entropy = zeros.data();
      slice.accumulate = all.data();
    }
    Chunk chunk;
    chunk.options.gradients = Gradients::kSampled;
    chunk.accumulate_gradients = rng() % 2 == 0;
    Blocks blocks, other_blocks;
    chunk.slices = absl::MakeSpan(plain);
    const ChunkLayout layout = LayOutChunk(Head(DType::kBFloat16), chunk, blocks.inputs);
    Chunk other = chunk;
    other.slices = absl::MakeSpan(with_arrays);
    const ChunkLayout same = LayOutChunk(Head(DType::kBFloat16), other, other_blocks.inputs);
    ASSERT_EQ(layout.compact_rows, same.compact_rows);
    EXPECT_EQ(layout.unit, same.unit);
    EXPECT_EQ(layout.accumulate, same.accumulate);
    EXPECT_EQ(layout.accumulate_all, same.accumulate_all);
    EXPECT_EQ(layout.want_hidden_gradient, same.want_hidden_gradient);
    EXPECT_EQ(InputsOf(blocks.inputs, layout.compact_rows), InputsOf(other_blocks.inputs, same.compact_rows));
    for (int64_t raw = 0; raw < layout.raw_rows; ++raw) {
      EXPECT_EQ(blocks.inputs.compact_of_raw[raw], other_blocks.inputs.compact_of_raw[raw]);
      EXPECT_EQ(blocks.inputs.gradient_of_raw[raw], other_blocks.inputs.gradient_of_raw[raw]);
    }
  }
}

// A chunk's decision is read when the slot has its next chunk, which may have another number of rows.
TEST(ChunkLayout, TheDecisionHasOnePlaceForAnyNumberOfRows) {
  std::vector<uint8_t> memory(static_cast<size_t>(OutputBlockBytes(1024)));
  Carver few(memory.data()), many(memory.data());
  const RowOutputBlock small = RowOutputBlock::Carve(few, 8), large = RowOutputBlock::Carve(many, 1024);
  EXPECT_EQ(small.decision, large.decision);
  EXPECT_LT(few.used(), many.used());
}

// What the guard looks at: dx only where it is wanted, or goes into the gradients of a norm.
TEST(ChunkLayout, HiddenGradientsAreCheckedWhereTheyGoSomewhere) {
  const std::vector<int32_t> targets = {1, 2};
  const std::vector<uint8_t> accumulate = {1, 0};
  float gradient[8] = {};
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    for (const bool wanted : {false, true}) {
      Blocks blocks;
      Slice slice;
      slice.rows = 2;
      slice.targets = targets.data();
      slice.accumulate = accumulate.data();
      if (wanted) slice.grad_hidden = gradient;
      Chunk chunk;
      chunk.slices = absl::MakeSpan(&slice, 1);
      LayoutHead head = Head(DType::kBFloat16);
      head.config.norm = norm;
      LayOutChunk(head, chunk, blocks.inputs);
      const bool through_norm = norm != Norm::kNone;
      EXPECT_EQ(blocks.inputs.checks[0] == RowCheck::kHiddenGradient, wanted || through_norm);
      EXPECT_EQ(blocks.inputs.checks[1] == RowCheck::kHiddenGradient, wanted);
      EXPECT_NE(blocks.inputs.checks[1], RowCheck::kNothing);
    }
  }
}

TEST(ChunkLayout, TakesAPowerOfTwoOutOfTheScale) {
  for (DType compute : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (float scale : {1e-9f, 1.0f / 3000.0f, 1.0f, 5e8f, -2e-7f}) {
      Blocks blocks;
      const std::vector<int32_t> targets = {1, 2};
      const std::vector<float> weights = {1.0f, 0.125f};
      Slice slice;
      slice.rows = 2;
      slice.targets = targets.data();
      slice.row_weights = weights.data();
      slice.grad_scale = scale;
      Chunk chunk;
      chunk.slices = absl::MakeSpan(&slice, 1);
      const ChunkLayout layout = LayOutChunk(Head(compute), chunk, blocks.inputs);
      int exponent = 0;
      EXPECT_EQ(std::frexp(layout.unit, &exponent), 0.5f);
      for (int r = 0; r < 2; ++r) {
        EXPECT_FLOAT_EQ(blocks.inputs.coef_loss[r] * layout.unit, scale * weights[static_cast<size_t>(r)]);
      }
      EXPECT_GE(std::fabs(blocks.inputs.coef_loss[0]), 1.0f);
      EXPECT_LT(std::fabs(blocks.inputs.coef_loss[0]), compute == DType::kFloat16 ? 32768.0f : 2.0f);
    }
  }
}

// The unit follows the largest slope that is to be expected of a row, and the sums come from the
// log-probabilities.
TEST(ChunkLayout, ObjectivesBringNumbersAndSums) {
  Blocks blocks;
  const std::vector<int32_t> targets = {1, kIgnoredTarget, 2, 3};
  const std::vector<float> weights = {1.0f, 1.0f, 0.0f, 0.5f}, advantages = {512.0f, 9.0f, 1e9f, -256.0f},
                           old_logprobs = {-1.0f, -9.0f, -1e9f, -2.0f},
                           ref_logprobs = {-3.0f, 0.0f, 0.0f, -2.0f};
  Slice slice;
  slice.rows = 4;
  slice.targets = targets.data();
  slice.row_weights = weights.data();
  slice.advantages = advantages.data();
  slice.old_logprobs = old_logprobs.data();
  slice.ref_logprobs = ref_logprobs.data();
  Chunk chunk;
  chunk.options.objective = {.kind = ObjectiveKind::kPpo,
                             .clip_low = 0.5f,
                             .clip_high = 1.0f,
                             .dual_clip = 4.0f,
                             .kl = KlEstimator::kK1,
                             .kl_coef = 0.5f,
                             .entropy_bonus = 0.25f};
  chunk.slices = absl::MakeSpan(&slice, 1);
  const ChunkLayout layout = LayOutChunk(Head(DType::kBFloat16), chunk, blocks.inputs);
  EXPECT_EQ(layout.unit, 1024.0f);  // 512 times the upper clip, and a little more
  EXPECT_TRUE(layout.any_coef_entropy);
  EXPECT_EQ(blocks.inputs.coef_entropy[0] * layout.unit, -0.25f);
  EXPECT_EQ(blocks.inputs.coef_entropy[1], 0.0f) << "of an absent row";
  EXPECT_EQ(blocks.inputs.advantages[2], -256.0f);
  EXPECT_EQ(blocks.inputs.old_logprobs[2], -2.0f);
  EXPECT_EQ(blocks.inputs.ref_logprobs[0], -3.0f);
  const float logprobs[] = {-0.5f, -7.0f, -0.5f};  // ratios exp 0.5, of no interest, exp 1.5
  for (int r = 0; r < 3; ++r) {
    blocks.outputs.loss[r] = blocks.outputs.z_loss[r] = blocks.outputs.lse[r] = 0.0f;
    blocks.outputs.target_logprob[r] = logprobs[r];
    blocks.outputs.argmax[r] = 0;
  }
  blocks.outputs.first_bad[0] = -1;
  UnpackResults(chunk, layout, blocks.inputs, blocks.outputs);
  const ObjectiveSums& sums = slice.sums.objective;
  EXPECT_EQ(sums.rows, 2);
  EXPECT_EQ(sums.clipped_rows, 1);
  EXPECT_NEAR(sums.ratio, std::exp(0.5) + std::exp(1.5), 1e-9);
  EXPECT_NEAR(sums.old_kl, std::exp(0.5) - 1.5 + std::exp(1.5) - 2.5, 1e-9);
  EXPECT_NEAR(sums.ref_kl, 2.5 + 1.5, 1e-9);
}

TEST(ChunkLayout, DivergencesAreAddedUp) {
  Blocks blocks;
  const std::vector<int32_t> targets = {0, kIgnoredTarget, 0, 1};
  const std::vector<float> weights = {2.0f, 1.0f, 0.0f, 1.0f};
  Slice slice;
  slice.rows = 4;
  slice.targets = targets.data();
  slice.row_weights = weights.data();
  Chunk chunk;
  chunk.slices = absl::MakeSpan(&slice, 1);
  chunk.options.distillation = {.divergence = Divergence::kForwardKl, .weight = 0.5f, .target_weight = 0.25f};
  const ChunkLayout layout = LayOutChunk(Head(DType::kFloat32), chunk, blocks.inputs);
  const float divergence[] = {3.0f, NAN, 4.0f}, with_targets[] = {8.0f, 0.0f, 16.0f};
  for (int r = 0; r < 3; ++r) {
    const float weight = r == 0 ? 2.0f : r == 1 ? 0.0f : 1.0f;
    blocks.outputs.divergence[r] = divergence[r];
    blocks.outputs.loss[r] = weight * 0.5f * (r == 1 ? 0.0f : divergence[r]) + 0.25f * with_targets[r];
    blocks.outputs.z_loss[r] = blocks.outputs.lse[r] = blocks.outputs.target_logprob[r] = 0.0f;
    blocks.outputs.argmax[r] = 0;
  }
  blocks.outputs.first_bad[0] = -1;
  UnpackResults(chunk, layout, blocks.inputs, blocks.outputs);
  EXPECT_EQ(slice.sums.divergence, 2.0 * 3.0 + 4.0);
  EXPECT_EQ(slice.sums.target_loss, 8.0 + 16.0);
  EXPECT_EQ(slice.sums.loss, 0.5 * 10.0 + 0.25 * 24.0);
}

// The values of a row are written together, and a processor's first cache has few lines for addresses that
// are a multiple of 4 KiB apart.
TEST(ChunkLayout, ValuesOfARowDoNotShareAPlaceInTheCache) {
  for (const int64_t rows : {1024, 1000, 4096, 8192}) {
    std::vector<uint8_t> memory(static_cast<size_t>(InputBlockBytes(rows)));
    Carver carver(memory.data());
    const RowInputBlock in = RowInputBlock::Carve(carver, rows);
    ASSERT_LE(carver.used(), static_cast<int64_t>(memory.size()));
    std::map<uintptr_t, int> arrays;  // in each of the 64 places of 64 bytes
    for (const void* array : std::initializer_list<const void*>{
             in.compact_of_raw, in.raw_of_compact, in.gradient_of_raw, in.target, in.accumulate,
             in.with_gradient, in.checks, in.weight, in.coef_loss, in.coef_lse, in.coef_entropy,
             in.advantages, in.old_logprobs, in.ref_logprobs, in.omega}) {
      ++arrays[reinterpret_cast<uintptr_t>(array) / 64 % 64];
    }
    for (const auto& [place, count] : arrays) EXPECT_LE(count, 4) << rows << " rows, place " << place;
  }
}

TEST(ChunkLayout, ResultsComeBackInRawOrder) {
  Blocks blocks;
  const std::vector<int32_t> targets = {kIgnoredTarget, 4, 6};
  std::vector<float> loss(3), lse(3);
  std::vector<int32_t> argmax(3);
  Slice slice;
  slice.rows = 3;
  slice.targets = targets.data();
  slice.out.loss = loss.data();
  slice.out.lse = lse.data();
  slice.out.argmax = argmax.data();
  Chunk chunk;
  chunk.slices = absl::MakeSpan(&slice, 1);
  ChunkLayout layout = LayOutChunk(Head(DType::kFloat32), chunk, blocks.inputs);
  for (int r = 0; r < 2; ++r) {
    const auto value = static_cast<float>(r + 1);
    blocks.outputs.loss[r] = value;
    blocks.outputs.z_loss[r] = 0.25f;
    blocks.outputs.lse[r] = 10.0f * value;
    blocks.outputs.argmax[r] = 4;
    blocks.outputs.dropped_mass[r] = 0.125f;
  }
  blocks.outputs.first_bad[0] = 1;
  UnpackResults(chunk, layout, blocks.inputs, blocks.outputs);
  EXPECT_THAT(loss, ElementsAre(0.0f, 1.0f, 2.0f));
  EXPECT_THAT(lse, ElementsAre(0.0f, 10.0f, 20.0f));
  EXPECT_THAT(argmax, ElementsAre(-1, 4, 4));
  EXPECT_EQ(slice.first_nonfinite_row, 2);
  EXPECT_EQ(slice.sums.loss, 3.0);
  EXPECT_EQ(slice.sums.z_loss, 0.5);
  EXPECT_EQ(slice.sums.valid_rows, 2);
  EXPECT_EQ(slice.sums.correct_rows, 1);
  EXPECT_EQ(slice.sums.dropped_mass, 0.0);  // no kernel has filled it
  EXPECT_EQ(chunk.gradients, Gradients::kExact);
}

// Two slices that want different numbers of classes: rows have room for as many as the widest wants.
TEST(ChunkLayout, SingleClassesOfEachRow) {
  Blocks blocks;
  const std::vector<int32_t> targets = {4, kIgnoredTarget, 6};
  const std::vector<int32_t> named = {5, 6, 7, 8, 9, 10}, shared = {11};
  std::vector<float> given(6, -7), given_shared(3, -7), top(6, -7);
  std::vector<int32_t> top_classes(6, -7);
  std::vector<Slice> slices(2);
  for (Slice& slice : slices) {
    slice.rows = 3;
    slice.targets = targets.data();
  }
  slices[0].classes = named.data();
  slices[0].class_count = 2;
  slices[0].out.class_logprobs = given.data();
  slices[1].classes = shared.data();
  slices[1].class_count = 1;
  slices[1].shared_classes = true;
  slices[1].out.class_logprobs = given_shared.data();
  slices[1].top_k = 2;
  slices[1].out.top_logprobs = top.data();
  slices[1].out.top_classes = top_classes.data();
  Chunk chunk;
  chunk.slices = absl::MakeSpan(slices);
  const ChunkLayout layout = LayOutChunk(Head(DType::kFloat32), chunk, blocks.inputs);
  EXPECT_EQ(layout.class_count, 2);
  EXPECT_EQ(layout.top_k, 2);
  std::vector<uint8_t> memory(static_cast<size_t>(ClassBlockBytes(8)));
  Carver carver(memory.data());
  const RowClassBlock classes = RowClassBlock::Carve(carver, 8);
  PlaceClasses(layout, blocks.inputs, classes);
  EXPECT_THAT(std::vector<int32_t>(classes.classes, classes.classes + 8),
              ElementsAre(5, 6, 9, 10, 11, 0, 11, 0));
  for (int i = 0; i < 8; ++i) {
    classes.class_logits()[i] = static_cast<float>(-i);
    classes.top_logits[i] = static_cast<float>(i == 4 ? 3 : -i);
    classes.top_places[i] = 20 + i;
  }
  for (int row = 0; row < 4; ++row) blocks.outputs.lse[row] = 2.0f;
  blocks.outputs.lse[3] = NAN;  // an absent row whose logits are not finite
  blocks.outputs.first_bad[0] = blocks.outputs.first_bad[1] = -1;
  UnpackResults(chunk, layout, blocks.inputs, blocks.outputs, classes);
  EXPECT_THAT(given, ElementsAre(-2, -3, 0, 0, -4, -5));
  EXPECT_THAT(given_shared, ElementsAre(-6, 0, ::testing::IsNan()));
  EXPECT_THAT(top, ElementsAre(0, -7, 0, 0, ::testing::IsNan(), ::testing::IsNan()))
      << "3 - 2 is rounding: 0";
  EXPECT_THAT(top_classes, ElementsAre(24, 25, -1, -1, -1, -1));
}

// A class once, the smallest first; rows without a target left out; places that are left name none.
TEST(ChunkLayout, SoftTargetsOfEachRow) {
  Blocks blocks;
  const std::vector<int32_t> targets = {4, kIgnoredTarget, 6};
  const std::vector<int32_t> named = {9, 5, 9, 1, 2, 3, 7, kNoClass, 6};
  const std::vector<float> weights = {0.25f, 0.125f, 0.25f, 1, 1, 1, 0.5f, 0, 0.25f};
  Slice slice;
  slice.rows = 3;
  slice.targets = targets.data();
  slice.target_classes = named.data();
  slice.target_weights = weights.data();
  slice.target_count = 3;
  Chunk chunk;
  chunk.slices = absl::MakeSpan(&slice, 1);
  for (const Rest rest : {Rest::kNone, Rest::kRenormalized, Rest::kOneClass}) {
    chunk.options.rest = rest;
    const ChunkLayout layout = LayOutChunk(Head(DType::kFloat32), chunk, blocks.inputs);
    EXPECT_EQ(layout.target_count, 3);
    std::vector<uint8_t> memory(static_cast<size_t>(ClassBlockBytes(8)));
    Carver carver(memory.data());
    const RowClassBlock classes = RowClassBlock::Carve(carver, 8);
    PlaceSoftTargets(layout, rest, blocks.inputs, classes);
    EXPECT_THAT(std::vector<int32_t>(classes.target_classes(), classes.target_classes() + 6),
                ElementsAre(5, 9, kNoClass, 6, 7, kNoClass));
    const bool whole = rest == Rest::kRenormalized;
    const float first = whole ? 0.625f : 1.0f, second = whole ? 0.75f : 1.0f;
    EXPECT_THAT(std::vector<float>(classes.target_weights(), classes.target_weights() + 6),
                ElementsAre(0.125f / first, 0.5f / first, 0, 0.25f / second, 0.5f / second, 0));
    EXPECT_EQ(blocks.inputs.target_total[0], rest == Rest::kNone ? 0.625f : 1.0f);
    EXPECT_EQ(blocks.inputs.target_rest[1], rest == Rest::kOneClass ? 0.25f : 0.0f);
  }
}

TEST(ChunkLayout, ResultsSayWhatTheDeviceDecided) {
  Blocks blocks;
  const std::vector<int32_t> targets = {4, 6};
  Slice slice;
  slice.rows = 2;
  slice.targets = targets.data();
  Chunk chunk;
  chunk.slices = absl::MakeSpan(&slice, 1);
  ChunkLayout layout = LayOutChunk(Head(DType::kFloat32), chunk, blocks.inputs);
  layout.unit = 2.0f;
  std::fill_n(blocks.outputs.dropped_mass, 2, 0.125f);
  std::fill_n(blocks.outputs.variance, 2, 0.25f);
  std::fill_n(blocks.outputs.square, 2, 8.0f);
  *blocks.outputs.sample_threshold = 0x1p-9f;
  const auto unpack = [&](Gradients asked, Decision decision) {
    layout.planned = chunk.options.gradients = asked;
    chunk.choices = {{.what = "gradients", .choice = "not known yet"}, {.what = "loss"}};
    *blocks.outputs.decision = decision;
    UnpackResults(chunk, layout, blocks.inputs, blocks.outputs);
    EXPECT_EQ(chunk.choices[0].what, "gradients");
    EXPECT_EQ(chunk.choices[0].choice, Name(chunk.gradients));
    EXPECT_EQ(chunk.choices[1].what, "loss");
    return std::pair(chunk.gradients, chunk.choices[0].reason);
  };
  using ::testing::HasSubstr;
  using ::testing::Pair;
  for (const Gradients asked : {Gradients::kSampled, Gradients::kAuto}) {
    EXPECT_THAT(unpack(asked, Decision::kAsPlanned).first, Gradients::kSampled);
    EXPECT_EQ(slice.sums.sampling_variance, 2.0);
    EXPECT_EQ(slice.sums.squared_gradient, 64.0);
    EXPECT_EQ(slice.sums.dropped_mass, 0.0);
    EXPECT_EQ(chunk.sample_threshold, 0x1p-9f);
  }
  EXPECT_THAT(unpack(Gradients::kAuto, Decision::kTooMuchError),
              Pair(Gradients::kExact, HasSubstr("max_gradient_error")));
  EXPECT_EQ(slice.sums.sampling_variance, 0.0);
  EXPECT_THAT(unpack(Gradients::kFiltered, Decision::kAsPlanned),
              Pair(Gradients::kFiltered, HasSubstr("asked for")));
  EXPECT_EQ(slice.sums.dropped_mass, 0.25);
  EXPECT_THAT(unpack(Gradients::kFiltered, Decision::kTooManyCandidates),
              Pair(Gradients::kExact, HasSubstr("candidates")));
}

TEST(HeadMemory, TheWorkspaceIsUsedButNotExceeded) {
  HeadConfig config;
  config.compute_dtype = DType::kBFloat16;
  for (auto [hidden, vocab] : {std::pair{4096, 128256}, {2304, 256000}, {3072, 32064}, {123, 507}, {1, 1}}) {
    config.hidden_size = hidden;
    config.vocab_size = vocab;
    for (Norm norm : {Norm::kNone, Norm::kLayerNorm}) {
      config.norm = norm;
      const int64_t budget = int64_t{2} << 30;
      const HeadSizes sizes = SizesFor(config, budget, 16384, 132, true);
      EXPECT_EQ(PadRows(sizes.chunk_rows), sizes.chunk_rows);
      const MemoryBytes plan = PlanMemory(config, sizes, 132);
      const int64_t planned = plan[MemoryKind::kWorkspace] + plan[MemoryKind::kSlots];
      EXPECT_LE(planned, budget + 2 * kDevicePage);  // two buffers of whole pages
      if (sizes.chunk_rows < 16384) {
        EXPECT_GE(planned, budget / 10 * 9);
      }
    }
  }
  config.vocab_size = 1'000'000'000;
  EXPECT_EQ(SizesFor(config, 1 << 20, 16384, 132, true).chunk_rows, 8);
}

TEST(HeadMemory, ChunksOfFusedLossesLeaveFewRowsOfPanelsEmpty) {
  HeadConfig config;
  config.compute_dtype = DType::kBFloat16;
  for (auto [hidden, vocab] : {std::pair{4096, 128256}, {2304, 256000}, {5120, 131072}, {1000, 50001}}) {
    config.hidden_size = hidden;
    config.vocab_size = vocab;
    for (int64_t mib = 300; mib < 2300; mib += 37) {
      const int64_t most = SizesFor(config, mib << 20, 1 << 20, 132, false).chunk_rows;
      const int64_t rows = SizesFor(config, mib << 20, 1 << 20, 132, true).chunk_rows;
      const int64_t padded = hopper::Panels(rows) * hopper::kPanelRows;
      EXPECT_LE(padded, std::max<int64_t>(rows + rows / 8, 1024)) << mib << " MiB";
      EXPECT_GE(rows + hopper::kPanelRows, most / 10 * 9) << mib << " MiB";
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::cuda::chunk_layout_test
