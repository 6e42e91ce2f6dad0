// SPDX-License-Identifier: Apache-2.0
// Sessions of calls: heads are made, trained, read, saved ones loaded, and every field of every request may
// be wrong. service_in_memory.h says what is checked.
//
// Input: a Session (session.proto) as text.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/message.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/text_format.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "server/log/log.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/service_in_memory.h"
#include "tests/fuzz/session.pb.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);  // libFuzzer's

namespace lossd::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr int kMostCalls = 24;
constexpr int kMaxElements = 64;   // of a repeated field
constexpr size_t kMaxBytes = 512;  // of a field

// Random changes of a protobuf message by its structure: what comes out is always a message, with values that
// code tends to trip over. libFuzzer's own changes of bytes seldom get beyond the parser.
// Thread-compatible. The same seed makes the same changes.
class MessageMutator {
 public:
  explicit MessageMutator(uint32_t seed) : random_(seed) {}

  // Changes one field anywhere in `message`: sets, clears, adds, removes, copies or moves it.
  void Mutate(Message* message);
  // A number below `count`, which is not 0.
  size_t Below(size_t count) { return static_cast<size_t>(random_() % count); }

 private:
  using Field = FieldDescriptor;

  void MutateField(Message* message, const Field* field);
  void MutateSingular(Message* message, const Field* field);
  void MutateRepeated(Message* message, const Field* field);
  void Add(Message* message, const Field* field);
  // Sets a singular field, or element `index` of a repeated one, to a new value.
  void Set(Message* message, const Field* field, int index);

  uint64_t Whole(uint64_t old);
  double Real();
  std::string Text(const std::string& old);
  std::string Bytes(const std::string& old);

  std::minstd_rand random_;
};

// `message` and all messages in it.
void Collect(Message* message, std::vector<Message*>* all) {
  all->push_back(message);
  const Reflection* const reflection = message->GetReflection();
  std::vector<const FieldDescriptor*> set;
  reflection->ListFields(*message, &set);
  for (const FieldDescriptor* const field : set) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      Collect(reflection->MutableMessage(message, field), all);
      continue;
    }
    for (int i = 0; i < reflection->FieldSize(*message, field); ++i) {
      Collect(reflection->MutableRepeatedMessage(message, field, i), all);
    }
  }
}

void MessageMutator::Mutate(Message* message) {
  std::vector<Message*> all;
  Collect(message, &all);
  Message* const chosen = all[Below(all.size())];
  const auto* const descriptor = chosen->GetDescriptor();
  if (descriptor->field_count() == 0) return;
  // Rather one that is set: most fields of a oneof replace what makes the message interesting.
  std::vector<const FieldDescriptor*> set;
  chosen->GetReflection()->ListFields(*chosen, &set);
  const bool keep = !set.empty() && Below(3) != 0;
  MutateField(chosen, keep ? set[Below(set.size())]
                           : descriptor->field(
                                 static_cast<int>(Below(static_cast<size_t>(descriptor->field_count())))));
}

void MessageMutator::MutateField(Message* message, const Field* field) {
  if (field->is_repeated()) return MutateRepeated(message, field);
  MutateSingular(message, field);
}

void MessageMutator::MutateSingular(Message* message, const Field* field) {
  const Reflection* const reflection = message->GetReflection();
  if (reflection->HasField(*message, field) && Below(8) == 0) return reflection->ClearField(message, field);
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    Message* const inner = reflection->MutableMessage(message, field);
    if (inner->GetDescriptor()->field_count() > 0) Mutate(inner);
    return;
  }
  Set(message, field, -1);
}

void MessageMutator::MutateRepeated(Message* message, const Field* field) {
  const Reflection* const reflection = message->GetReflection();
  const int size = reflection->FieldSize(*message, field);
  if (size == 0) return Add(message, field);
  const auto index = static_cast<int>(Below(static_cast<size_t>(size)));
  switch (Below(4)) {
    case 0:
      if (size < kMaxElements) Add(message, field);
      break;
    case 1:
      reflection->SwapElements(message, field, index, size - 1);
      reflection->RemoveLast(message, field);
      break;
    case 2:
      reflection->SwapElements(message, field, index, static_cast<int>(Below(static_cast<size_t>(size))));
      break;
    default:
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        Mutate(reflection->MutableRepeatedMessage(message, field, index));
      } else {
        Set(message, field, index);
      }
  }
}

// A copy of another element, then changed, or an empty one.
void MessageMutator::Add(Message* message, const Field* field) {
  const Reflection* const reflection = message->GetReflection();
  const int size = reflection->FieldSize(*message, field);
  const bool copy = size > 0 && Below(4) != 0;
  const int from = size > 0 ? static_cast<int>(Below(static_cast<size_t>(size))) : 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE: {
      Message* const added = reflection->AddMessage(message, field);
      if (copy) added->CopyFrom(reflection->GetRepeatedMessage(*message, field, from));
      if (Below(2) == 0) Mutate(added);
      // Not always last: the order of calls matters.
      return reflection->SwapElements(message, field, size, from);
    }
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection->AddUInt64(message, field, Whole(0));
    case FieldDescriptor::CPPTYPE_UINT32:
      return reflection->AddUInt32(message, field, static_cast<uint32_t>(Whole(0)));
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection->AddInt32(message, field, static_cast<int32_t>(Whole(0)));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return reflection->AddFloat(message, field, static_cast<float>(Real()));
    default:
      return;  // the messages at hand repeat nothing else
  }
}

void MessageMutator::Set(Message* message, const Field* field, int index) {
  const Reflection* const r = message->GetReflection();
  const bool element = index >= 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT64: {
      const uint64_t value =
          Whole(element ? r->GetRepeatedUInt64(*message, field, index) : r->GetUInt64(*message, field));
      return element ? r->SetRepeatedUInt64(message, field, index, value)
                     : r->SetUInt64(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_UINT32: {
      const auto value = static_cast<uint32_t>(
          Whole(element ? r->GetRepeatedUInt32(*message, field, index) : r->GetUInt32(*message, field)));
      return element ? r->SetRepeatedUInt32(message, field, index, value)
                     : r->SetUInt32(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      const auto value = static_cast<int32_t>(Whole(Below(16)));
      return element ? r->SetRepeatedInt32(message, field, index, value) : r->SetInt32(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_FLOAT: {
      const auto value = static_cast<float>(Real());
      return element ? r->SetRepeatedFloat(message, field, index, value) : r->SetFloat(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return r->SetDouble(message, field, Real());
    case FieldDescriptor::CPPTYPE_BOOL:
      return r->SetBool(message, field, Below(2) == 0);
    case FieldDescriptor::CPPTYPE_ENUM:
      return r->SetEnumValue(message, field, static_cast<int>(Below(6)));  // some of them unknown
    case FieldDescriptor::CPPTYPE_STRING: {
      const std::string old = r->GetString(*message, field);
      const bool bytes = field->type() == FieldDescriptor::TYPE_BYTES;
      return r->SetString(message, field, bytes ? Bytes(old) : Text(old));
    }
    default:
      return;
  }
}

uint64_t MessageMutator::Whole(uint64_t old) {
  constexpr uint64_t kEdges[] = {0,
                                 1,
                                 2,
                                 3,
                                 16,
                                 42,
                                 255,
                                 4096,
                                 1u << 20,
                                 (uint64_t{1} << 31) - 1,
                                 uint64_t{1} << 31,
                                 uint64_t{1} << 32,
                                 (uint64_t{1} << 63) - 1,
                                 uint64_t{1} << 63,
                                 std::numeric_limits<uint64_t>::max()};
  switch (Below(4)) {
    case 0:
      return kEdges[Below(std::size(kEdges))];
    case 1:
      return old + 1;
    case 2:
      return old - 1;
    default:
      return Below(10);
  }
}

double MessageMutator::Real() {
  using Double = std::numeric_limits<double>;
  constexpr double kEdges[] = {0.0,
                               -0.0,
                               1.0,
                               -1.0,
                               0.5,
                               1e-30,
                               1e-45,
                               1e30,
                               3.4e38,
                               1e300,
                               Double::infinity(),
                               -Double::infinity(),
                               Double::quiet_NaN(),
                               2.0,
                               0.9};
  return Below(3) == 0 ? static_cast<double>(Below(1000)) / 100 : kEdges[Below(std::size(kEdges))];
}

std::string MessageMutator::Text(const std::string& old) {
  const std::string kTexts[] = {"",
                                "h",
                                "g",
                                "other",
                                ".",
                                "..",
                                "a/b",
                                "../h/saved",
                                "h/saved",
                                std::string(64, 'n'),
                                std::string(65, 'n'),
                                "model.safetensors",
                                "weight",
                                "bias",
                                "\xc3\xa9"};
  if (old.empty() || Below(3) != 0) return kTexts[Below(std::size(kTexts))];
  std::string text = old;
  text[Below(text.size())] = static_cast<char>(' ' + Below(95));
  const bool ascii = std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
  return ascii ? text : "h";  // a changed byte of a longer character is not UTF-8
}

std::string MessageMutator::Bytes(const std::string& old) {
  std::string bytes = old.substr(0, kMaxBytes);
  const size_t size = bytes.size();
  bytes.resize(kMaxBytes);
  bytes.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(bytes.data()), size, kMaxBytes));
  return bytes;
}

// ---- Sessions as text ----

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
