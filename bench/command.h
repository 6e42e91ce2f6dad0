// SPDX-License-Identifier: Apache-2.0
// CommandFlags and RunCommand: a program that has several benchmarks as commands, each with its own flags,
// such as `server_bench checkpoint --rounds=3`.
//
//   struct Flags : CommandFlags {
//     Flag<int> rounds{this, "rounds", 5, "saves and loads"};
//   } flags;
//
//   int RunCheckpointBench(int argc, char** argv) {
//     flags.Parse(argc, argv);
//     for (int i = 0; i < *flags.rounds; ++i) ...
//   }
//
// Flags are written as Abseil's: --name=value or --name value; a bool also as --name or --noname. Elements of
// a list are separated by commas. Not thread-safe.
#ifndef LOSSD_BENCH_COMMAND_H_
#define LOSSD_BENCH_COMMAND_H_

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/flags/marshalling.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::bench {

class CommandFlags {
 public:
  CommandFlags(const CommandFlags&) = delete;
  CommandFlags& operator=(const CommandFlags&) = delete;

  // Sets the flags that `argv` names, from argv[1] on; argv[0] is the command's name. On an unknown flag, a
  // value that cannot be parsed, or a word that is not a flag, the program ends with a message and status 2.
  // After --help it ends with status 0.
  void Parse(int argc, char** argv);

 protected:
  class AnyFlag {
   public:
    AnyFlag(CommandFlags* owner, const char* name, const char* help) : name_(name), help_(help) {
      owner->flags_.push_back(this);
    }
    virtual ~AnyFlag() = default;
    virtual bool is_bool() const = 0;
    virtual bool Set(absl::string_view text, std::string* error) = 0;
    virtual std::string Text() const = 0;

    const char* name() const { return name_; }
    const char* help() const { return help_; }

   private:
    const char* const name_;
    const char* const help_;
  };

  // T: any type that Abseil's flags can have.
  template <typename T>
  class Flag final : public AnyFlag {
   public:
    Flag(CommandFlags* owner, const char* name, T value, const char* help)
        : AnyFlag(owner, name, help), value_(std::move(value)) {}
    const T& operator*() const { return value_; }
    const T* operator->() const { return &value_; }

   private:
    bool is_bool() const override { return std::is_same_v<T, bool>; }
    bool Set(absl::string_view text, std::string* error) override {
      return absl::ParseFlag(text, &value_, error);
    }
    std::string Text() const override { return absl::UnparseFlag(value_); }

    T value_;
  };

  CommandFlags() = default;
  ~CommandFlags() = default;

 private:
  AnyFlag* Find(absl::string_view name) const;
  std::string Help(absl::string_view command) const;

  std::vector<AnyFlag*> flags_;  // in the order in which the struct declares them
};

struct Command {
  const char* name;
  const char* summary;                // what it measures
  int (*run)(int argc, char** argv);  // argv[0] is the command's name. Returns the exit status.
};

// The main function of a program with these commands. Runs the command that argv[1] names, with the arguments
// after it. Without a command, or with an unknown one, it prints the list of commands and returns 2; after
// --help it returns 0.
int RunCommand(int argc, char** argv, absl::Span<const Command> commands);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_COMMAND_H_
