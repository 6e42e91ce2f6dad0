// SPDX-License-Identifier: Apache-2.0
// Named servers and private files (contexts.h), with a parser of the JSON file whose errors name the line.
#include "client/cpp/contexts.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/probe.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::client {

// ---- Which server is meant ----

namespace {

using Json = nlohmann::ordered_json;

// Checks the address in LOSSD_SERVER.
absl::Status CheckEnvironment(const std::string& target) {
  const std::string problem = internal::TargetProblem(target);
  if (problem.empty()) return absl::OkStatus();
  return internal::ArgumentError(kTargetField, target,
                                 absl::StrCat("is '", target, "' (from LOSSD_SERVER); ", problem));
}

absl::Status NoSuchContext(const std::string& path, const std::string& name, const Contexts& contexts) {
  const std::string known = absl::StrJoin(
      contexts.by_name, ", ", [](std::string* out, const auto& each) { out->append(each.first); });
  return errors::WithViolation(absl::NotFoundError(absl::StrCat(
                                   "there is no context \"", name, "\" in ", path.empty() ? "any file" : path,
                                   known.empty() ? ", which has none" : "; it has ", known)),
                               {"context", "must be one that was added", name});
}

// The server and the credentials of a context. Reads the token file only if `with_token`.
absl::StatusOr<ChosenServer> Named(const std::string& path, const std::string& name, const Contexts& contexts,
                                   bool with_token) {
  const auto found = contexts.by_name.find(name);
  if (found == contexts.by_name.end()) return NoSuchContext(path, name, contexts);
  const NamedServer& named = found->second;
  ChosenServer chosen{.server = named.server, .context = name, .http = named.http};
  chosen.credentials.ca = PathBeside(path, named.ca);
  chosen.credentials.cert = PathBeside(path, named.cert);
  chosen.credentials.key = PathBeside(path, named.key);
  if (named.token_file.empty() || !with_token) return chosen;
  LOSSD_TRY(chosen.credentials.token, ReadTokenFile(PathBeside(path, named.token_file)));
  return chosen;
}

// Chooses the server, without the credentials of arguments and environment. If a context gives the server,
// the result has the context's credentials. The first of these counts: the argument `server`, the argument
// `context`, LOSSD_SERVER, LOSSD_CONTEXT, the file's current context (unless it is ignored), and the default
// address.
absl::StatusOr<ChosenServer> ChooseAddress(const ServerArguments& arguments, CurrentContext current) {
  if (arguments.server.has_value()) {
    if (!arguments.context.has_value()) return ChosenServer{.server = *arguments.server};
    return internal::ArgumentError(kTargetField, *arguments.server,
                                   absl::StrCat("is '", *arguments.server, "' and the context is '",
                                                *arguments.context, "'; give one of them"));
  }
  ChosenServer unnamed{.server = TargetFromEnvironment()};
  std::string context = arguments.context.value_or("");
  bool named = arguments.context.has_value();
  if (!named) {
    if (const std::string variable = EnvironmentVariable("LOSSD_SERVER"); !variable.empty()) {
      LOSSD_RETURN_IF_ERROR(CheckEnvironment(variable));
      return unnamed;
    }
    context = EnvironmentVariable("LOSSD_CONTEXT");
    named = !context.empty();
  }
  if (!named && current == CurrentContext::kIsIgnored) return unnamed;
  const std::string path = ContextsPath();
  LOSSD_TRY(const Contexts contexts, ReadContexts(path));
  if (!named) context = contexts.current;
  if (!named && context.empty()) return unnamed;
  return Named(path, context, contexts,
               !arguments.token.has_value() && EnvironmentVariable("LOSSD_TOKEN").empty());
}

}  // namespace

absl::StatusOr<ChosenServer> ChooseServer(const ServerArguments& arguments, CurrentContext current) {
  LOSSD_TRY(ChosenServer chosen, ChooseAddress(arguments, current));
  CredentialOptions& credentials = chosen.credentials;
  const CredentialOptions environment = Credentials::OptionsFromEnvironment();
  if (arguments.ca.has_value() || !environment.ca.empty()) {
    credentials.ca = arguments.ca.value_or(environment.ca);
  }
  if (arguments.cert.has_value() || arguments.key.has_value() || !environment.cert.empty() ||
      !environment.key.empty()) {
    credentials.cert = arguments.cert.value_or(environment.cert);
    credentials.key = arguments.key.value_or(environment.key);
  }
  if (arguments.token.has_value() || !environment.token.empty()) {
    credentials.token = std::string(absl::StripAsciiWhitespace(arguments.token.value_or(environment.token)));
  }
  return chosen;
}

// ---- Private files ----

namespace {

absl::Status SystemError(const std::string& path, absl::string_view what, int error) {
  return absl::Status(absl::ErrnoToStatusCode(error),
                      absl::StrCat(path, " cannot be ", what, ": ", std::strerror(error)));
}

absl::Status CheckPrivacy(const std::string& path, const struct stat& file, Privacy privacy) {
  if (!S_ISREG(file.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, " is not a file"));
  if (file.st_uid != geteuid() && file.st_uid != 0) {
    return absl::PermissionDeniedError(absl::StrCat(path, " belongs to another user (", file.st_uid, ")"));
  }
  mode_t forbidden = S_IWGRP | S_IWOTH;
  if (privacy == Privacy::kOthersMustNotRead) {
    forbidden = S_IRWXO | (file.st_uid == 0 ? S_IWGRP | S_IXGRP : S_IRWXG);
  }
  if ((file.st_mode & forbidden) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrFormat(
      "%s has the mode %04o, so others can %s it; `chmod 600 %s` mends that", path, file.st_mode & 07777,
      privacy == Privacy::kOthersMustNotRead ? "read" : "change", path));
}

std::string FolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path();
  return folder.empty() ? "." : folder;
}

}  // namespace

absl::StatusOr<std::string> ReadPrivateFile(const std::string& path, Privacy privacy, size_t most_bytes) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe does not block
  if (descriptor < 0) return SystemError(path, "read", errno);
  const absl::Cleanup closes = [descriptor] { close(descriptor); };
  struct stat file = {};
  if (fstat(descriptor, &file) != 0) return SystemError(path, "read", errno);
  LOSSD_RETURN_IF_ERROR(CheckPrivacy(path, file, privacy));
  std::string content(most_bytes + 1, '\0');
  size_t size = 0;
  while (size < content.size()) {
    const ssize_t got = read(descriptor, content.data() + size, content.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(path, "read", errno);
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  if (size > most_bytes)
    return absl::InvalidArgumentError(absl::StrCat(path, " has more than ", errors::ExactBytes(most_bytes)));
  content.resize(size);
  return content;
}

absl::Status WritePrivateFile(const std::string& path, const std::string& content) {
  std::error_code none;
  const std::filesystem::path target = std::filesystem::weakly_canonical(path, none);
  const std::string real = none ? path : target.string();
  std::string temporary = absl::StrCat(real, ".XXXXXX");
  const int descriptor = mkostemp(temporary.data(), O_CLOEXEC);  // mode 0600
  if (descriptor < 0) return SystemError(temporary, "made", errno);
  int error = 0;
  for (size_t at = 0; at < content.size() && error == 0;) {
    const ssize_t written = write(descriptor, content.data() + at, content.size() - at);
    if (written >= 0) {
      at += static_cast<size_t>(written);
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error == 0 && fsync(descriptor) != 0) error = errno;
  if (close(descriptor) != 0 && error == 0) error = errno;
  if (error == 0 && std::rename(temporary.c_str(), real.c_str()) != 0) error = errno;
  if (error == 0) return absl::OkStatus();
  unlink(temporary.c_str());
  return SystemError(path, "written", error);
}

absl::StatusOr<FolderLock> FolderLock::Of(const std::string& path) {
  const std::string folder = FolderOf(path);
  std::error_code error;
  if (!std::filesystem::exists(folder, error)) {
    const std::string above = FolderOf(folder);
    std::filesystem::create_directories(above, error);
    if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return SystemError(folder, "made", errno);
  }
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return SystemError(folder, "opened", errno);
  FolderLock lock(descriptor);
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(5);
  while (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return SystemError(folder, "locked", errno);
    if (clocks::SteadyNow() > end) {
      return absl::UnavailableError(absl::StrCat(folder, " is locked by another program that changes it"));
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return lock;
}

FolderLock::FolderLock(FolderLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

// ---- Contexts ----

namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 20;
constexpr size_t kMaxContexts = 1000;

struct Field {
  const char* name;
  std::string NamedServer::*member;
};
constexpr Field kFields[] = {{"server", &NamedServer::server},
                             {"ca", &NamedServer::ca},
                             {"cert", &NamedServer::cert},
                             {"key", &NamedServer::key},
                             {"token_file", &NamedServer::token_file},
                             {"http", &NamedServer::http}};

std::string FieldNames() {
  return absl::StrJoin(kFields, ", ", [](std::string* out, const Field& field) { out->append(field.name); });
}

// An iterator over a text for nlohmann's parser. It records how far the parser has read.
class Reading {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  Reading(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  Reading& operator++() {
    ++at_;
    if (furthest_ != nullptr) *furthest_ = std::max(*furthest_, at_);
    return *this;
  }
  Reading operator++(int) {
    Reading before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const Reading& a, const Reading& b) { return a.at_ == b.at_; }

 private:
  const char* at_;
  const char** furthest_;
};

// Parses the file one token after another, so that it knows the line of an error. The file has this form:
//
//   {"current": NAME, "contexts": {NAME: {"server": ADDRESS, "ca": PATH, ...}, ...}}
//
// The parser calls the overridden functions. open_ says where it is: 1 in the outermost object, 2 in
// "contexts", 3 in a context. path_in_file_ has the keys that lead to the present value.
class Reader : public nlohmann::json_sax<Json> {
 public:
  Reader(absl::string_view text, const std::string& path)
      : text_(text), path_(path), furthest_(text.data()) {}

  absl::StatusOr<Contexts> Read() {
    const char* const end = text_.data() + text_.size();
    const bool good = Json::sax_parse(Reading(text_.data(), &furthest_), Reading(end, nullptr), this);
    if (!good) return error_.ok() ? Fail("", "be JSON", "something else") : error_;
    if (!contexts_.current.empty() && contexts_.by_name.count(contexts_.current) == 0) {
      furthest_ = text_.data() + current_at_;
      return Fail("current", "be one of the contexts", contexts_.current);
    }
    return contexts_;
  }

  // nlohmann::json_sax
  bool null() override { return Unexpected("null"); }
  bool boolean(bool value) override { return Unexpected(value ? "true" : "false"); }
  bool number_integer(int64_t value) override { return Unexpected(absl::StrCat(value)); }
  bool number_unsigned(uint64_t value) override { return Unexpected(absl::StrCat(value)); }
  bool number_float(double, const std::string& text) override { return Unexpected(text); }
  bool binary(binary_t&) override { return Unexpected("bytes"); }
  bool start_array(std::size_t) override { return Unexpected("a list"); }
  bool end_array() override { return true; }

  bool start_object(std::size_t) override {
    const bool expected =
        path_in_file_.size() == open_ && (open_ == 0 || (open_ <= 2 && path_in_file_.front() == "contexts"));
    if (!expected) return Unexpected("an object");
    ++open_;
    return true;
  }

  bool key(std::string& name) override {
    path_in_file_.resize(open_ - 1);
    path_in_file_.push_back(name);
    const std::string where = Where();
    if (!seen_.emplace(where, true).second) return Refuse(where, "be given once", "a second time");
    if (open_ == 1 && name != "current" && name != "contexts") {
      return Refuse(where, "be current or contexts", name);
    }
    if (open_ == 2) {
      if (absl::Status status = CheckContextName(name); !status.ok()) {
        return Refuse("contexts",
                      "have names of 1 to 64 characters A-Z a-z 0-9 . _ -, a letter or digit first", name);
      }
      if (contexts_.by_name.size() == kMaxContexts) {
        return Refuse("contexts", absl::StrCat("have at most ", kMaxContexts, " names"), "more");
      }
      contexts_.by_name.emplace(name, NamedServer());
    }
    if (open_ == 3 && FieldOf(name) == nullptr)
      return Refuse(where, absl::StrCat("be one of ", FieldNames()), name);
    return true;
  }

  bool string(std::string& value) override {
    if (path_in_file_.size() == 1 && open_ == 1 && path_in_file_[0] == "current") {
      current_at_ = static_cast<size_t>(furthest_ - text_.data());
      contexts_.current = value;
      return true;
    }
    if (open_ != 3 || path_in_file_.size() != 3) return Unexpected(absl::StrCat("\"", value, "\""));
    if (value.empty()) return Refuse(Where(), "not be empty", "\"\"");
    if (path_in_file_[2] == "server") {
      const std::string problem = internal::TargetProblem(value);
      if (!problem.empty()) return Problem(Where(), absl::StrCat("is '", value, "'; ", problem), value);
    }
    contexts_.by_name[path_in_file_[1]].*(FieldOf(path_in_file_[2])->member) = value;
    return true;
  }

  bool end_object() override {
    --open_;
    path_in_file_.resize(open_);
    if (open_ != 2) return true;
    const NamedServer& made = contexts_.by_name[path_in_file_[1]];
    if (made.server.empty()) return Refuse(Where() + ".server", "be given", "nothing");
    if (made.cert.empty() != made.key.empty()) {
      return Refuse(Where() + (made.cert.empty() ? ".cert" : ".key"),
                    "be given, as the other of cert and key is", "nothing");
    }
    if (!made.cert.empty() && made.ca.empty())
      return Refuse(Where() + ".ca", "be given with cert", "nothing");
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 3, column 5: syntax error while parsing ..."
    absl::string_view what = error.what();
    const size_t begin = what.find("syntax error");
    if (begin != absl::string_view::npos) what.remove_prefix(begin);
    return Problem("", absl::StrCat("is not JSON: ", what), "");
  }

 private:
  static const Field* FieldOf(const std::string& name) {
    const auto* const found = std::find_if(std::begin(kFields), std::end(kFields),
                                           [&](const Field& field) { return name == field.name; });
    return found == std::end(kFields) ? nullptr : found;
  }

  std::string Where() const { return absl::StrJoin(path_in_file_, "."); }
  int64_t Line() const {
    const char* end = std::min(furthest_, text_.data() + text_.size());
    if (end > text_.data() && end[-1] == '\n') --end;  // the parser reads one character past a number
    return 1 + std::count(text_.data(), end, '\n');
  }

  absl::Status Fail(const std::string& field, const std::string& rule, const std::string& value) const {
    return errors::WithViolation(
        absl::InvalidArgumentError(absl::StrCat(path_, ":", Line(), ": ", field, field.empty() ? "" : " ",
                                                "must ", rule, ", got ", value)),
        {field, absl::StrCat("must ", rule), value});
  }
  bool Refuse(const std::string& field, const std::string& rule, const std::string& value) {
    error_ = Fail(field, rule, value);
    return false;
  }
  bool Problem(const std::string& field, const std::string& problem, const std::string& value) {
    error_ = errors::WithViolation(absl::InvalidArgumentError(absl::StrCat(
                                       path_, ":", Line(), ": ", field, field.empty() ? "" : " ", problem)),
                                   {field, problem, value});
    return false;
  }
  bool Unexpected(const std::string& value) {
    const std::string where = path_in_file_.empty() ? "the file" : Where();
    const bool text = open_ == 3 || (open_ == 1 && !path_in_file_.empty() && path_in_file_[0] == "current");
    return Refuse(where, text ? "be a string" : "be an object", value);
  }

  const absl::string_view text_;
  const std::string& path_;
  const char* furthest_;
  size_t open_ = 0;                        // the depth of open objects
  std::vector<std::string> path_in_file_;  // the keys of the value that is being read
  std::map<std::string, bool> seen_;
  size_t current_at_ = 0;
  Contexts contexts_;
  absl::Status error_;
};

std::string TextOf(const Contexts& contexts) {
  Json document = Json::object();
  if (!contexts.current.empty()) document["current"] = contexts.current;
  document["contexts"] = Json::object();
  for (const auto& [name, server] : contexts.by_name) {
    Json& entry = document["contexts"][name] = Json::object();
    for (const Field& field : kFields) {
      if (!(server.*field.member).empty()) entry[field.name] = server.*field.member;
    }
  }
  return absl::StrCat(document.dump(2, ' ', false, Json::error_handler_t::replace), "\n");
}

}  // namespace

std::string ContextsPath() {
  if (const std::string path = EnvironmentVariable("LOSSD_CONFIG"); !path.empty()) return path;
  std::string folder = EnvironmentVariable("XDG_CONFIG_HOME");
  if (folder.empty() || folder.front() != '/') {  // the XDG rules have relative ones ignored
    const std::string home = EnvironmentVariable("HOME");
    if (home.empty()) return "";
    folder = absl::StrCat(home, "/.config");
  }
  return absl::StrCat(folder, "/lossd/contexts.json");
}

absl::Status CheckContextName(absl::string_view name) {
  const bool good = !name.empty() && name.size() <= 64 && absl::ascii_isalnum(name.front()) &&
                    std::all_of(name.begin(), name.end(), [](char c) {
                      return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
                    });
  if (good) return absl::OkStatus();
  return errors::FieldError("context", "have 1 to 64 characters A-Z a-z 0-9 . _ -, a letter or digit first",
                            absl::StrCat("\"", name, "\""));
}

absl::StatusOr<Contexts> ParseContexts(absl::string_view text, const std::string& path) {
  return Reader(text, path).Read();
}

absl::StatusOr<Contexts> ReadContexts(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadPrivateFile(path, Privacy::kOthersMustNotWrite, kMaxFileBytes);
  if (absl::IsNotFound(text.status())) return Contexts();
  if (!text.ok()) return text.status();
  return ParseContexts(*text, path);
}

absl::Status ChangeContexts(const std::string& path, const std::function<absl::Status(Contexts*)>& change) {
  LOSSD_TRY(const FolderLock lock, FolderLock::Of(path));
  LOSSD_TRY(Contexts contexts, ReadContexts(path));
  LOSSD_RETURN_IF_ERROR(change(&contexts));
  // Checks the new content with the parser that will read it.
  const std::string text = TextOf(contexts);
  if (const auto again = ParseContexts(text, path); !again.ok()) return again.status();
  return WritePrivateFile(path, text);
}

std::string PathBeside(const std::string& path, const std::string& file) {
  if (file.empty() || file.front() == '/') return file;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? file : absl::StrCat(path.substr(0, slash + 1), file);
}

absl::StatusOr<std::string> ReadTokenFile(const std::string& path) {
  constexpr size_t kMaxTokenBytes = 1024;  // the longest token that the server takes
  LOSSD_TRY(std::string text, ReadPrivateFile(path, Privacy::kOthersMustNotRead, kMaxTokenBytes + 2));
  const std::string token(absl::StripAsciiWhitespace(text));
  const bool good = !token.empty() && token.size() <= kMaxTokenBytes &&
                    std::all_of(token.begin(), token.end(), [](char c) { return absl::ascii_isgraph(c); });
  if (good) return token;
  // The error must not show the file's content.
  return absl::InvalidArgumentError(absl::StrCat(path, " must have one line, a token of 1 to ",
                                                 kMaxTokenBytes, " visible ASCII characters"));
}

}  // namespace lossd::client
