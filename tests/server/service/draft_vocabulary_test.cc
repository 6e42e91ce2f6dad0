// SPDX-License-Identifier: Apache-2.0
// Tests of heads that have some classes of a larger vocabulary, through the service: their calls name classes
// as the larger vocabulary does, and compute what a head with these classes computes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "proto/wire/status_details.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"

namespace lossd::app::testing::draft_vocabulary_test {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kHidden = 12;
constexpr uint64_t kClasses = 40;
constexpr uint64_t kFull = 150;
constexpr uint64_t kRows = 500;

class DraftVocabularyTest : public ::testing::TestWithParam<int> {
 protected:
  // "draft" has classes of the larger vocabulary, "plain" as many of its own; both have the same weights.
  DraftVocabularyTest() {
    for (int32_t i = 0; i < static_cast<int32_t>(kFull); ++i) classes_.push_back(i);
    std::shuffle(classes_.begin(), classes_.end(), rng_);
    classes_.resize(kClasses);
    std::sort(classes_.begin(), classes_.end());
    client::ClientOptions options;
    options.target = server_.target();
    client_ = *client::Client::Connect(options);
    EXPECT_TRUE(client_->CreateHead(Request("plain", false)).ok());
    EXPECT_TRUE(client_->CreateHead(Request("draft", true)).ok());
    std::normal_distribution<float> normal;
    for (uint64_t i = 0; i < kRows * kHidden; ++i) hidden_.push_back(normal(rng_));
    for (uint64_t i = 0; i < kRows; ++i) {
      const auto target = static_cast<int32_t>(rng_() % kFull);
      targets_.push_back(rng_() % 9 == 0 ? -100 : target);
      const auto found = std::lower_bound(classes_.begin(), classes_.end(), target);
      const bool listed = found != classes_.end() && *found == target;
      plain_.push_back(targets_.back() < 0 || !listed ? -100
                                                      : static_cast<int32_t>(found - classes_.begin()));
      unlisted_ += targets_.back() >= 0 && !listed ? 1 : 0;
    }
  }

  static ServerOptions Options() {
    ServerOptions options = SmallServer();
    options.backend = "cpu";
    options.cpu_devices = GetParam();
    options.split = GetParam() == 1 ? "any" : "vocabulary";
    return options;
  }
  v1::CreateHeadRequest Request(const std::string& name, bool draft) const {
    v1::CreateHeadRequest request;
    v1::HeadSpec& spec = *request.mutable_spec();
    spec.set_name(name);
    spec.set_hidden_size(kHidden);
    spec.set_vocab_size(kClasses);
    spec.set_bias(true);
    request.mutable_kaiming_uniform()->set_seed(5);
    if (!draft) return request;
    spec.mutable_class_list()->Add(classes_.begin(), classes_.end());
    spec.set_full_vocab_size(kFull);
    return request;
  }

  struct Results {
    std::vector<float> dx = std::vector<float>(kRows * kHidden, NAN);
    std::vector<float> loss = std::vector<float>(kRows), named = std::vector<float>(kRows);
    std::vector<int32_t> argmax = std::vector<int32_t>(kRows), top = std::vector<int32_t>(kRows * 3);
    std::vector<float> top_logprobs = std::vector<float>(kRows * 3);
    absl::StatusOr<client::LossResult> result = absl::UnknownError("");
  };
  Results Compute(const std::string& head, const std::vector<int32_t>& targets, int32_t named,
                  const client::ComputeOptions& options, uint64_t id = 0) {
    Results results;
    const std::vector<int32_t> classes = {named};
    client::Microbatch microbatch{.head = head,
                                  .step = 0,
                                  .id = id,
                                  .hidden_size = kHidden,
                                  .hidden_dtype = v1::DTYPE_FP32,
                                  .hidden = hidden_.data(),
                                  .targets = targets,
                                  .classes = classes};
    client::LossOutputs outputs{.grad_hidden = results.dx.data(),
                                .row_loss = absl::MakeSpan(results.loss),
                                .row_argmax = absl::MakeSpan(results.argmax),
                                .class_logprobs = absl::MakeSpan(results.named),
                                .class_count = 1,
                                .top_logprobs = absl::MakeSpan(results.top_logprobs),
                                .top_classes = absl::MakeSpan(results.top),
                                .top_k = 3};
    results.result = client_->ComputeLoss(microbatch, outputs, options);
    return results;
  }

  std::mt19937_64 rng_{std::random_device{}()};
  std::vector<int32_t> classes_;
  std::vector<float> hidden_;
  std::vector<int32_t> targets_, plain_;  // as the larger vocabulary and as the plain head name them
  uint64_t unlisted_ = 0;
  TestServer server_{Options()};
  std::unique_ptr<client::Client> client_;
};

INSTANTIATE_TEST_SUITE_P(Devices, DraftVocabularyTest, ::testing::Values(1, 2));

TEST_P(DraftVocabularyTest, ComputesWhatAHeadOfTheseClassesComputes) {
  for (const int streams : {1, 3}) {
    client::ComputeOptions options;
    options.accumulate_gradients = true;
    options.streams = streams;
    options.slice_bytes = 3000;
    const auto id = static_cast<uint64_t>(streams);
    const Results draft = Compute("draft", targets_, classes_[7], options, id);
    const Results plain = Compute("plain", plain_, 7, options, id);
    ASSERT_TRUE(draft.result.ok() && plain.result.ok()) << draft.result.status() << plain.result.status();
    EXPECT_NEAR(draft.result->loss, plain.result->loss, 1e-6);
    EXPECT_EQ(draft.result->valid_rows, plain.result->valid_rows);
    EXPECT_EQ(draft.result->normalizer, plain.result->normalizer);
    EXPECT_EQ(draft.result->correct_rows, plain.result->correct_rows);
    for (uint64_t row = 0; row < kRows; ++row) {
      const auto name = [&](int32_t of_head) {
        return of_head < 0 ? of_head : classes_[static_cast<size_t>(of_head)];
      };
      ASSERT_NEAR(draft.loss[row], plain.loss[row], 1e-6) << row;
      ASSERT_NEAR(draft.named[row], plain.named[row], 1e-6) << row;
      ASSERT_EQ(draft.argmax[row], name(plain.argmax[row])) << row;
      for (uint64_t i = 3 * row; i < 3 * row + 3; ++i) ASSERT_EQ(draft.top[i], name(plain.top[i])) << row;
    }
    for (size_t i = 0; i < draft.dx.size(); ++i) ASSERT_NEAR(draft.dx[i], plain.dx[i], 1e-6) << i;
  }
  const auto draft = client_->ReadTensor("draft", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT);
  const auto plain = client_->ReadTensor("plain", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT);
  ASSERT_EQ(draft->values.size(), kClasses * kHidden);
  for (size_t i = 0; i < draft->values.size(); ++i)
    ASSERT_NEAR(draft->values[i], plain->values[i], 1e-6) << i;
}

TEST_P(DraftVocabularyTest, RowsOfOtherClassesAreCountedOrRefused) {
  // Sent as they are: the client that knows the classes leaves most of these rows out.
  const auto direct = server_.Connect();
  v1::OpenMicrobatch open;
  open.set_head("draft");
  open.set_microbatch_rows(kRows);
  open.mutable_rows()->set_end(kRows);
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_MEAN);
  open.mutable_targets()->Add(targets_.begin(), targets_.end());
  const auto call = [&] {
    const auto stream = direct->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, kRows, Bytes(hidden_));
    return stream->Finish();
  };
  const LossAnswers answers = call();
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  EXPECT_EQ(answers.summary->unlisted_rows(), unlisted_);
  const auto valid = static_cast<uint64_t>(kRows - std::count(plain_.begin(), plain_.end(), -100));
  EXPECT_EQ(answers.summary->valid_rows(), valid);
  EXPECT_EQ(answers.summary->normalizer(), static_cast<double>(valid));
  EXPECT_EQ(Compute("draft", targets_, classes_[0], {}).result->unlisted_rows, unlisted_);

  open.mutable_options()->set_refuse_unlisted(true);
  const absl::Status refused = call().status;
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("open.options.refuse_unlisted"));
  client::ComputeOptions options;
  options.loss.set_refuse_unlisted(true);
  EXPECT_TRUE(absl::IsInvalidArgument(Compute("draft", targets_, classes_[0], options).result.status()));
  open.mutable_options()->clear_refuse_unlisted();
  open.set_targets(3, kFull);
  EXPECT_THAT(std::string(call().status.message()),
              HasSubstr(absl::StrCat("open.targets[3] must be in [0, ", kFull)));
}

TEST_P(DraftVocabularyTest, NamedClassesAreInTheList) {
  int32_t other = 0;
  while (std::binary_search(classes_.begin(), classes_.end(), other)) ++other;
  const Results unlisted = Compute("draft", targets_, other, {});
  EXPECT_THAT(std::string(unlisted.result.status().message()),
              HasSubstr("open.classes[0] must be in the head's class_list"));
  const Results beyond = Compute("draft", targets_, kFull, {});
  EXPECT_THAT(std::string(beyond.result.status().message()), HasSubstr("must be in [0, 150)"));
}

// Retained rows are kept by the head's own classes, and computed again by them.
TEST_P(DraftVocabularyTest, RetainedRows) {
  std::vector<float> losses(kRows), dx(kRows * kHidden, NAN), ones(kRows, 1.0f);
  client::Microbatch microbatch{.head = "draft",
                                .step = 0,
                                .id = 9,
                                .hidden_size = kHidden,
                                .hidden_dtype = v1::DTYPE_FP32,
                                .hidden = hidden_.data(),
                                .targets = targets_};
  client::ComputeOptions options;
  options.reduction = v1::REDUCTION_NONE;
  options.retain = true;
  const auto kept = client_->ComputeLoss(microbatch, {.row_loss = absl::MakeSpan(losses)}, options);
  ASSERT_TRUE(kept.ok()) << kept.status();
  const client::RetainedGradients gradients{.head = "draft",
                                            .step = 0,
                                            .id = 9,
                                            .hidden_size = kHidden,
                                            .hidden_dtype = v1::DTYPE_FP32,
                                            .grad_loss = ones};
  const auto back = client_->Backward(gradients, dx.data(), {});
  ASSERT_TRUE(back.ok()) << back.status();
  client::ComputeOptions at_once;
  at_once.reduction = v1::REDUCTION_SUM;
  const Results plain = Compute("plain", plain_, 0, at_once);
  for (size_t i = 0; i < dx.size(); ++i) ASSERT_NEAR(dx[i], plain.dx[i], 1e-5) << i;
}

TEST_P(DraftVocabularyTest, DescriptionsAndCheckpointsKeepTheList) {
  const auto head = client_->DescribeHead("draft");
  ASSERT_TRUE(head.ok());
  EXPECT_THAT(head->spec().class_list(), ::testing::ElementsAreArray(classes_));
  EXPECT_EQ(head->spec().full_vocab_size(), kFull);
  const auto heads = client_->ListHeads();
  ASSERT_TRUE(heads.ok());
  for (const v1::HeadDescription& each : *heads) EXPECT_EQ(each.spec().class_list_size(), 0);
  // Lists in ListHeads take nothing from what the client knows.
  EXPECT_TRUE(Compute("draft", targets_, classes_[3], {}).result.ok());

  const auto saved = client_->SaveCheckpoint("draft", "kept");
  ASSERT_TRUE(saved.ok()) << saved.status();
  // Into a head of other classes it is not loaded, and as a new head it has the list.
  EXPECT_TRUE(client_->DeleteHead("draft").ok());
  v1::CreateHeadRequest other = Request("draft", true);
  other.mutable_spec()->set_full_vocab_size(kFull + 1);
  ASSERT_TRUE(client_->CreateHead(other).ok());
  const auto refused = client_->LoadCheckpoint("draft/kept");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("class_list of 40 out of 150 classes"));
  EXPECT_TRUE(client_->DeleteHead("draft").ok());
  const auto loaded = client_->LoadCheckpoint("draft/kept");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(loaded->spec().class_list(), ::testing::ElementsAreArray(classes_));
  EXPECT_EQ(Compute("draft", targets_, classes_[3], {}).result->unlisted_rows, unlisted_);
}

TEST_P(DraftVocabularyTest, ListsThatAreRefused) {
  const auto refused = [&](const std::function<void(v1::HeadSpec&)>& spoil) {
    v1::CreateHeadRequest request = Request("bad", true);
    spoil(*request.mutable_spec());
    const absl::Status status = client_->CreateHead(request).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    const auto detail = client::ErrorDetailOf(status);
    return detail.has_value() ? absl::StrCat(detail->field(), " ", detail->value()) : "nothing";
  };
  EXPECT_EQ(refused([](auto& spec) { spec.mutable_class_list()->RemoveLast(); }),
            "spec.class_list 39 entries");
  EXPECT_EQ(refused([&](auto& spec) { spec.set_class_list(4, classes_[3]); }),
            absl::StrCat("spec.class_list[4] ", classes_[3]));
  EXPECT_EQ(refused([](auto& spec) { spec.set_class_list(39, kFull); }), "spec.class_list[39] 150");
  EXPECT_EQ(refused([](auto& spec) { spec.set_class_list(0, uint32_t{1} << 31); }),
            "spec.class_list[0] 2147483648");
  EXPECT_EQ(refused([](auto& spec) { spec.set_full_vocab_size(39); }), "spec.full_vocab_size 39");
  EXPECT_EQ(refused([](auto& spec) { spec.set_full_vocab_size(0); }), "spec.full_vocab_size 0");
  EXPECT_EQ(refused([](auto& spec) { spec.clear_class_list(); }), "spec.full_vocab_size 150");
  EXPECT_EQ(client_->ListHeads()->size(), 2u);
}

TEST_P(DraftVocabularyTest, ATeacherHasTheSameList) {
  if (GetParam() > 1) GTEST_SKIP() << "heads that are split by vocabulary are not distilled yet";
  v1::CreateHeadRequest teacher = Request("teacher", true);
  teacher.mutable_spec()->set_frozen(true);
  ASSERT_TRUE(client_->CreateHead(teacher).ok());
  v1::CreateHeadRequest other = Request("other", false);
  other.mutable_spec()->set_frozen(true);
  ASSERT_TRUE(client_->CreateHead(other).ok());
  const std::vector<int32_t> any(kRows,
                                 0);  // whether the head has the class or not: targets are not looked at
  const auto distill = [&](const std::string& name) {
    client::Microbatch microbatch{.head = "draft",
                                  .hidden_size = kHidden,
                                  .hidden_dtype = v1::DTYPE_FP32,
                                  .hidden = hidden_.data(),
                                  .targets = any,
                                  .teacher_hidden = hidden_.data(),
                                  .teacher_hidden_size = kHidden};
    client::ComputeOptions options;
    options.loss.mutable_distillation()->set_teacher(name);
    options.loss.mutable_distillation()->set_divergence(v1::DIVERGENCE_FORWARD_KL);
    return client_->ComputeLoss(microbatch, {}, options);
  };
  const auto same = distill("teacher");
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(same->valid_rows, kRows);
  EXPECT_NEAR(same->loss, 0.0, 1e-6);
  EXPECT_THAT(std::string(distill("other").status().message()), HasSubstr("class_list"));
}

}  // namespace
}  // namespace lossd::app::testing::draft_vocabulary_test
