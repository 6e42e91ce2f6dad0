// SPDX-License-Identifier: Apache-2.0
#include "server/access/handshake_guard.h"

#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <memory>
#include <mutex>

namespace lossd::access {
namespace {

struct FreeNames {
  void operator()(GENERAL_NAMES* names) const { GENERAL_NAMES_free(names); }
};

// Whether it can be written as UTF-8.
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

// TLS 1.3 sends tickets all the same, and a context takes their number later than it calls back.
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
    return critical == -1;  // there are none; else they are malformed, or there more than once
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
