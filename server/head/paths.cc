// SPDX-License-Identifier: Apache-2.0
#include "server/head/paths.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

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

// Owns a descriptor; -1: none.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return value_; }
  void Reset(int value) {
    if (value_ >= 0) close(value_);
    value_ = value;
  }

 private:
  int value_;
};

// Opens the file at `path`, which has no symbolic links, below the folder, part by part. `name`: in errors.
absl::StatusOr<int> OpenWithoutLinks(const std::string& folder, absl::string_view path,
                                     absl::string_view name) {
  constexpr int kFolder = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  Descriptor at(open(folder.c_str(), kFolder));
  std::vector<std::string> parts = absl::StrSplit(path, '/');
  const std::string file = std::move(parts.back());
  parts.pop_back();
  for (const std::string& part : parts) {
    if (at.get() >= 0) at.Reset(openat(at.get(), part.c_str(), kFolder));
  }
  struct stat status {};
  if (at.get() < 0 || fstatat(at.get(), file.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
    return formats::FileError(name, "open", errno);
  }
  // Looked at before it is opened: opening a device may do something.
  if (!S_ISREG(status.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(name, ": not a regular file"));
  }
  // O_NONBLOCK: should it have become a pipe by now.
  const int descriptor =
      openat(at.get(), file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (descriptor < 0) return formats::FileError(name, "open", errno);
  return descriptor;
}

// Where a path that a client named really is.
struct Resolved {
  std::string root;      // the directory
  std::string relative;  // below it, without symbolic links
};

// Why realpath takes `relative` nowhere, or out of `root`: the first symbolic link on its way that does not
// lead to something in there; OK if there is none. `error_number`: realpath's.
absl::Status BadLink(const std::string& root, const std::string& prefix, absl::string_view relative,
                     const std::vector<absl::string_view>& parts) {
  std::string way;
  for (const absl::string_view part : parts) {
    if (part.empty() || part == ".") continue;
    absl::StrAppend(&way, way.empty() ? "" : "/", part);
    const std::string path = absl::StrCat(root, "/", way);
    struct stat status {};
    if (lstat(path.c_str(), &status) != 0) return absl::OkStatus();
    if (!S_ISLNK(status.st_mode)) continue;
    const std::string is_link = absl::StrCat(
        way == relative ? "it" : absl::StrCat("'", absl::CHexEscape(way), "'"), " is a symbolic link");
    const std::optional<std::string> real = RealPath(path);
    if (!real.has_value() && errno == ELOOP) {
      return BadPath(relative, absl::StrCat("leads nowhere: ", is_link,
                                            " in a loop of links; put the file in its place"));
    }
    if (!real.has_value() && errno == ENOENT) {
      return absl::NotFoundError(absl::StrCat("path '", absl::CHexEscape(relative),
                                              "' leads nowhere: ", is_link,
                                              " to something that is not there; put the file in its place"));
    }
    if (real.has_value() && *real != root && !absl::StartsWith(*real, prefix)) {
      return BadPath(relative,
                     absl::StrCat("leads outside the server's directory: ", is_link,
                                  "; copy what it leads to into the directory, or start the server with a "
                                  "--checkpoint_dir that holds both"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Resolved> Resolve(const std::string& directory, absl::string_view relative) {
  if (relative.empty()) return BadPath(relative, "is empty");
  if (relative.front() == '/') return BadPath(relative, "is absolute");
  if (absl::StrContains(relative, '\0')) return BadPath(relative, "holds a zero byte");
  const std::vector<absl::string_view> parts = absl::StrSplit(relative, '/');
  if (std::find(parts.begin(), parts.end(), "..") != parts.end()) return BadPath(relative, "holds '..'");
  const std::optional<std::string> root = RealPath(directory);
  if (!root.has_value()) {  // a directory that is not there yet has no files
    return formats::FileError(errno == ENOENT ? relative : "the server's directory", "resolve", errno);
  }
  const std::optional<std::string> real = RealPath(absl::StrCat(*root, "/", relative));
  const int error = errno;
  const std::string prefix = *root == "/" ? *root : absl::StrCat(*root, "/");
  if (!real.has_value() || !absl::StartsWith(*real, prefix))
    LOSSD_RETURN_IF_ERROR(BadLink(*root, prefix, relative, parts));
  if (!real.has_value()) return formats::FileError(relative, "resolve", error);
  if (!absl::StartsWith(*real, prefix)) return BadPath(relative, "leads outside the server's directory");
  return Resolved{*root, real->substr(prefix.size())};
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
  LOSSD_TRY(const Resolved resolved, Resolve(directory, relative));
  return absl::StrCat(resolved.root == "/" ? "" : resolved.root, "/", resolved.relative);
}

absl::StatusOr<std::unique_ptr<formats::InputFile>> OpenBelow(const std::string& directory,
                                                              absl::string_view relative) {
  LOSSD_TRY(const Resolved resolved, Resolve(directory, relative));
  LOSSD_TRY(const int descriptor, OpenWithoutLinks(resolved.root, resolved.relative, relative));
  return formats::InputFile::Adopt(descriptor, std::string(relative));
}

// ---- FolderBelow ----

absl::StatusOr<FolderBelow> FolderBelow::Open(const std::string& directory,
                                              absl::Span<const std::string> names) {
  const std::string relative = absl::StrJoin(names, "/");
  const std::optional<std::string> root = RealPath(directory);
  if (!root.has_value()) return formats::FileError(relative, "resolve", errno);
  constexpr int kFolder = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  FolderBelow folder(open(root->c_str(), kFolder), relative);
  for (const std::string& name : names) {
    if (name.empty() || name == "." || name == ".." || absl::StrContains(name, '/') ||
        absl::StrContains(name, '\0')) {
      return BadPath(relative, "leads elsewhere");
    }
    const int parent = folder.descriptor_;
    if (parent >= 0) folder.descriptor_ = openat(parent, name.c_str(), kFolder);
    const int error = errno;
    if (parent >= 0) close(parent);
    if (folder.descriptor_ < 0) return formats::FileError(relative, "open folder", error);
  }
  return folder;
}

FolderBelow::FolderBelow(FolderBelow&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), name_(std::move(other.name_)) {}

FolderBelow::~FolderBelow() {
  if (descriptor_ >= 0) close(descriptor_);
}

// The dot: the number alone is a link, which not everybody follows.
std::string FolderBelow::path() const { return absl::StrCat("/proc/self/fd/", descriptor_, "/."); }

// ---- Threads ----

absl::Status RunInThreads(int threads, size_t tasks, absl::FunctionRef<absl::Status(size_t)> task) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<absl::Status> results(tasks);
  const auto work = [&] {
    while (!failed) {
      const size_t number = next++;
      if (number >= tasks) return;
      results[number] = task(number);
      if (!results[number].ok()) failed = true;
    }
  };
  std::vector<std::thread> others;
  const size_t wanted = std::min(tasks, static_cast<size_t>(std::max(threads, 1)));
  try {
    for (size_t i = 1; i < wanted; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads; those that there are do it all.
  }
  work();
  for (std::thread& other : others) other.join();
  for (absl::Status& result : results) {
    if (!result.ok()) return result;
  }
  return absl::OkStatus();
}

}  // namespace lossd::head
