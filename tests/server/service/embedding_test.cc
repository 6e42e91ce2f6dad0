// SPDX-License-Identifier: Apache-2.0
// Tests of a head's weight as an embedding, through the service: rows are those of the weight, gradients of
// rows reach the accumulators exactly once and beside those of a loss, and what is wrong about them is
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"

namespace lossd::app::testing::embedding_test {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kHidden = 18;
constexpr int32_t kClasses = 61;
constexpr int32_t kPadding = -100;
constexpr double kTolerance = 1e-6;  // of the sum of the sizes of what is added up in fp32

struct Mode {
  std::string transport = "grpc";
  bool deterministic = false;
  int devices = 1;
  bool by_vocabulary = false;
};

class EmbeddingTest : public ::testing::TestWithParam<Mode> {
 protected:
  EmbeddingTest() {
    client::ClientOptions options;
    options.target = server_.target();
    options.transport = GetParam().transport;
    client_ = *client::Client::Connect(options);
    EXPECT_TRUE(Create("lm", [](v1::HeadSpec&) {}).ok());
    std::vector<float> weight(kClasses * kHidden);
    for (float& x : weight) x = normal_(rng_);
    EXPECT_TRUE(client_->WriteTensor("lm", v1::PARAM_WEIGHT, weight).ok());
  }

  absl::Status Create(const std::string& name, const std::function<void(v1::HeadSpec&)>& change) {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name(name);
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_spec()->set_bias(true);
    request.mutable_spec()->set_norm(v1::NORM_RMSNORM);
    change(*request.mutable_spec());
    return client_->CreateHead(request).status();
  }

  static ServerOptions Options() {
    return SmallCpuServer(GetParam().deterministic, GetParam().devices, GetParam().by_vocabulary);
  }

  // Ids as text has them: some often, some never, some padding.
  std::vector<int32_t> RandomIds(size_t count) {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < count; ++i) {
      const auto drawn = static_cast<int32_t>(rng_() % kClasses);
      ids.push_back(rng_() % 7 == 0 ? kPadding : drawn % 3 == 0 ? drawn : drawn % 5);
    }
    return ids;
  }
  std::vector<float> RandomRows(size_t count) {
    std::vector<float> rows(count * kHidden);
    for (float& x : rows) x = normal_(rng_);
    return rows;
  }

  absl::StatusOr<client::LossResult> Embed(const std::vector<int32_t>& ids, v1::DType dtype, void* rows,
                                           client::ComputeOptions options = {}) {
    const client::Microbatch microbatch{.head = "lm",
                                        .hidden_size = kHidden,
                                        .hidden_dtype = dtype,
                                        .targets = ids,
                                        .embedding = v1::EMBEDDING_ROWS};
    return client_->ComputeLoss(microbatch, {.grad_hidden = rows}, options);
  }

  absl::StatusOr<client::LossResult> AddGradients(uint64_t id, const std::vector<int32_t>& ids,
                                                  const std::vector<float>& gradients,
                                                  std::optional<float> scale = std::nullopt,
                                                  std::optional<uint64_t> slice_bytes = std::nullopt) {
    const client::Microbatch microbatch{.head = "lm",
                                        .step = step_,
                                        .id = id,
                                        .hidden_size = kHidden,
                                        .hidden_dtype = v1::DTYPE_FP32,
                                        .hidden = gradients.data(),
                                        .targets = ids,
                                        .embedding = v1::EMBEDDING_GRADIENTS};
    client::ComputeOptions options;
    options.accumulate_gradients = true;
    options.grad_output = scale;
    options.slice_bytes = slice_bytes;
    return client_->ComputeLoss(microbatch, {}, options);
  }

  std::vector<float> Gradient(const std::string& head = "lm") {
    const auto tensor = client_->ReadTensor(head, v1::PARAM_WEIGHT, v1::ROLE_GRADIENT);
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    return tensor.ok() ? tensor->values : std::vector<float>();
  }

  std::mt19937_64 rng_{std::random_device{}()};
  std::normal_distribution<float> normal_;
  uint64_t step_ = 0;
  TestServer server_{Options()};
  std::unique_ptr<client::Client> client_;
};

// What the gradients of rows add up to, in double, and how large what was added is.
struct Sums {
  std::vector<double> sum = std::vector<double>(kClasses * kHidden);
  std::vector<double> size = std::vector<double>(kClasses * kHidden);

  void Add(const std::vector<int32_t>& ids, const std::vector<float>& gradients, double scale) {
    for (size_t row = 0; row < ids.size(); ++row) {
      if (ids[row] == kPadding) continue;
      for (uint64_t j = 0; j < kHidden; ++j) {
        const double added = scale * double{gradients[row * kHidden + j]};
        sum[static_cast<size_t>(ids[row]) * kHidden + j] += added;
        size[static_cast<size_t>(ids[row]) * kHidden + j] += std::fabs(added);
      }
    }
  }
  void ExpectEqual(const std::vector<float>& gradient) const {
    ASSERT_EQ(gradient.size(), sum.size());
    for (size_t i = 0; i < sum.size(); ++i) {
      ASSERT_NEAR(gradient[i], sum[i], kTolerance * (1e-30 + size[i])) << "class " << i / kHidden;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Modes, EmbeddingTest,
    ::testing::Values(
        Mode{}, Mode{.transport = "shared_memory"}, Mode{.deterministic = true},
        Mode{.transport = "shared_memory", .deterministic = true, .devices = 2}, Mode{.devices = 3},
        Mode{.devices = 2, .by_vocabulary = true},
        Mode{.transport = "shared_memory", .deterministic = true, .devices = 3, .by_vocabulary = true}),
    [](const auto& mode) {
      return absl::StrCat(mode.param.transport == "grpc" ? "Messages" : "SharedMemory",
                          mode.param.deterministic ? "Deterministic" : "",
                          mode.param.by_vocabulary ? "Vocabulary" : "", mode.param.devices);
    });

TEST_P(EmbeddingTest, RowsAreThoseOfTheWeight) {
  for (const v1::DType dtype : {v1::DTYPE_FP32, v1::DTYPE_BF16, v1::DTYPE_FP16}) {
    const size_t row_bytes = kHidden * client::ElementSize(dtype);
    v1::ReadTensorRequest read;
    read.set_head("lm");
    read.set_param(v1::PARAM_WEIGHT);
    read.set_role(v1::ROLE_VALUE);
    read.set_dtype(dtype);
    std::vector<char> weight(kClasses * row_bytes);
    ASSERT_TRUE(client_->ReadTensor(read, absl::MakeSpan(weight)).ok());
    for (const size_t count : {size_t{0}, size_t{1}, size_t{777}}) {
      for (const int streams : {1, 3}) {
        SCOPED_TRACE(absl::StrCat(v1::DType_Name(dtype), ", ", count, " rows, ", streams, " streams"));
        std::vector<int32_t> ids = RandomIds(count);
        std::vector<char> rows(count * row_bytes, '\x55');
        client::ComputeOptions options;
        options.streams = streams;
        if (streams > 1) options.slice_bytes = 5 * row_bytes;
        const auto result = Embed(ids, dtype, rows.data(), options);
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_EQ(result->valid_rows,
                  ids.size() - static_cast<size_t>(std::count(ids.begin(), ids.end(), kPadding)));
        EXPECT_EQ(result->loss, 0.0);
        EXPECT_EQ(result->accumulated_rows, 0u);
        const std::vector<char> zeros(row_bytes);
        for (size_t row = 0; row < count; ++row) {
          const char* const want =
              ids[row] == kPadding ? zeros.data() : weight.data() + static_cast<size_t>(ids[row]) * row_bytes;
          ASSERT_EQ(std::memcmp(rows.data() + row * row_bytes, want, row_bytes), 0)
              << row << ": id " << ids[row];
        }
      }
    }
  }
  EXPECT_EQ(client_->transport().transport, GetParam().transport);
}

TEST_P(EmbeddingTest, GradientsAreAddedOnce) {
  Sums sums;
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> gradients;
  const std::vector<std::optional<float>> scales = {std::nullopt, 0.25f, -3.0f};
  for (uint64_t id = 0; id < 3; ++id) {
    ids.push_back(RandomIds(500));
    gradients.push_back(RandomRows(500));
    const auto added = AddGradients(id, ids[id], gradients[id], scales[id], id == 1 ? 4000 : 1 << 20);
    ASSERT_TRUE(added.ok()) << added.status();
    EXPECT_EQ(added->accumulated_rows, added->valid_rows);
    EXPECT_EQ(added->loss_sum, 0.0);
    sums.Add(ids[id], gradients[id], double{scales[id].value_or(1.0f)});
  }
  sums.ExpectEqual(Gradient());
  // Again: nothing is added.
  const std::vector<float> before = Gradient();
  for (uint64_t id = 0; id < 3; ++id) {
    const auto again = AddGradients(id, ids[id], gradients[id], scales[id]);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->accumulated_rows, 0u);
    EXPECT_EQ(again->repeated_rows, again->valid_rows);
  }
  EXPECT_EQ(Gradient(), before);
  // Others under the same id are refused.
  std::vector<int32_t> other = ids[1];
  other[17] = other[17] == 3 ? 4 : 3;
  const absl::Status refused = AddGradients(1, other, gradients[1], scales[1]).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_EQ(AddGradients(1, ids[1], gradients[1], 9.0f).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Gradient(), before);
}

// A tied head: gradients of its loss and of its embedding reach the same accumulators, and one step.
TEST_P(EmbeddingTest, SharesTheStepWithALoss) {
  const std::vector<int32_t> targets = RandomIds(300), ids = RandomIds(300);
  const std::vector<float> hidden = RandomRows(300), gradients = RandomRows(300);
  const client::Microbatch loss{.head = "lm",
                                .step = 0,
                                .id = 0,
                                .hidden_size = kHidden,
                                .hidden_dtype = v1::DTYPE_FP32,
                                .hidden = hidden.data(),
                                .targets = targets};
  client::ComputeOptions options;
  options.accumulate_gradients = true;
  ASSERT_TRUE(client_->ComputeLoss(loss, {}, options).ok());
  const std::vector<float> of_loss = Gradient();
  ASSERT_TRUE(AddGradients(1, ids, gradients).ok());
  Sums sums;
  sums.Add(ids, gradients, 1.0);
  std::vector<float> both = Gradient();
  for (size_t i = 0; i < both.size(); ++i) {
    ASSERT_NEAR(both[i], sums.sum[i] + double{of_loss[i]},
                kTolerance * (sums.size[i] + std::fabs(of_loss[i])));
  }
  // A microbatch is one or the other.
  EXPECT_EQ(AddGradients(0, targets, gradients).status().code(), absl::StatusCode::kFailedPrecondition);

  std::vector<float> before(kHidden), after(kHidden);
  const auto version = Embed({7}, v1::DTYPE_FP32, before.data());
  ASSERT_TRUE(version.ok());
  v1::ApplyStepRequest step;
  step.set_head("lm");
  step.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.1);
  step.add_expected_microbatches(0);
  step.add_expected_microbatches(1);
  const auto applied = client_->ApplyStep(step);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->microbatches(), 2u);
  const auto next = Embed({7}, v1::DTYPE_FP32, after.data());
  ASSERT_TRUE(next.ok());
  EXPECT_NE(after, before);
  EXPECT_NE(next->weights_version, version->weights_version);
  EXPECT_EQ(next->step, 1u);
  EXPECT_EQ(AddGradients(2, ids, gradients).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(EmbeddingTest, NotFiniteGradientsAreLeftOut) {
  const std::vector<int32_t> ids(400, 5);
  std::vector<float> gradients = RandomRows(400);
  gradients[333 * kHidden + 2] = NAN;
  const absl::Status status = AddGradients(0, ids, gradients, std::nullopt, 1 << 20).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("row 333"));
  for (const float x : Gradient()) ASSERT_TRUE(std::isfinite(x));
  // A scale that makes them infinite is found, too; a padding row may be anything.
  if (GetParam().deterministic) return;  // what comes after waits for the rows that failed
  gradients[333 * kHidden + 2] = 1e38f;
  EXPECT_EQ(AddGradients(1, ids, gradients, 1e20f).status().code(), absl::StatusCode::kOutOfRange);
  std::vector<int32_t> padded(400, 5);
  padded[333] = kPadding;
  gradients[333 * kHidden + 2] = INFINITY;
  EXPECT_TRUE(AddGradients(2, padded, gradients).ok());
}

TEST_P(EmbeddingTest, DeterministicSumsKeepTheirBits) {
  if (!GetParam().deterministic) GTEST_SKIP() << "sums depend on the order of arrival";
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> gradients;
  for (int id = 0; id < 4; ++id) {
    ids.push_back(RandomIds(200));
    gradients.push_back(RandomRows(200));
  }
  std::vector<float> first;
  for (const std::vector<uint64_t>& order : {std::vector<uint64_t>{0, 1, 2, 3}, {3, 1, 0, 2}, {2, 3, 1, 0}}) {
    ASSERT_TRUE(client_->ZeroGradients("lm", 0).ok());
    std::vector<client::PendingLoss> pending;
    client::ComputeOptions options;
    options.accumulate_gradients = true;
    for (const uint64_t id : order) {
      const client::Microbatch microbatch{.head = "lm",
                                          .step = 0,
                                          .id = id,
                                          .hidden_size = kHidden,
                                          .hidden_dtype = v1::DTYPE_FP32,
                                          .hidden = gradients[id].data(),
                                          .targets = ids[id],
                                          .embedding = v1::EMBEDDING_GRADIENTS};
      pending.push_back(client_->ComputeLossAsync(microbatch, {}, options));
    }
    for (client::PendingLoss& call : pending) ASSERT_TRUE(call.Wait().ok());
    if (first.empty()) first = Gradient();
    EXPECT_EQ(Gradient(), first);
  }
}

TEST_P(EmbeddingTest, HeadsThatCannotServe) {
  std::vector<float> rows(kHidden);
  std::vector<int32_t> ids = {3};
  ASSERT_TRUE(Create("frozen", [](v1::HeadSpec& spec) { spec.set_frozen(true); }).ok());
  client::Microbatch microbatch{.head = "frozen",
                                .step = 0,
                                .hidden_size = kHidden,
                                .hidden_dtype = v1::DTYPE_FP32,
                                .targets = ids,
                                .embedding = v1::EMBEDDING_ROWS};
  EXPECT_TRUE(client_->ComputeLoss(microbatch, {.grad_hidden = rows.data()}, {}).ok())
      << "a frozen head serves rows";
  microbatch.hidden = rows.data();
  microbatch.embedding = v1::EMBEDDING_GRADIENTS;
  client::ComputeOptions options;
  options.accumulate_gradients = true;
  EXPECT_EQ(client_->ComputeLoss(microbatch, {}, options).status().code(),
            absl::StatusCode::kFailedPrecondition);

  const auto expect_refused = [&](const std::string& head, absl::StatusCode code) {
    const client::Microbatch of{.head = head,
                                .hidden_size = kHidden,
                                .hidden_dtype = v1::DTYPE_FP32,
                                .targets = ids,
                                .embedding = v1::EMBEDDING_ROWS};
    const absl::Status status = client_->ComputeLoss(of, {.grad_hidden = rows.data()}, {}).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("open.embedding"));
  };
  const absl::Status listed = Create("draft", [](v1::HeadSpec& spec) {
    spec.set_full_vocab_size(100);
    for (uint32_t i = 0; i < kClasses; ++i) spec.add_class_list(i + 3);
  });
  if (listed.ok()) expect_refused("draft", absl::StatusCode::kInvalidArgument);
}

TEST_P(EmbeddingTest, AHeadWithoutLogitsIsAnEmbeddingAlone) {
  const auto alone = [](v1::HeadSpec& spec) {
    spec.set_logits(v1::LOGITS_NONE);
    spec.set_bias(false);
    spec.set_norm(v1::NORM_NONE);
  };
  const auto refused = [&](const std::function<void(v1::HeadSpec&)>& change) {
    return std::string(Create("alone", [&](v1::HeadSpec& spec) { alone(spec), change(spec); }).message());
  };
  EXPECT_THAT(refused([](auto& spec) { spec.set_bias(true); }),
              HasSubstr("bias must be false without logits"));
  EXPECT_THAT(refused([](auto& spec) { spec.set_norm(v1::NORM_LAYERNORM); }),
              HasSubstr("norm must be none without logits"));
  ASSERT_TRUE(client_->DeleteHead("lm").ok());
  ASSERT_TRUE(Create("lm", alone).ok());
  ASSERT_TRUE(
      Create("both", [&](v1::HeadSpec& spec) { alone(spec), spec.set_logits(v1::LOGITS_STORED); }).ok());
  std::vector<float> weight(kClasses * kHidden);
  for (float& x : weight) x = normal_(rng_);
  ASSERT_TRUE(client_->WriteTensor("lm", v1::PARAM_WEIGHT, weight).ok());
  const auto described = client_->DescribeHead("lm"), both = client_->DescribeHead("both");
  ASSERT_TRUE(described.ok() && both.ok());
  EXPECT_EQ(described->spec().logits(), v1::LOGITS_NONE);
  EXPECT_LT(described->memory().workspace(), both->memory().workspace());

  const std::vector<int32_t> ids = RandomIds(300);
  std::vector<float> rows(ids.size() * kHidden);
  ASSERT_TRUE(Embed(ids, v1::DTYPE_FP32, rows.data()).ok());
  for (size_t row = 0; row < ids.size(); ++row) {
    for (size_t j = 0; j < kHidden; ++j) {
      ASSERT_EQ(rows[row * kHidden + j],
                ids[row] == kPadding ? 0.0f : weight[static_cast<size_t>(ids[row]) * kHidden + j]);
    }
  }
  const std::vector<float> gradients = RandomRows(ids.size());
  Sums sums;
  ASSERT_TRUE(AddGradients(0, ids, gradients).ok());
  sums.Add(ids, gradients, 1.0);
  sums.ExpectEqual(Gradient());

  std::vector<int32_t> targets(4, 1);
  const client::Microbatch loss{.head = "lm",
                                .hidden_size = kHidden,
                                .hidden_dtype = v1::DTYPE_FP32,
                                .hidden = rows.data(),
                                .targets = targets};
  const absl::Status status = client_->ComputeLoss(loss, {}, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("open.embedding is required: the head is an embedding alone (LOGITS_NONE)"));
  sums.ExpectEqual(Gradient());
}

// ---- What clients can get wrong ----

class EmbeddingInputTest : public BadInputTest {
 protected:
  absl::Status Run(const std::function<void(v1::OpenMicrobatch&)>& spoil, const std::string& payload = "",
                   int64_t slice_begin = 0, int64_t slice_end = kRows) {
    v1::OpenMicrobatch open;
    open.set_head("head");
    open.set_microbatch_rows(kRows);
    open.mutable_rows()->set_end(kRows);
    open.set_hidden_dtype(v1::DTYPE_FP32);
    open.set_reduction(v1::REDUCTION_SUM);
    open.set_embedding(v1::EMBEDDING_ROWS);
    open.set_want_grad_hidden(true);
    for (int i = 0; i < kRows; ++i) open.add_targets(i % 3);
    spoil(open);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(slice_begin, slice_end, payload);
    stream->HalfClose();
    return stream->Finish().status;
  }
  // Of gradients.
  absl::Status RunGradients(const std::function<void(v1::OpenMicrobatch&)>& spoil) {
    return Run(
        [&](v1::OpenMicrobatch& open) {
          open.set_embedding(v1::EMBEDDING_GRADIENTS);
          open.set_want_grad_hidden(false);
          open.set_accumulate_gradients(true);
          open.set_step(0);
          spoil(open);
        },
        Payload(0, kRows));
  }
};

TEST_F(EmbeddingInputTest, Ids) {
  EXPECT_TRUE(Run([](auto&) {}).ok());
  ExpectInvalid(Run([](auto& open) { open.set_targets(2, 1 << 20); }), "open.targets[2]", "1048576");
  ExpectInvalid(Run([](auto& open) { open.set_targets(1, -7); }), "open.targets[1]", "-7");
  ExpectInvalid(Run([](auto& open) { open.set_embedding(static_cast<v1::Embedding>(9)); }), "open.embedding",
                "9");
}

TEST_F(EmbeddingInputTest, RowsOfASlice) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const auto& [begin, end] :
       {std::pair<int64_t, int64_t>{0, kRows + 1}, {3, 3}, {0, kMost}, {kMost - 1, kMost}}) {
    const absl::Status status = Run([](auto&) {}, "", begin, end);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("slice.rows")) << begin << " " << end;
  }
}

TEST_F(EmbeddingInputTest, WhatALossHas) {
  const std::pair<std::string, std::function<void(v1::OpenMicrobatch&)>> cases[] = {
      {"open.reduction", [](auto& open) { open.set_reduction(v1::REDUCTION_MEAN); }},
      {"open.want_row_loss", [](auto& open) { open.set_want_row_loss(true); }},
      {"open.want_row_lse", [](auto& open) { open.set_want_row_lse(true); }},
      {"open.want_row_entropy", [](auto& open) { open.set_want_row_entropy(true); }},
      {"open.want_row_logprob", [](auto& open) { open.set_want_row_logprob(true); }},
      {"open.want_row_argmax", [](auto& open) { open.set_want_row_argmax(true); }},
      {"open.top_k", [](auto& open) { open.set_top_k(2); }},
      {"open.target_count", [](auto& open) { open.set_target_count(2); }},
      {"open.row_weights",
       [](auto& open) {
         for (int i = 0; i < kRows; ++i) open.add_row_weights(1.0f);
       }},
      {"open.depths", [](auto& open) { open.add_depths()->set_rows(kRows); }},
      {"open.options.label_smoothing", [](auto& open) { open.mutable_options()->set_label_smoothing(0.1f); }},
      {"open.options.z_loss", [](auto& open) { open.mutable_options()->set_z_loss(0.1f); }},
      {"open.options.softcap", [](auto& open) { open.mutable_options()->set_softcap(30.0f); }},
      {"open.options.logit_scale", [](auto& open) { open.mutable_options()->set_logit_scale(2.0f); }},
      {"open.options.gradients",
       [](auto& open) { open.mutable_options()->set_gradients(v1::GRADIENTS_SAMPLED); }},
      {"open.options.objective",
       [](auto& open) { open.mutable_options()->mutable_objective()->set_kind(v1::OBJECTIVE_DFT); }}};
  for (const auto& [field, spoil] : cases) {
    SCOPED_TRACE(field);
    for (const absl::Status& status : {Run(spoil), RunGradients(spoil)}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(field));
    }
  }
}

TEST_F(EmbeddingInputTest, WhatGoesInAndOut) {
  ExpectInvalid(Run([](auto&) {}, Payload(0, kRows)), "payload", "480 bytes");
  ExpectInvalid(Run([](auto& open) { open.set_want_grad_hidden(false); }), "open.want_grad_hidden", "false");
  ExpectInvalid(Run([](auto& open) {
                  open.set_accumulate_gradients(true);
                  open.set_step(0);
                }),
                "open.accumulate_gradients", "true");
  ExpectInvalid(Run([](auto& open) { open.set_grad_output(2.0f); }), "open.grad_output", "2");
  ExpectInvalid(RunGradients([](auto& open) { open.set_want_grad_hidden(true); }), "open.want_grad_hidden",
                "true");
  ExpectInvalid(RunGradients([](auto& open) { open.set_accumulate_gradients(false); }),
                "open.accumulate_gradients", "false");
  ExpectInvalid(RunGradients([](auto& open) { open.set_grad_output(NAN); }), "open.grad_output", "nan");
}

}  // namespace
}  // namespace lossd::app::testing::embedding_test
