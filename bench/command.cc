// SPDX-License-Identifier: Apache-2.0
// Parses the flags of a benchmark and runs the command that is asked for (command.h).
#include "bench/command.h"

#include <cstdlib>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace lossd::bench {
namespace {

[[noreturn]] void RefuseArgument(absl::string_view command, absl::string_view why) {
  std::cerr << command << ": " << why << "; --help lists the flags" << std::endl;
  std::exit(2);
}

std::string ListCommands(absl::string_view program, absl::Span<const Command> commands) {
  std::string text = absl::StrCat("usage: ", program, " COMMAND [FLAG...]\n");
  for (const Command& command : commands) {
    absl::StrAppendFormat(&text, "  %-12s %s\n", command.name, command.summary);
  }
  absl::StrAppend(&text, program, " COMMAND --help lists the flags of a command.\n");
  return text;
}

}  // namespace

CommandFlags::AnyFlag* CommandFlags::Find(absl::string_view name) const {
  for (AnyFlag* const flag : flags_) {
    if (flag->name() == name) return flag;
  }
  return nullptr;
}

std::string CommandFlags::Help(absl::string_view command) const {
  std::string text = absl::StrCat("flags of ", command, ":\n");
  for (const AnyFlag* const flag : flags_) {
    absl::StrAppend(&text, "  --", flag->name(), " (", flag->help(), "); default: ", flag->Text(), "\n");
  }
  return text;
}

void CommandFlags::Parse(int argc, char** argv) {
  const absl::string_view command = argv[0];
  for (int i = 1; i < argc; ++i) {
    absl::string_view name = argv[i];
    if (!absl::ConsumePrefix(&name, "--")) {
      RefuseArgument(command, absl::StrCat("unexpected argument '", argv[i], "'"));
    }
    if (name == "help") {
      std::cout << Help(command);
      std::exit(0);
    }
    const size_t equals = name.find('=');
    const bool has_value = equals != absl::string_view::npos;
    absl::string_view value = has_value ? name.substr(equals + 1) : "";
    name = name.substr(0, equals);
    AnyFlag* flag = Find(name);
    if (!has_value && flag != nullptr && flag->is_bool()) {
      value = "true";
    } else if (AnyFlag* const negated = absl::ConsumePrefix(&name, "no") ? Find(name) : nullptr;
               flag == nullptr && !has_value && negated != nullptr && negated->is_bool()) {
      flag = negated;
      value = "false";
    } else if (flag != nullptr && !has_value) {
      if (++i == argc) RefuseArgument(command, absl::StrCat("--", flag->name(), " needs a value"));
      value = argv[i];
    }
    if (flag == nullptr) RefuseArgument(command, absl::StrCat("unknown flag '", argv[i], "'"));
    if (std::string error; !flag->Set(value, &error)) {
      RefuseArgument(command, absl::StrCat("--", flag->name(), ": invalid value '", value, "'",
                                           error.empty() ? "" : ": ", error));
    }
  }
}

int RunCommand(int argc, char** argv, absl::Span<const Command> commands) {
  const std::string path = argv[0];
  const std::string program = path.substr(path.rfind('/') + 1);
  if (argc > 1) {
    const absl::string_view name = argv[1];
    if (name == "--help") {
      std::cout << ListCommands(program, commands);
      return 0;
    }
    for (const Command& command : commands) {
      if (name == command.name) return command.run(argc - 1, argv + 1);
    }
    std::cerr << program << ": unknown command '" << name << "'\n";
  }
  std::cerr << ListCommands(program, commands);
  return 2;
}

}  // namespace lossd::bench
