// SPDX-License-Identifier: Apache-2.0
#include "server/access/certificates.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/sha.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include <algorithm>
#include <ctime>
#include <mutex>

namespace lossd::access {

// ---- Ends of certificates ----

absl::Time CertificateEnds::Find(absl::string_view pem) {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(pem.data()), pem.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  {
    absl::MutexLock lock(&mutex_);
    if (const auto found = ends_.find(digest); found != ends_.end()) return found->second;
  }
  const absl::Time end = FirstEnd(pem);
  absl::MutexLock lock(&mutex_);
  if (ends_.size() >= kMost) ends_.clear();
  ends_.emplace(std::move(digest), end);
  return end;
}

// ---- Stamps of files ----

namespace {

int64_t Nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + int64_t{time.tv_nsec};
}

}  // namespace

FileStamps StampsOf(const std::vector<std::string>& paths) {
  FileStamps stamps;
  for (const std::string& path : paths) {
    struct stat info = {};
    FileStamp stamp;
    if (stat(path.c_str(), &info) == 0) {
      stamp = {.device = info.st_dev,
               .inode = info.st_ino,
               .size = int64_t{info.st_size},
               .modified = Nanoseconds(info.st_mtim),
               .changed = Nanoseconds(info.st_ctim)};
    }
    stamps.push_back(stamp);
  }
  return stamps;
}

// ---- The server's certificate and key ----

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

// A password callback that gives none, so that OpenSSL does not ask on the terminal.
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
  LOSSD_TRY(std::string chain, ReadAccessFile(files.certificate, Secrecy::kPublic));
  LOSSD_TRY(std::string key_text, ReadAccessFile(files.key, Secrecy::kSecret));
  LOSSD_TRY(const std::vector<Certificate> certificates, ParseCertificates(files.certificate, chain));
  LOSSD_TRY(const Key key, ParseKey(files.key, key_text));
  if (X509_check_private_key(certificates.front().get(), key.get()) != 1) {
    ERR_clear_error();
    return AccessFileError(files.key, "be the key of the first certificate of tls_cert");
  }
  WarnOfDates(files.certificate, certificates.front());
  absl::Time expires = FirstExpiry(certificates);
  std::string authorities;
  if (!files.client_authorities.path.empty()) {
    LOSSD_TRY(std::string text, ReadAccessFile(files.client_authorities, Secrecy::kPublic));
    LOSSD_TRY(const auto parsed, ParseCertificates(files.client_authorities, text));
    expires = std::min(expires, FirstExpiry(parsed));
    authorities = std::move(text);
  }
  return std::make_shared<const TlsMaterial>(TlsMaterial{.certificate_chain = std::move(chain),
                                                         .key = std::move(key_text),
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

// ---- Handshakes ----

namespace {

struct FreeNames {
  void operator()(GENERAL_NAMES* names) const { GENERAL_NAMES_free(names); }
};

// Whether the string can be converted to UTF-8.
bool IsText(const ASN1_STRING* string) {
  unsigned char* text = nullptr;
  const int length = ASN1_STRING_to_UTF8(&text, string);
  OPENSSL_free(text);
  return length >= 0;
}

bool IsSound(const GENERAL_NAME& name) {
  switch (name.type) {
    case GEN_DNS:
    case GEN_EMAIL:
    case GEN_URI:
      return IsText(name.d.ia5);
    case GEN_IPADD:
      return ASN1_STRING_length(name.d.ip) == 4 || ASN1_STRING_length(name.d.ip) == 16;
    default:
      return true;
  }
}

bool HasSoundSubject(X509* certificate) {
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  for (int i = 0; i < X509_NAME_entry_count(subject); ++i) {
    if (!IsText(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, i)))) return false;
  }
  return true;
}

int Verify(X509_STORE_CTX* context, void*) {
  X509* const certificate = X509_STORE_CTX_get0_cert(context);
  if (certificate != nullptr && !HasSoundNames(certificate)) {
    X509_STORE_CTX_set_error(context, X509_V_ERR_APPLICATION_VERIFICATION);
    return 0;
  }
  return X509_verify_cert(context);
}

void OnContext(void* parent, void*, CRYPTO_EX_DATA*, int, long, void*) {
  auto* const context = static_cast<SSL_CTX*>(parent);
  SSL_CTX_set_cert_verify_callback(context, &Verify, nullptr);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
}

// Turns off the tickets of TLS 1.3, which are sent even without a session cache. This cannot be set for the
// context, because its number of tickets is set after its callback.
void OnConnection(void* parent, void*, CRYPTO_EX_DATA*, int, long, void*) {
  SSL_set_num_tickets(static_cast<SSL*>(parent), 0);
}

}  // namespace

bool HasSoundNames(X509* certificate) {
  if (!HasSoundSubject(certificate)) return false;
  int critical = 0;
  const std::unique_ptr<GENERAL_NAMES, FreeNames> names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, &critical, nullptr)));
  if (names == nullptr)
    return critical == -1;  // -1: the extension is absent; else it is malformed, or there is more than one
  for (int i = 0; i < sk_GENERAL_NAME_num(names.get()); ++i) {
    if (!IsSound(*sk_GENERAL_NAME_value(names.get(), i))) return false;
  }
  return true;
}

void GuardHandshakes() {
  static std::once_flag once;
  std::call_once(once, [] {
    SSL_CTX_get_ex_new_index(0, nullptr, &OnContext, nullptr, nullptr);
    SSL_get_ex_new_index(0, nullptr, &OnConnection, nullptr, nullptr);
  });
}

}  // namespace lossd::access
