// SPDX-License-Identifier: Apache-2.0
// Files whose tensors hold values that are no numbers: refused, unless they were asked for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "proto/tensorfile/safetensors.h"
#include "proto/wire/status_details.h"
#include "tests/server/service/heads_fixture.h"

namespace lossd::app::testing::non_finite_files_test {
namespace {

using ::testing::HasSubstr;

// A tensor of every type that a file may have, with one value that is none, at places before and after the
// pieces in which files are read.
class NonFiniteTest : public HeadsTest, public ::testing::WithParamInterface<kernels::DType> {
 protected:
  static constexpr int64_t kFileClasses = 1000;

  NonFiniteTest()
      : weight_(kFileClasses * kHidden, 0.5f),
        bias_(kFileClasses, -0.25f),
        class_weights_(kFileClasses, 2.0f) {
    std::filesystem::create_directories(server_.checkpoint_directory());
    request_ = Request("head");
    request_.mutable_spec()->set_vocab_size(kFileClasses);
    request_.mutable_spec()->set_norm(v1::NORM_NONE);
    v1::TensorFile& file = *request_.mutable_tensor_file();
    file.set_path("model.safetensors");
    file.set_weight("w");
    file.set_bias("b");
    file.set_class_weights("u");
  }

  absl::Status Create() {
    static const std::map<kernels::DType, formats::DType> types = {
        {kernels::DType::kFloat32, formats::DType::kFloat32},
        {kernels::DType::kFloat16, formats::DType::kFloat16},
        {kernels::DType::kBFloat16, formats::DType::kBFloat16}};
    const formats::DType type = types.at(GetParam());
    const std::string path = server_.checkpoint_directory() + "/model.safetensors";
    std::filesystem::remove(path);
    auto writer =
        formats::CreateSafetensors(path, {{{.name = "w", .dtype = type, .shape = {kFileClasses, kHidden}},
                                           {.name = "b", .dtype = type, .shape = {kFileClasses}},
                                           {.name = "u", .dtype = type, .shape = {kFileClasses}}}});
    EXPECT_TRUE(writer.ok()) << writer.status();
    for (const auto* values : {&weight_, &bias_, &class_weights_}) {
      EXPECT_TRUE((*writer)->Append(kernels::testing::Encode(GetParam(), *values)).ok());
    }
    EXPECT_TRUE((*writer)->Finish().ok());
    return client_->CreateHead(request_).status();
  }
  void ExpectRefused(const std::string& field, const std::string& what) {
    const absl::Status status = Create();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    EXPECT_THAT(std::string(status.message()), HasSubstr("in model.safetensors"));
    EXPECT_EQ(wire::GetErrorDetail(status).value_or(v1::ErrorDetail()).field(), "tensor_file." + field);
    EXPECT_EQ(client_->ListHeads()->heads_size(), 0);
  }
  void ExpectTaken() {
    const absl::Status status = Create();
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(client_->DeleteHead("head").ok());
  }

  std::vector<float> weight_, bias_, class_weights_;
  v1::CreateHeadRequest request_;
};
INSTANTIATE_TEST_SUITE_P(Types, NonFiniteTest,
                         ::testing::Values(kernels::DType::kFloat32, kernels::DType::kFloat16,
                                           kernels::DType::kBFloat16));

TEST_P(NonFiniteTest, AreRefusedUnlessAskedFor) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  ExpectTaken();
  for (const size_t at : {size_t{0}, size_t{5}, weight_.size() / 2 + 3, weight_.size() - 1}) {
    const std::string place = absl::StrCat(" at [", at / kHidden, ", ", at % kHidden, "] of 'w'");
    for (const auto& [value, text] : std::map<float, std::string>{{kInfinity, "inf"}, {-kInfinity, "-inf"}}) {
      weight_[at] = value;
      ExpectRefused("weight", absl::StrCat("got ", text, place));
    }
    weight_[at] = kNaN;
    ExpectRefused("weight",
                  absl::StrCat("finite values, unless tensor_file.allow_non_finite is set, got nan", place));
    weight_[weight_.size() - 1] = kNaN;  // the first one is named
    ExpectRefused("weight", place);
    request_.mutable_tensor_file()->set_allow_non_finite(true);
    ExpectTaken();
    request_.mutable_tensor_file()->set_allow_non_finite(false);
    weight_[at] = weight_[weight_.size() - 1] = 0.5f;
  }
  // A class that is masked by its bias.
  bias_[7] = -kInfinity;
  ExpectTaken();
  bias_[8] = kInfinity;
  ExpectRefused("bias", "got inf at [8] of 'b'");
  bias_[8] = -kNaN;
  ExpectRefused("bias", "got nan at [8] of 'b'");
  bias_[8] = 0;
}

TEST_P(NonFiniteTest, ClassWeightsAreNotNegative) {
  class_weights_[3] = 0;
  class_weights_[4] = -0.0f;
  ExpectTaken();
  class_weights_[999] = -0.5f;
  ExpectRefused("class_weights", "numbers below 0, got -0.5 at [999] of 'u'");
  request_.mutable_tensor_file()->set_allow_non_finite(true);
  ExpectRefused("class_weights", "got -0.5 at [999]");
  class_weights_[2] = std::numeric_limits<float>::quiet_NaN();
  class_weights_[999] = 1;
  ExpectTaken();
  request_.mutable_tensor_file()->set_allow_non_finite(false);
  ExpectRefused("class_weights", "got nan at [2] of 'u'");
}

}  // namespace
}  // namespace lossd::app::testing::non_finite_files_test
