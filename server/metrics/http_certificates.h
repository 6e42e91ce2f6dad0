// SPDX-License-Identifier: Apache-2.0
// The certificate of the HTTP server, as GnuTLS takes it, parsed again when the files have changed.
//
// Thread-compatible: created on one thread and then used by the server's one thread.
#ifndef LOSSD_SERVER_METRICS_HTTP_CERTIFICATES_H_
#define LOSSD_SERVER_METRICS_HTTP_CERTIFICATES_H_

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>

#include <deque>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/access/tls_material.h"

namespace lossd::metrics {

class HttpCertificates {
 public:
  // `material` outlives it. INVALID_ARGUMENT if GnuTLS does not take certificate or key.
  static absl::StatusOr<std::unique_ptr<HttpCertificates>> Create(access::ReloadedTls* material);
  ~HttpCertificates();
  HttpCertificates(const HttpCertificates&) = delete;
  HttpCertificates& operator=(const HttpCertificates&) = delete;

  // Has Retrieve take certificates from here when this thread calls it. (The library's callback has no
  // argument by which it could know.)
  void ServeThisThread();

  // A gnutls_certificate_retrieve_function2. What it hands out stays valid for at least kKept.
  static int Retrieve(gnutls_session_t session, const gnutls_datum_t* authorities, int authority_count,
                      const gnutls_pk_algorithm_t* algorithms, int algorithm_count,
                      gnutls_pcert_st** certificates, unsigned* certificate_count, gnutls_privkey_t* key);

 private:
  // A handshake may still use a certificate that has been replaced; connections do not live that long.
  static constexpr absl::Duration kKept = absl::Minutes(2);

  struct Parsed;

  explicit HttpCertificates(access::ReloadedTls* material);
  absl::Status Parse(const std::shared_ptr<const access::TlsMaterial>& material);
  const Parsed& Current();

  access::ReloadedTls* const material_;
  std::shared_ptr<const access::TlsMaterial> seen_;  // parsed, or found not to be parsable
  std::deque<std::unique_ptr<Parsed>> parsed_;       // the newest last; never empty after Create
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_CERTIFICATES_H_
