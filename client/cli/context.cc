// SPDX-License-Identifier: Apache-2.0
#include "client/cli/context.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/cli/http.h"
#include "client/cpp/probe.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::cli {
namespace {

const std::string& FirstOf(const std::string& a, const std::string& b) { return a.empty() ? b : a; }

absl::Status NoSuchContext(const std::string& path, const std::string& name, const Contexts& contexts) {
  const std::string known = absl::StrJoin(
      contexts.by_name, ", ", [](std::string* out, const auto& each) { out->append(each.first); });
  return errors::WithViolation(absl::NotFoundError(absl::StrCat(
                                   "there is no context \"", name, "\" in ", path.empty() ? "any file" : path,
                                   known.empty() ? ", which has none" : "; it has ", known)),
                               {"context", "must be one that was added", name});
}

}  // namespace

absl::Status Context::Settle() {
  if (settled_) return absl::OkStatus();
  const std::string path = ContextsPath();
  if (!flags.server.empty()) {
    server = flags.server;
  } else if (!flags.context.empty()) {
    LOSSD_RETURN_IF_ERROR(UseContext(path, flags.context));
  } else if (const std::string named = EnvironmentVariable("LOSSD_SERVER"); !named.empty()) {
    server = named;
  } else if (absl::Status status = UseContext(path, EnvironmentVariable("LOSSD_CONTEXT")); !status.ok()) {
    return status;
  }
  // What options and environment say goes before the context's. A certificate and its key are a pair.
  const client::CredentialOptions environment = client::Credentials::OptionsFromEnvironment();
  const auto prefer = [](const std::string& flag, const std::string& variable, std::string* value) {
    if (!FirstOf(flag, variable).empty()) *value = FirstOf(flag, variable);
  };
  prefer(flags.ca, environment.ca, &credentials.ca);
  const std::string& cert = FirstOf(flags.cert, environment.cert);
  const std::string& key = FirstOf(flags.key, environment.key);
  if (!cert.empty() || !key.empty()) {
    credentials.cert = cert;
    credentials.key = key;
  }
  prefer("", environment.token, &credentials.token);
  settled_ = true;
  return absl::OkStatus();
}

// "": the current one, if there is one.
absl::Status Context::UseContext(const std::string& path, const std::string& name) {
  if (path.empty() && name.empty()) return absl::OkStatus();
  LOSSD_TRY(const Contexts contexts, ReadContexts(path));
  const std::string& wanted = FirstOf(name, contexts.current);
  if (wanted.empty()) return absl::OkStatus();
  const auto found = contexts.by_name.find(wanted);
  if (found == contexts.by_name.end()) return NoSuchContext(path, wanted, contexts);
  const NamedServer& named = found->second;
  in_use = wanted;
  server = named.server;
  named_http = named.http;
  credentials.ca = PathBeside(path, named.ca);
  credentials.cert = PathBeside(path, named.cert);
  credentials.key = PathBeside(path, named.key);
  if (named.token_file.empty() || !EnvironmentVariable("LOSSD_TOKEN").empty()) return absl::OkStatus();
  LOSSD_TRY(credentials.token, ReadTokenFile(PathBeside(path, named.token_file)));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<client::Client>> Context::Connect() {
  client::ClientOptions options;
  options.channels = 1;
  return Connect(std::move(options));
}

absl::StatusOr<std::unique_ptr<client::Client>> Context::Connect(client::ClientOptions options) {
  LOSSD_RETURN_IF_ERROR(Settle());
  LOSSD_TRY(auto made, client::Credentials::Create(credentials));
  options.target = server;
  options.credentials = std::move(made);
  options.connect_timeout = absl::Seconds(5);
  options.wait_for_server = false;
  options.retry.max_attempts = attempts;
  options.expected_incarnation = incarnation;
  if (timeout_seconds > 0) {
    options.connect_timeout = timeout();
    options.call_timeout = options.transfer_timeout = options.loss_timeout = timeout();
  }
  return client::Client::Connect(options);
}

absl::StatusOr<std::string> Context::HttpAddress(const std::string& given) {
  LOSSD_RETURN_IF_ERROR(Settle());
  if (!given.empty()) return given;
  if (!named_http.empty()) return named_http;
  LOSSD_TRY(const auto client, Connect());
  LOSSD_TRY(const v1::ServerDescription said, client->GetServer(timeout()));
  return HttpAddressOf(said, server);
}

absl::StatusOr<std::string> Context::HttpAddress(const std::string& given,
                                                 const v1::ServerDescription& said) const {
  if (!given.empty()) return given;
  return named_http.empty() ? HttpAddressOf(said, server) : named_http;
}

absl::StatusOr<std::string> Context::ProbeAddress(const std::string& given) {
  LOSSD_RETURN_IF_ERROR(Settle());
  if (!given.empty()) return given;
  return named_http.empty() ? DefaultHttpAddress(server) : named_http;
}

void Context::Print(absl::string_view text) const {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if ((std::fflush(stdout) != 0 || !written) && write_error_ == 0) write_error_ = errno;
}

absl::Status Context::Printed() const {
  if (write_error_ == 0) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("cannot write to the standard output: ", std::generic_category().message(write_error_)));
}

void Context::PrintJson(const Json& document) const {
  Print(absl::StrCat(document.dump(2, ' ', false, Json::error_handler_t::replace), "\n"));
}

void Context::PrintJsonOfMany(const Json& document) const {
  Print(absl::StrCat(document.dump(-1, ' ', false, Json::error_handler_t::replace), "\n"));
}

bool ShowsProgress() { return isatty(STDERR_FILENO) != 0; }

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
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe is not waited for
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

// A text for nlohmann's parser that says how far it has been read.
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

// Reads the file's objects one token after the other, so that an error has a line.
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
      const std::string problem = client::internal::TargetProblem(value);
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
    if (end > text_.data() && end[-1] == '\n') --end;  // a number is known to end by what follows it
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
  size_t open_ = 0;                        // objects
  std::vector<std::string> path_in_file_;  // names of what is being read
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
  // What was put in is checked as it will be read.
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
  constexpr size_t kMaxTokenBytes = 1024;  // as the server takes them
  LOSSD_TRY(std::string text, ReadPrivateFile(path, Privacy::kOthersMustNotRead, kMaxTokenBytes + 2));
  const std::string token(absl::StripAsciiWhitespace(text));
  const bool good = !token.empty() && token.size() <= kMaxTokenBytes &&
                    std::all_of(token.begin(), token.end(), [](char c) { return absl::ascii_isgraph(c); });
  if (good) return token;
  return absl::InvalidArgumentError(absl::StrCat(path, " must have one line, a token of 1 to ",
                                                 kMaxTokenBytes,
                                                 " visible ASCII characters"));  // not what it has
}

namespace {

constexpr absl::string_view kUsagePayload = "lossctl/usage";

std::string Advice(const absl::Status& status, const std::optional<v1::ErrorDetail>& detail) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      if (detail.has_value() && detail->field() == client::kTargetField)
        return "--server or LOSSD_SERVER names it";
      return "";
    case absl::StatusCode::kUnavailable:
      if (detail.has_value() && detail->field() == client::kTargetField) {
        return "start one with `lossd`, or name another with --server HOST:PORT or LOSSD_SERVER";
      }
      if (detail.has_value() && detail->field() == kHttpField) return "";  // the message says all there is
      return "try again later; `lossctl health` says whether the server serves";
    case absl::StatusCode::kNotFound:
      if (detail.has_value() && absl::EndsWith(detail->field(), "head"))
        return "`lossctl heads` lists the heads";
      if (detail.has_value() && absl::EndsWith(detail->field(), "checkpoint"))
        return "`lossctl checkpoints` lists the checkpoints";
      return "";
    case absl::StatusCode::kAborted:
      if (client::RestartOf(status).has_value() || client::IsStepDiscarded(status)) return "";
      return "something has changed meanwhile: try again, or start the step again if its gradients are gone";
    case absl::StatusCode::kDeadlineExceeded:
      return "give it more time with --timeout SECONDS";
    default:
      return "";
  }
}

// "workspace_bytes must be >= 0, got 99999999" of a server that leaves it at that, with the unit that the
// field's name says.
std::string WithUnitOfField(std::string message, const std::optional<v1::ErrorDetail>& detail) {
  if (!detail.has_value() || !absl::EndsWith(detail->field(), "_bytes")) return message;
  if (!absl::EndsWith(message, absl::StrCat("got ", detail->value()))) return message;
  return WithUnits(absl::StrCat(message, " bytes"));
}

Json ErrorJson(const absl::Status& status, const std::optional<v1::ErrorDetail>& detail) {
  Json error;
  error["code"] = absl::StatusCodeToString(status.code());
  error["message"] = std::string(status.message());
  error["exit_code"] = static_cast<int>(ExitCodeOf(status));
  if (const auto restart = client::RestartOf(status); restart.has_value()) {
    error["restarted"] = {{"incarnation_before", HumanIncarnation(restart->before)},
                          {"incarnation", HumanIncarnation(restart->now)}};
  }
  if (client::IsStepDiscarded(status)) error["step_discarded"] = true;
  if (detail.has_value()) {
    if (!detail->field().empty()) error["field"] = detail->field();
    if (!detail->value().empty()) error["value"] = detail->value();
    if (detail->has_current_step()) error["current_step"] = detail->current_step();
    if (detail->missing_size() > 0) {
      error["missing"] = std::vector<std::string>(detail->missing().begin(), detail->missing().end());
    }
    if (detail->incarnation() != 0) error["incarnation"] = HumanIncarnation(detail->incarnation());
  }
  return {{"error", error}};
}

}  // namespace

absl::Status UsageError(absl::string_view message, absl::string_view help) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kUsagePayload, absl::Cord(help));
  return status;
}

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.GetPayload(kUsagePayload).has_value()) return kExitUsage;
  if (client::RestartOf(status).has_value()) return kExitRestarted;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kExitRefused;
    default:
      return kExitFailed;
  }
}

std::string WithUnits(absl::string_view message) {
  constexpr absl::string_view kBytes = " bytes";
  std::string text;
  for (size_t at = message.find(kBytes); at != absl::string_view::npos; at = message.find(kBytes)) {
    const absl::string_view before = message.substr(0, at);
    const size_t begin = before.find_last_not_of("0123456789") + 1;  // 0 if it is all digits
    double bytes = 0;
    const bool is_count = begin < at && absl::SimpleAtod(before.substr(begin), &bytes) &&
                          bytes >= errors::kManyBytes && (begin == 0 || before[begin - 1] != '.');
    absl::StrAppend(&text, before, kBytes);
    message.remove_prefix(at + kBytes.size());
    if (is_count && !absl::StartsWith(message, " (")) absl::StrAppend(&text, " (", HumanBytes(bytes), ")");
  }
  return absl::StrCat(text, message);
}

std::string InTermsOfOptions(absl::string_view message) {
  constexpr std::pair<absl::string_view, absl::string_view> kNames[] = {
      {"options.target ", "the server's address "},
      {"options.credentials.ca ", "--ca (LOSSD_CA) "},
      {"options.credentials.cert ", "--cert (LOSSD_CERT) "},
      {"options.credentials.key ", "--key (LOSSD_KEY) "},
      {"options.credentials.token ", "the token (LOSSD_TOKEN) "},
      {"options.slice_bytes ", "--slice-bytes "},
      {"options.streams ", "--streams "},
      {"options.normalizer ", "--normalizer "},
      {"options.grad_output ", "--grad-output "},
      {"options.shared_memory_bytes ", "--shared-memory-bytes "}};
  for (const auto& [field, option] : kNames) {
    if (absl::ConsumePrefix(&message, field)) return absl::StrCat(option, message);
  }
  return std::string(message);
}

std::string ErrorText(const absl::Status& status, bool json, const Style& style) {
  const std::optional<v1::ErrorDetail> detail = client::ErrorDetailOf(status);
  if (json) {
    return absl::StrCat(ErrorJson(status, detail).dump(-1, ' ', false, Json::error_handler_t::replace), "\n");
  }
  std::string text =
      absl::StrCat(style.Paint(Tone::kBad, "lossctl:"), " ",
                   WithUnits(PrintableLines(WithUnitOfField(InTermsOfOptions(status.message()), detail))));
  const std::string advice = Advice(status, detail);
  if (!advice.empty()) absl::StrAppend(&text, absl::EndsWith(text, "?") ? " " : "; ", advice);
  absl::StrAppend(&text, "\n");
  if (const auto help = status.GetPayload(kUsagePayload); help.has_value()) {
    absl::StrAppend(&text, "`", std::string(*help), "` describes it.\n");
  }
  if (!detail.has_value()) return text;
  if (detail->has_current_step()) absl::StrAppend(&text, "  open step: ", detail->current_step(), "\n");
  for (const std::string& missing : detail->missing()) absl::StrAppend(&text, "  missing: ", missing, "\n");
  return text;
}

}  // namespace lossd::cli
