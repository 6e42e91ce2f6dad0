// SPDX-License-Identifier: Apache-2.0
// The server's certificate and key, and the certificates of clients. ReadTlsMaterial reads the server's
// files, Reloaded reads files again when they change, CertificateEnds says until when a client's certificate
// is valid, and GuardHandshakes closes what gRPC leaves open in TLS.
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

// Until when certificates are valid. The certificates of a connection are looked at with every call; each
// text is parsed once.
class CertificateEnds {
 public:
  // The earliest end of the certificates in a PEM text; the infinite past if none of them can be read.
  absl::Time Find(absl::string_view pem) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr size_t kMost = 4096;  // then the table begins anew

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, absl::Time> ends_ ABSL_GUARDED_BY(mutex_);  // by SHA-256 of the text
};

// What shows that a file has changed, without reading it: device, inode, size, and times of content and of
// inode in nanoseconds. All zeros for a file that is not there.
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

// A value made from files, and made again when the files have changed. Get looks at the files, at most once a
// second. If the changed files make no valid value, the log says so and the value stays as it was: a file
// that is being replaced, or a certificate whose key comes a moment later, refuses no client.
template <typename T>
class Reloaded {
 public:
  using Load = std::function<absl::StatusOr<std::shared_ptr<const T>>()>;

  // `what` names the value in the log: "tokens". `load` reads `paths`. Its error, if the first one fails.
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
    } else if (failed_ != stamps) {  // tried again every time, told once
      log::Log(log::LogLevel::kError, "changed files are not valid; what was read before stays in use",
               {{"what", what_}, {"error", value.status().message()}});
      failed_ = std::move(stamps);
    }
  }

  const std::string what_;
  const std::vector<std::string> paths_;
  const Load load_;
  absl::Mutex mutex_;
  FileStamps stamps_ ABSL_GUARDED_BY(mutex_);  // of the value
  FileStamps failed_ ABSL_GUARDED_BY(mutex_);  // of the last failure that was logged
  absl::Time looked_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const T> value_ ABSL_GUARDED_BY(mutex_);
};

// The server's certificate and key, and the certificates of the authorities that sign clients' certificates,
// as PEM text that was found to be in order.
struct TlsMaterial {
  std::string certificate_chain;  // the server's own certificate first
  std::string key;
  std::string client_authorities;  // empty: clients are not asked for certificates
  // When the first certificate of the chain, or of the authorities, is no longer valid.
  absl::Time expires = absl::InfiniteFuture();
};

struct TlsFiles {
  AccessFile certificate;
  AccessFile key;
  AccessFile client_authorities;  // without a path: none
};

// Reads the files. INVALID_ARGUMENT, naming flag and path, unless the first certificate is that of the key,
// and no file holds a PEM block that cannot be read. A certificate that is not valid today is logged and
// taken: clients will refuse it, and say why.
absl::StatusOr<std::shared_ptr<const TlsMaterial>> ReadTlsMaterial(const TlsFiles& files);

// When the first of the certificates in PEM form ends; the infinite past if the text is not in order.
absl::Time FirstEnd(absl::string_view pem);

using ReloadedTls = Reloaded<TlsMaterial>;
absl::StatusOr<std::unique_ptr<ReloadedTls>> WatchTlsMaterial(const TlsFiles& files);

// Closes what gRPC 1.51 leaves open in its TLS handshakes and has no option for. OpenSSL calls a program back
// for each context and each connection that it makes; there this function sets what gRPC does not.
//
//  - A peer's certificate is refused, before gRPC looks at its names, if gRPC would end the process over one
//    of the names: an address that has neither 4 nor 16 bytes, or a name that is no text.
//  - No session is resumed. A resumed session brings a certificate that was verified long ago.
//
// For all contexts that are made from now on. Later calls do nothing.
void GuardHandshakes();

// Whether gRPC can take every name of the certificate (GuardHandshakes). For tests.
bool HasSoundNames(X509* certificate);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_CERTIFICATES_H_
