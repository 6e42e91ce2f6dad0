// SPDX-License-Identifier: Apache-2.0
// Runs golden cases (tests/client/golden/README.md) through the C++ client: one function for each kind of
// file, and what they share. A case that is not as it should be fails the current test.
#ifndef LOSSD_TESTS_CLIENT_CPP_GOLDEN_H_
#define LOSSD_TESTS_CLIENT_CPP_GOLDEN_H_

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/client.h"
#include "client/cpp/loss_call.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client::golden {

using nlohmann::json;

void RunPlan(const json& c);
void RunRegionPlan(const json& c);
void RunRegionSizes(const json& c);
void RunWire(const json& c);
void RunDecode(const json& c);
void RunStreamAnswers(const json& c);
void RunTensorAnswers(const json& c);
void RunStatuses(const json& c);
void RunIncarnations(const json& c);
void RunWaits(const json& c);
void RunConnections(const json& c);
void RunRepeats(const json& c);
void RunTargets(const json& c);
void RunListeners(const json& c);

// Throws std::invalid_argument for a case with a member that is not looked at, or without one that is.
void CheckMembers(const json& c, std::initializer_list<const char*> required,
                  std::initializer_list<const char*> optional = {});

// The status must be the error in member `fails` if the case has it, else OK.
void CheckStatus(const json& c, const absl::Status& status);
// The name of its code, RESTARTED or DISCARDED.
std::string ErrorName(const absl::Status& status);
absl::Status ErrorNamed(const std::string& code, const std::string& message);

v1::DType DTypeNamed(const std::string& name);
v1::Role RoleNamed(const std::string& name);
v1::Reduction ReductionNamed(const std::string& name);

std::string FromHex(const std::string& hex);
std::string ToHex(const std::string& bytes);
// Bytes [begin, end) of the payload of every case: the i-th is i modulo 251.
std::string Payload(uint64_t begin, uint64_t end);
grpc::ByteBuffer ToBuffer(const std::string& bytes);
std::string ToString(const grpc::ByteBuffer& buffer);
// `message` from protobuf's JSON.
void Parse(const json& fields, google::protobuf::Message* message);

// A call as "wire" and "stream answers" write it, with memory for its outputs that is not zero.
class Call {
 public:
  explicit Call(const json& call);

  const internal::LossWork& work() const { return *work_; }
  uint64_t rows() const { return rows_; }
  const std::string& grad_hidden() const { return grad_hidden_; }  // empty if not wanted
  json RowResults() const;

 private:
  void MakeForward(const json& call);
  void MakeBackward(const json& call);

  uint64_t rows_ = 0;
  std::string hidden_;
  std::string grad_hidden_;
  std::vector<std::string> names_;  // of the row results wanted
  std::vector<float> loss_, lse_, entropy_, logprob_;
  std::vector<int32_t> argmax_;
  std::unique_ptr<const internal::LossWork> work_;
};

}  // namespace lossd::client::golden

#endif  // LOSSD_TESTS_CLIENT_CPP_GOLDEN_H_
