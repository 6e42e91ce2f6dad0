// SPDX-License-Identifier: Apache-2.0
// Random changes of a protobuf message by its structure: what comes out is always a message, with values that
// code tends to trip over. libFuzzer's own changes of bytes seldom get beyond the parser.
#ifndef LOSSD_TESTS_FUZZ_MESSAGE_MUTATOR_H_
#define LOSSD_TESTS_FUZZ_MESSAGE_MUTATOR_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace lossd::fuzz {

// Thread-compatible. The same seed makes the same changes.
class MessageMutator {
 public:
  explicit MessageMutator(uint32_t seed) : random_(seed) {}

  // Changes one field anywhere in `message`: sets, clears, adds, removes, copies or moves it.
  void Mutate(google::protobuf::Message* message);
  // A number below `count`, which is not 0.
  size_t Below(size_t count) { return static_cast<size_t>(random_() % count); }

 private:
  using Field = google::protobuf::FieldDescriptor;
  using Message = google::protobuf::Message;

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

}  // namespace lossd::fuzz

#endif  // LOSSD_TESTS_FUZZ_MESSAGE_MUTATOR_H_
