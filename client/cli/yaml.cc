// SPDX-License-Identifier: Apache-2.0
#include "client/cli/yaml.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/json.h"

namespace lossd::cli {
namespace {

std::string QuotedYaml(const std::string& text) {
  // Of JSON's escapes for bytes that are not UTF-8 or not printable, all are YAML's, too. DEL and the
  // controls behind it, which JSON leaves as they are, are not allowed in YAML.
  std::string json = Json(text).dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  std::string quoted;
  for (size_t i = 0; i < json.size(); ++i) {
    const auto byte = static_cast<unsigned char>(json[i]);
    const auto next = i + 1 < json.size() ? static_cast<unsigned char>(json[i + 1]) : 0;
    if (byte == 0x7f) {
      absl::StrAppend(&quoted, "\\x7f");
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {
      absl::StrAppend(&quoted, "\\x", absl::Hex(next, absl::kZeroPad2));
      ++i;
    } else {
      quoted += json[i];
    }
  }
  return quoted;
}

// Words that some parser takes for a boolean or for nothing.
bool IsReserved(const std::string& text) {
  constexpr std::array<const char*, 9> kWords = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"};
  const std::string lower = absl::AsciiStrToLower(text);
  return std::find(kWords.begin(), kWords.end(), lower) != kWords.end();
}

// A text that begins with a letter and has nothing in it that means something in YAML.
bool IsPlain(const std::string& text) {
  if (text.empty() || text.size() > 200 || !absl::ascii_isalpha(text.front()) || text.back() == ' ')
    return false;
  return !IsReserved(text) && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(c) || absl::StrContains(" _-./+()", c);
  });
}

std::string Text(const std::string& text) { return IsPlain(text) ? text : QuotedYaml(text); }

std::string Scalar(const Json& value) {
  if (value.is_string()) return Text(value.get_ref<const std::string&>());
  std::string text = value.dump();
  const size_t exponent = text.find('e');
  if (value.is_number_float() && exponent != std::string::npos && !absl::StrContains(text, '.')) {
    text.insert(exponent, ".0");  // YAML 1.1 takes a number without a point for a string
  }
  return text;
}

bool IsBlock(const Json& value) { return value.is_structured() && !value.empty(); }

void Append(const Json& value, size_t indent, std::string* out);

// `value` behind "name:" or "-".
void AppendBehind(const Json& value, size_t indent, std::string* out) {
  if (!IsBlock(value)) {
    absl::StrAppend(out, " ", Scalar(value), "\n");
    return;
  }
  absl::StrAppend(out, "\n");
  Append(value, indent, out);
}

void Append(const Json& value, size_t indent, std::string* out) {
  const std::string space(indent, ' ');
  if (value.is_object()) {
    for (const auto& [name, member] : value.items()) {
      absl::StrAppend(out, space, Text(name), ":");
      AppendBehind(member, indent + 2, out);
    }
    return;
  }
  for (const Json& element : value) {
    if (!element.is_object() || element.empty()) {
      absl::StrAppend(out, space, "-");
      AppendBehind(element, indent + 2, out);
      continue;
    }
    const size_t begin = out->size();
    Append(element, indent + 2, out);
    (*out)[begin + indent] = '-';  // "  name: x" as "- name: x"
  }
}

}  // namespace

std::string ToYaml(const Json& document) {
  if (!IsBlock(document)) return absl::StrCat(Scalar(document), "\n");
  std::string text;
  Append(document, 0, &text);
  return text;
}

}  // namespace lossd::cli
