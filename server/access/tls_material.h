// SPDX-License-Identifier: Apache-2.0
// The server's certificate and key, and the certificates of the authorities that sign clients' certificates;
// as PEM text that was found to be in order.
//
// Immutable and thread-safe.
#ifndef LOSSD_SERVER_ACCESS_TLS_MATERIAL_H_
#define LOSSD_SERVER_ACCESS_TLS_MATERIAL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/access/access_file.h"
#include "server/access/reloaded.h"

namespace lossd::access {

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

// Of certificates in PEM form, when the first ends; the infinite past if the text is not in order.
absl::Time FirstEnd(absl::string_view pem);

using ReloadedTls = Reloaded<TlsMaterial>;
absl::StatusOr<std::unique_ptr<ReloadedTls>> WatchTlsMaterial(const TlsFiles& files);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_TLS_MATERIAL_H_
