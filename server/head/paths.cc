#include "server/head/paths.h"

#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/field_error.h"
#include "proto/tensorfile/file.h"

namespace lossd::head {
namespace {

constexpr size_t kMaxNameLength = 64;

bool IsNameCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
}

// `path` without symbolic links; nullopt with errno set if that fails.
std::optional<std::string> RealPath(const std::string& path) {
  const std::unique_ptr<char, decltype(&free)> real(realpath(path.c_str(), nullptr), &free);
  if (real == nullptr) return std::nullopt;
  return std::string(real.get());
}

absl::Status BadPath(absl::string_view path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("path '", absl::CHexEscape(path), "' ", what));
}

}  // namespace

absl::Status ValidateName(absl::string_view what, absl::string_view name) {
  if (!name.empty() && name.size() <= kMaxNameLength && name[0] != '.' &&
      std::all_of(name.begin(), name.end(), IsNameCharacter)) {
    return absl::OkStatus();
  }
  constexpr absl::string_view kRule =
      "must be 1 to 64 characters out of A-Z a-z 0-9 . _ - and not start with a dot";
  return errors::WithViolation(
      absl::InvalidArgumentError(absl::StrCat(what, " ", kRule, ", got '",
                                              absl::CHexEscape(name.substr(0, 2 * kMaxNameLength)), "'")),
      {std::string(what), std::string(kRule), std::string(name)});
}

absl::StatusOr<std::string> ResolveBelow(const std::string& directory, absl::string_view relative) {
  if (relative.empty()) return BadPath(relative, "is empty");
  if (relative.front() == '/') return BadPath(relative, "is absolute");
  if (absl::StrContains(relative, '\0')) return BadPath(relative, "holds a zero byte");
  const std::vector<absl::string_view> parts = absl::StrSplit(relative, '/');
  if (std::find(parts.begin(), parts.end(), "..") != parts.end()) return BadPath(relative, "holds '..'");
  const std::optional<std::string> root = RealPath(directory);
  if (!root.has_value()) return formats::FileError("the server's directory", "resolve", errno);
  const std::optional<std::string> real = RealPath(absl::StrCat(*root, "/", relative));
  if (!real.has_value()) return formats::FileError(relative, "resolve", errno);
  const std::string prefix = *root == "/" ? *root : absl::StrCat(*root, "/");
  if (!absl::StartsWith(*real, prefix)) return BadPath(relative, "leads outside the server's directory");
  return *real;
}

}  // namespace lossd::head
