// SPDX-License-Identifier: Apache-2.0
// JSON that nests so deep that code which recurses without a limit runs out of stack. Random changes seldom
// get there.
#ifndef LOSSD_TESTS_FUZZ_NESTING_H_
#define LOSSD_TESTS_FUZZ_NESTING_H_

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lossd::fuzz {

struct Nesting {
  int depth = 0;
  size_t at = 0;  // behind the bracket that opens the innermost array
};

// Of arrays and objects. Brackets in strings nest nothing.
inline Nesting DeepestArray(absl::string_view text) {
  Nesting deepest;
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') {
      ++i;  // whatever it escapes
      continue;
    }
    if (c == '"') in_string = !in_string;
    if (in_string) continue;
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (c == '[' && depth > deepest.depth) deepest = {.depth = depth, .at = i + 1};
  }
  return deepest;
}

// `text` with 100,000 arrays more in the array that nests deepest.
inline std::string Deepened(absl::string_view text, const Nesting& deepest) {
  constexpr size_t kLevels = 100'000;
  const absl::string_view rest = text.substr(deepest.at);
  const bool last = !rest.empty() && rest[0] == ']';
  return absl::StrCat(text.substr(0, deepest.at), std::string(kLevels, '['), std::string(kLevels, ']'),
                      last ? "" : ",", rest);
}

}  // namespace lossd::fuzz

#endif  // LOSSD_TESTS_FUZZ_NESTING_H_
