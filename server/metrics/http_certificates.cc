// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_certificates.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "server/log/log.h"

namespace lossd::metrics {
namespace {

constexpr unsigned kMaxChain = 16;

thread_local HttpCertificates* of_this_thread = nullptr;

// GnuTLS does not write through the pointer.
gnutls_datum_t Datum(const std::string& text) {
  return {.data = reinterpret_cast<unsigned char*>(const_cast<char*>(text.data())),
          .size = static_cast<unsigned>(text.size())};
}

}  // namespace

struct HttpCertificates::Parsed {
  Parsed() = default;
  ~Parsed() {
    for (unsigned i = 0; i < count; ++i) gnutls_pcert_deinit(&chain[i]);
    if (key != nullptr) gnutls_privkey_deinit(key);
  }
  Parsed(const Parsed&) = delete;
  Parsed& operator=(const Parsed&) = delete;

  gnutls_pcert_st chain[kMaxChain];
  unsigned count = 0;
  gnutls_privkey_t key = nullptr;
  absl::Time replaced = absl::InfiniteFuture();
};

absl::StatusOr<std::unique_ptr<HttpCertificates>> HttpCertificates::Create(access::ReloadedTls* material) {
  std::unique_ptr<HttpCertificates> certificates(new HttpCertificates(material));
  certificates->seen_ = material->Get();
  if (absl::Status status = certificates->Parse(certificates->seen_); !status.ok()) return status;
  return certificates;
}

HttpCertificates::HttpCertificates(access::ReloadedTls* material) : material_(material) {}

HttpCertificates::~HttpCertificates() = default;

void HttpCertificates::ServeThisThread() { of_this_thread = this; }

absl::Status HttpCertificates::Parse(const std::shared_ptr<const access::TlsMaterial>& material) {
  auto parsed = std::make_unique<Parsed>();
  const gnutls_datum_t chain = Datum(material->certificate_chain);
  const gnutls_datum_t key = Datum(material->key);
  unsigned count = kMaxChain;
  int error = gnutls_pcert_list_import_x509_raw(parsed->chain, &count, &chain, GNUTLS_X509_FMT_PEM, 0);
  if (error < 0)
    return absl::InvalidArgumentError(absl::StrCat("tls_cert: GnuTLS says: ", gnutls_strerror(error)));
  parsed->count = count;
  error = gnutls_privkey_init(&parsed->key);
  if (error == 0) error = gnutls_privkey_import_x509_raw(parsed->key, &key, GNUTLS_X509_FMT_PEM, nullptr, 0);
  if (error < 0)
    return absl::InvalidArgumentError(absl::StrCat("tls_key: GnuTLS says: ", gnutls_strerror(error)));
  const absl::Time now = clocks::SteadyNow();
  if (!parsed_.empty()) parsed_.back()->replaced = now;
  parsed_.push_back(std::move(parsed));
  while (parsed_.front()->replaced + kKept < now) parsed_.pop_front();
  return absl::OkStatus();
}

const HttpCertificates::Parsed& HttpCertificates::Current() {
  const std::shared_ptr<const access::TlsMaterial> now = material_->Get();
  if (now != seen_) {
    seen_ = now;
    if (absl::Status status = Parse(now); !status.ok()) {
      log::Log(log::LogLevel::kError, "HTTP keeps its earlier certificate", {{"error", status.message()}});
    }
  }
  return *parsed_.back();
}

int HttpCertificates::Retrieve(gnutls_session_t, const gnutls_datum_t*, int, const gnutls_pk_algorithm_t*,
                               int, gnutls_pcert_st** certificates, unsigned* certificate_count,
                               gnutls_privkey_t* key) {
  if (of_this_thread == nullptr) return -1;
  const Parsed& current = of_this_thread->Current();
  *certificates = const_cast<gnutls_pcert_st*>(current.chain);
  *certificate_count = current.count;
  *key = current.key;
  return 0;
}

}  // namespace lossd::metrics
