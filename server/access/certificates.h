// SPDX-License-Identifier: Apache-2.0
// The server's certificate and key, and checks of the certificates of clients. ReadTlsMaterial reads the
// server's files, and Reloaded reads files again when they change. CertificateEnds finds when a client's
// certificate expires. GuardHandshakes closes gaps that gRPC leaves in TLS handshakes.
//
// All classes and functions are thread-safe.
#ifndef LOSSD_SERVER_ACCESS_CERTIFICATES_H_
#define LOSSD_SERVER_ACCESS_CERTIFICATES_H_

#include <openssl/x509.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "server/access/roles.h"
#include "server/log/log.h"

namespace lossd::access {

// Finds when certificates expire. The certificates of a connection are checked at every call, so this parses
// each text once and keeps the result.
class CertificateEnds {
 public:
  // The earliest expiry of the certificates in a PEM text; the infinite past if no certificate can be read.
  absl::Time Find(absl::string_view pem) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr size_t kMost = 4096;  // the table is cleared beyond this size

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, absl::Time> ends_ ABSL_GUARDED_BY(mutex_);  // by SHA-256 of the text
};

// The metadata by which a change of a file is noticed without reading it: device, inode, size, and the times
// of the last change of content and of inode, in nanoseconds. All zeros if the file does not exist.
struct FileStamp {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t modified = 0;
  int64_t changed = 0;
  friend bool operator==(const FileStamp&, const FileStamp&) = default;
};
using FileStamps = std::vector<FileStamp>;

FileStamps StampsOf(const std::vector<std::string>& paths);

inline constexpr absl::Duration kLookAtFilesEvery = absl::Seconds(1);

// A value made from files, and made again when the files have changed. Get checks the files for changes, at
// most once a second. If the changed files are not valid, this is logged and the old value stays. So no
// client is refused while a file is being replaced, or while a new certificate waits for its key.
template <typename T>
class Reloaded {
 public:
  using Load = std::function<absl::StatusOr<std::shared_ptr<const T>>()>;

  // `what` is the value's name in the log, such as "tokens". `load` makes the value from the files `paths`.
  // Returns its error if the first load fails.
  static absl::StatusOr<std::unique_ptr<Reloaded>> Create(std::string what, std::vector<std::string> paths,
                                                          Load load) {
    const FileStamps stamps = StampsOf(paths);
    LOSSD_TRY(std::shared_ptr<const T> value, load());
    return std::unique_ptr<Reloaded>(
        new Reloaded(std::move(what), std::move(paths), std::move(load), stamps, std::move(value)));
  }

  std::shared_ptr<const T> Get() ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::Time now = clocks::SteadyNow();
    absl::MutexLock lock(&mutex_);
    if (now - looked_ >= kLookAtFilesEvery) {
      looked_ = now;
      Look();
    }
    return value_;
  }

 private:
  Reloaded(std::string what, std::vector<std::string> paths, Load load, FileStamps stamps,
           std::shared_ptr<const T> value)
      : what_(std::move(what)),
        paths_(std::move(paths)),
        load_(std::move(load)),
        stamps_(std::move(stamps)),
        looked_(clocks::SteadyNow()),
        value_(std::move(value)) {}

  void Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    FileStamps stamps = StampsOf(paths_);
    if (stamps == stamps_) return;
    absl::StatusOr<std::shared_ptr<const T>> value = load_();
    if (value.ok()) {
      value_ = *std::move(value);
      stamps_ = std::move(stamps);
      failed_.clear();
      log::Log(log::LogLevel::kInfo, "files read again", {{"what", what_}});
    } else if (failed_ != stamps) {  // load again each time, but log a failure once
      log::Log(log::LogLevel::kError, "changed files are not valid; what was read before stays in use",
               {{"what", what_}, {"error", value.status().message()}});
      failed_ = std::move(stamps);
    }
  }

  const std::string what_;
  const std::vector<std::string> paths_;
  const Load load_;
  absl::Mutex mutex_;
  FileStamps stamps_ ABSL_GUARDED_BY(mutex_);  // of the files that made value_
  FileStamps failed_ ABSL_GUARDED_BY(mutex_);  // of the files of the last failure logged
  absl::Time looked_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const T> value_ ABSL_GUARDED_BY(mutex_);
};

// The server's certificate and key, and the certificates of the authorities that sign clients' certificates,
// as valid PEM text.
struct TlsMaterial {
  std::string certificate_chain;  // the server's own certificate first
  std::string key;
  std::string client_authorities;  // empty: clients are asked for no certificates
  // The earliest expiry of all certificates, of the chain and of the authorities.
  absl::Time expires = absl::InfiniteFuture();
};

struct TlsFiles {
  AccessFile certificate;
  AccessFile key;
  AccessFile client_authorities;  // an empty path: no authorities
};

// Reads the files. INVALID_ARGUMENT, naming flag and path, if the first certificate does not belong to the
// key, or if a file has a PEM block that cannot be read. A certificate that is not valid today is logged and
// accepted: clients will refuse it with the reason.
absl::StatusOr<std::shared_ptr<const TlsMaterial>> ReadTlsMaterial(const TlsFiles& files);

// The earliest expiry of the certificates in a PEM text; the infinite past if the text is not valid.
absl::Time FirstEnd(absl::string_view pem);

using ReloadedTls = Reloaded<TlsMaterial>;
absl::StatusOr<std::unique_ptr<ReloadedTls>> WatchTlsMaterial(const TlsFiles& files);

// Closes two gaps in the TLS handshakes of gRPC 1.51, for which gRPC has no option. It registers callbacks
// that OpenSSL calls for each new context and connection, and sets there:
//
//  - A peer's certificate is refused, before gRPC reads its names, if one of the names would make gRPC abort
//    the process: an address that has neither 4 nor 16 bytes, or a name that is no text.
//  - No session is resumed. A resumed session brings a certificate that was verified long ago.
//
// Applies to all contexts that are made from now on. Later calls do nothing.
void GuardHandshakes();

// Whether gRPC can process every name of the certificate (see GuardHandshakes). For tests.
bool HasSoundNames(X509* certificate);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_CERTIFICATES_H_
