// SPDX-License-Identifier: Apache-2.0
// Sessions of calls: heads are made, trained, read, saved ones loaded, and every field of every request may
// be wrong. service_in_memory.h says what is checked.
//
// Input: a Session (session.proto) as text.
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/text_format.h>
#include <stdlib.h>

#include <cstring>
#include <string>

#include "server/log/log.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/message_mutator.h"
#include "tests/fuzz/service_in_memory.h"
#include "tests/fuzz/session.pb.h"

namespace lossd::fuzz {
namespace {

constexpr int kMostCalls = 24;

// False if it is none; says nothing on stderr.
bool Parse(const uint8_t* data, size_t size, Session* session) {
  class Silent final : public google::protobuf::io::ErrorCollector {
    void AddError(int, google::protobuf::io::ColumnNumber, const std::string&) override {}
  } silent;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&silent);
  parser.SetRecursionLimit(20);
  if (parser.ParseFromString(std::string(AsText(data, size)), session)) return true;
  session->Clear();
  return false;
}

size_t Print(const Session& session, uint8_t* data, size_t max_size) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(session, &text);
  if (text.size() > max_size) return 0;
  std::memcpy(data, text.data(), text.size());
  return text.size();
}

// A folder with a checkpoint and a tensor file, which no call changes.
std::string MakeFolder() {
  std::string folder = "/tmp/lossd_fuzz_XXXXXX";
  FUZZ_CHECK(mkdtemp(folder.data()) != nullptr, folder);
  Session session;
  const std::string text =
      R"(calls { create_head { spec { name: "h" hidden_size: 2 vocab_size: 3 } zeros {} } })";
  FUZZ_CHECK(Parse(reinterpret_cast<const uint8_t*>(text.data()), text.size(), &session), text);
  ServiceInMemory service(folder);
  service.Run(session.calls(0));
  v1::SaveCheckpointRequest save;
  save.set_head("h");
  save.set_name("saved");
  const auto saved = service.operations().checkpoints().Save(save, {});
  FUZZ_CHECK(saved.ok(), saved.status().ToString());
  return folder;
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);
  lossd::log::Configure(lossd::log::LogLevel::kOff, lossd::log::LogFormat::kText);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  using namespace lossd::fuzz;
  Session session;
  Parse(data, size, &session);
  MessageMutator mutator(seed);
  for (size_t changes = 1 + mutator.Below(3); changes > 0; --changes) mutator.Mutate(&session);
  const size_t printed = Print(session, data, max_size);
  return printed > 0 ? printed : size;
}

extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* data1, size_t size1, const uint8_t* data2,
                                            size_t size2, uint8_t* out, size_t max_size, unsigned seed) {
  using namespace lossd::fuzz;
  Session first, second;
  if (!Parse(data1, size1, &first) || !Parse(data2, size2, &second)) return 0;
  // The beginning of one and the end of the other.
  MessageMutator mutator(seed);
  const auto keep = static_cast<int>(mutator.Below(static_cast<size_t>(first.calls_size()) + 1));
  while (first.calls_size() > keep) first.mutable_calls()->RemoveLast();
  const auto from = static_cast<int>(mutator.Below(static_cast<size_t>(second.calls_size()) + 1));
  for (int i = from; i < second.calls_size(); ++i) *first.add_calls() = second.calls(i);
  return Print(first, out, max_size);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lossd;
  static const std::string folder = fuzz::MakeFolder();
  fuzz::Session session;
  if (!fuzz::Parse(data, size, &session) || session.calls_size() > fuzz::kMostCalls) return -1;
  fuzz::ServiceInMemory service(folder);
  for (const fuzz::Call& call : session.calls()) service.Run(call);
  return 0;
}
