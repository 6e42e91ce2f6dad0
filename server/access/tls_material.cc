// SPDX-License-Identifier: Apache-2.0
#include "server/access/tls_material.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lossd::access {
namespace {

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Bio = std::unique_ptr<BIO, Free>;
using Certificate = std::unique_ptr<X509, Free>;
using Key = std::unique_ptr<EVP_PKEY, Free>;

Bio BioOf(absl::string_view text) { return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size()))); }

// A password is not asked for: a server has no one at its terminal.
int NoPassword(char*, int, int, void*) { return -1; }

absl::StatusOr<std::vector<Certificate>> ParseCertificates(const AccessFile& file, absl::string_view text) {
  std::vector<Certificate> certificates;
  const Bio bio = BioOf(text);
  ERR_clear_error();
  while (X509* const next = PEM_read_bio_X509(bio.get(), nullptr, &NoPassword, nullptr)) {
    certificates.emplace_back(next);
  }
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (certificates.empty() || !at_end)
    return AccessFileError(file, "hold certificates in PEM form and nothing that is damaged");
  return certificates;
}

absl::StatusOr<Key> ParseKey(const AccessFile& file, absl::string_view text) {
  Key key(PEM_read_bio_PrivateKey(BioOf(text).get(), nullptr, &NoPassword, nullptr));
  ERR_clear_error();
  if (key == nullptr) return AccessFileError(file, "hold a private key in PEM form without a password");
  return key;
}

void WarnOfDates(const AccessFile& file, const Certificate& certificate) {
  const bool early = X509_cmp_current_time(X509_get0_notBefore(certificate.get())) > 0;
  const bool late = X509_cmp_current_time(X509_get0_notAfter(certificate.get())) < 0;
  if (!early && !late) return;
  log::Log(log::LogLevel::kWarning, late ? "the certificate has expired" : "the certificate is not valid yet",
           {{"flag", file.flag}, {"path", file.path}});
}

absl::Time FirstExpiry(const std::vector<Certificate>& certificates) {
  absl::Time first = absl::InfiniteFuture();
  for (const Certificate& certificate : certificates) {
    std::tm utc = {};
    if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &utc) != 1) continue;
    first = std::min(first, absl::FromTM(utc, absl::UTCTimeZone()));
  }
  return first;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TlsMaterial>> ReadTlsMaterial(const TlsFiles& files) {
  absl::StatusOr<std::string> chain = ReadAccessFile(files.certificate, Secrecy::kPublic);
  if (!chain.ok()) return chain.status();
  absl::StatusOr<std::string> key_text = ReadAccessFile(files.key, Secrecy::kSecret);
  if (!key_text.ok()) return key_text.status();
  const absl::StatusOr<std::vector<Certificate>> certificates = ParseCertificates(files.certificate, *chain);
  if (!certificates.ok()) return certificates.status();
  const absl::StatusOr<Key> key = ParseKey(files.key, *key_text);
  if (!key.ok()) return key.status();
  if (X509_check_private_key(certificates->front().get(), key->get()) != 1) {
    ERR_clear_error();
    return AccessFileError(files.key, "be the key of the first certificate of tls_cert");
  }
  WarnOfDates(files.certificate, certificates->front());
  absl::Time expires = FirstExpiry(*certificates);
  std::string authorities;
  if (!files.client_authorities.path.empty()) {
    absl::StatusOr<std::string> text = ReadAccessFile(files.client_authorities, Secrecy::kPublic);
    if (!text.ok()) return text.status();
    const auto parsed = ParseCertificates(files.client_authorities, *text);
    if (!parsed.ok()) return parsed.status();
    expires = std::min(expires, FirstExpiry(*parsed));
    authorities = *std::move(text);
  }
  return std::make_shared<const TlsMaterial>(TlsMaterial{.certificate_chain = *std::move(chain),
                                                         .key = *std::move(key_text),
                                                         .client_authorities = std::move(authorities),
                                                         .expires = expires});
}

absl::Time FirstEnd(absl::string_view pem) {
  const auto certificates = ParseCertificates({"", ""}, pem);
  return certificates.ok() ? FirstExpiry(*certificates) : absl::InfinitePast();
}

absl::StatusOr<std::unique_ptr<ReloadedTls>> WatchTlsMaterial(const TlsFiles& files) {
  std::vector<std::string> paths = {files.certificate.path, files.key.path};
  if (!files.client_authorities.path.empty()) paths.push_back(files.client_authorities.path);
  return ReloadedTls::Create("certificates", std::move(paths), [files] { return ReadTlsMaterial(files); });
}

}  // namespace lossd::access
