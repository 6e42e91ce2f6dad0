// SPDX-License-Identifier: Apache-2.0
#include "client/plan/trainer_memory.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "client/plan/measured.h"
#include "client/plan/plan.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::plan::trainer_memory_test {
namespace {

using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

Model Llama() {
  return {.name = "llama", .hidden = 4096, .vocab = 128'256, .layers = 32, .parameters = 8'030'261'248};
}

TrainerShape Shape() {
  return {.gpus = 16, .memory_bytes = int64_t{75} << 30, .rows = 65'536, .parameters = 8'030'261'248};
}

// ---- what was published ----

double Megabytes(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Memory by part and the largest batches of all models of the table, by the code of `lossctl plan`:
// parameters counted from the configuration, MakePlan.
TEST(TrainerMemoryBesidePublished, IsThatOfEveryModel) {
  std::ifstream file(LOSSD_PUBLISHED_MEMORY);
  ASSERT_TRUE(file) << LOSSD_PUBLISHED_MEMORY;
  const Json published = Json::parse(file);
  const Json& setting = published.at("setting");
  const auto measured = ParseMeasured(BuiltinMeasured());
  ASSERT_TRUE(measured.ok()) << measured.status();
  ASSERT_EQ(published.at("models").size(), 15u);
  for (const Json& theirs : published.at("models")) {
    SCOPED_TRACE(theirs.at("name").get<std::string>());
    absl::StatusOr<Model> model = ParseModel(theirs.at("config").dump());
    ASSERT_TRUE(model.ok()) << model.status();
    ASSERT_GT(model->parameters, 0);
    Request request;
    request.model = *model;
    request.model.vocab = theirs.at("vocab");
    request.rows = setting.at("rows");
    request.trainer = {.gpus = setting.at("gpus"),
                       .memory_bytes = setting.at("gpu_memory_bytes"),
                       .parameters = model->parameters + theirs.at("masks").get<int64_t>(),
                       .bytes_per_parameter = setting.at("bytes_per_parameter"),
                       .logit_bytes = setting.at("bytes_per_logit")};
    const auto plan = MakePlan(request, *measured);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto& [before, after, server] = plan->trainer_memory->heads;
    // The table has whole megabytes and rows, rounded to the nearest; the plan rounds rows down.
    const Json& megabytes = theirs.at("megabytes");
    EXPECT_NEAR(Megabytes(before.state_bytes), megabytes.at("state").get<double>(), 0.5);
    EXPECT_NEAR(Megabytes(before.logit_bytes), megabytes.at("logits").get<double>(), 0.5);
    EXPECT_NEAR(Megabytes(before.activation_bytes), megabytes.at("activations").get<double>(), 0.5);
    EXPECT_EQ(after.TotalBytes(), before.TotalBytes() - before.logit_bytes);
    const Json& rows = theirs.at("largest_batch");
    EXPECT_NEAR(static_cast<double>(before.largest_batch), rows.at("before").get<double>(), 1.0);
    EXPECT_NEAR(static_cast<double>(after.largest_batch), rows.at("after").get<double>(), 1.0);
    // What no other publication has: the head's state leaves, too, unless the embedding needs it.
    if (request.model.tied) {
      EXPECT_EQ(server.largest_batch, after.largest_batch);
    } else {
      EXPECT_GT(server.largest_batch, after.largest_batch);
    }
  }
}

// ---- the rest ----

TEST(TrainerMemory, ABatchFitsUpToTheLargest) {
  TrainerShape shape = Shape();
  shape.head_parameters = int64_t{4096} * 128'256;
  const auto planned = MemoryOfTrainer(Llama(), shape);
  ASSERT_TRUE(planned.ok()) << planned.status();
  for (const HeadMemory& head : planned->heads) {
    for (const int64_t more : {0, 1}) {
      shape.rows = head.largest_batch + more;
      const auto full = MemoryOfTrainer(Llama(), shape);
      ASSERT_TRUE(full.ok()) << full.status();
      const HeadMemory& same = full->heads[static_cast<size_t>(head.head)];
      EXPECT_EQ(same.head, head.head);
      EXPECT_EQ(full->Fits(same), more == 0) << Name(head.head);
      EXPECT_EQ(same.largest_batch, head.largest_batch) << Name(head.head);
    }
  }
}

TEST(TrainerMemory, AServerTakesTheStateOfTheHead) {
  TrainerShape shape = Shape();
  shape.head_parameters = int64_t{4096} * 128'256;
  const auto planned = MemoryOfTrainer(Llama(), shape);
  ASSERT_TRUE(planned.ok()) << planned.status();
  const auto& [stored, fused, server] = planned->heads;
  EXPECT_EQ(stored.state_bytes, 16 * shape.parameters);  // by default
  EXPECT_EQ(fused.state_bytes, stored.state_bytes);
  EXPECT_EQ(server.state_bytes, stored.state_bytes - 16 * shape.head_parameters);
  EXPECT_EQ(server.logit_bytes, 0);
  EXPECT_EQ(server.activation_bytes, int64_t{65'536} * 32 * 4096 * 2);
}

TEST(TrainerMemory, AModelThatDoesNotFitHasNoBatch) {
  TrainerShape shape = Shape();
  shape.gpus = 1;
  const auto planned = MemoryOfTrainer(Llama(), shape);
  ASSERT_TRUE(planned.ok()) << planned.status();
  for (const HeadMemory& head : planned->heads) {
    EXPECT_EQ(head.largest_batch, 0);
    EXPECT_FALSE(planned->Fits(head));
  }
}

TEST(TrainerMemory, ActivationsAreAsGivenOrOfTheLayers) {
  Model model = Llama();
  model.layers = 0;
  EXPECT_THAT(MemoryOfTrainer(model, Shape()).status().message(), HasSubstr("layers"));
  TrainerShape shape = Shape();
  shape.activation_bytes = 1000;
  const auto planned = MemoryOfTrainer(model, shape);
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_EQ(planned->heads[0].activation_bytes, int64_t{65'536} * 1000);
}

TEST(TrainerMemory, APlanFillsInWhatItKnows) {
  Request request;
  request.model = Llama();
  const auto measured = ParseMeasured(BuiltinMeasured());
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_FALSE(MakePlan(request, *measured)->trainer_memory.has_value());
  request.trainer = TrainerShape{.gpus = 8};
  request.rows = 100'000;
  const auto plan = MakePlan(request, *measured);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const TrainerShape& shape = plan->trainer_memory->shape;
  EXPECT_EQ(shape.memory_bytes, plan->request.memory_bytes);
  EXPECT_EQ(shape.rows, 100'000);
  EXPECT_EQ(shape.parameters, 8'030'261'248);
  EXPECT_EQ(shape.activation_bytes, 32 * 4096 * 2);
  EXPECT_EQ(shape.head_parameters, int64_t{4096} * 128'256);
  request.model.tied = true;
  EXPECT_EQ(MakePlan(request, *measured)->trainer_memory->shape.head_parameters, 0);
  request.model.parameters = 0;
  EXPECT_THAT(MakePlan(request, *measured).status().message(),
              AllOf(HasSubstr("parameters must be given"), HasSubstr("llama")));
}

TEST(TrainerMemory, RefusesAShapeAndNamesTheField) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto message = [](const auto& change) {
    TrainerShape shape = Shape();
    change(shape);
    return std::string(MemoryOfTrainer(Llama(), shape).status().message());
  };
  EXPECT_THAT(message([](TrainerShape& s) { s.gpus = 0; }), HasSubstr("trainer_gpus"));
  EXPECT_THAT(message([](TrainerShape& s) { s.gpus = kMost; }), HasSubstr("trainer_gpus"));
  EXPECT_THAT(message([](TrainerShape& s) { s.memory_bytes = 0; }), HasSubstr("trainer_memory"));
  EXPECT_THAT(message([](TrainerShape& s) { s.memory_bytes = kMost; }), HasSubstr("trainer_memory"));
  EXPECT_THAT(message([](TrainerShape& s) { s.rows = 0; }), HasSubstr("trainer_rows"));
  EXPECT_THAT(message([](TrainerShape& s) { s.rows = kMost; }), HasSubstr("trainer_rows"));
  EXPECT_THAT(message([](TrainerShape& s) { s.parameters = 1'000'000; }),
              AllOf(HasSubstr("525336576 of the head"), HasSubstr("1000000")));
  EXPECT_THAT(message([](TrainerShape& s) { s.parameters = kMost; }), HasSubstr("parameters"));
  EXPECT_THAT(message([](TrainerShape& s) { s.bytes_per_parameter = 0.0; }),
              HasSubstr("bytes_per_parameter"));
  EXPECT_THAT(message([](TrainerShape& s) { s.bytes_per_parameter = std::nan(""); }),
              AllOf(HasSubstr("bytes_per_parameter"), HasSubstr("nan")));
  EXPECT_THAT(message([](TrainerShape& s) { s.activation_bytes = -1; }), HasSubstr("activation_bytes"));
  EXPECT_THAT(message([](TrainerShape& s) { s.logit_bytes = 65; }),
              AllOf(HasSubstr("logit_bytes"), HasSubstr("65")));
}

}  // namespace
}  // namespace lossd::plan::trainer_memory_test
